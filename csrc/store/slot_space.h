// Room for new slots: free areas, expired entries, least recently used entries, and on a full disk
// the space of evicted entries.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/file_system.h"
#include "store/free_areas.h"
#include "store/group_commit.h"
#include "store/prefix_index.h"
#include "store/slab_files.h"
#include "store/store_types.h"

namespace lmdecode::store {

// Disk space reserved for the index: a file of meaningless bytes. On a full disk the index takes
// its space from it; the file is filled again from slots that are given up. Thread-safe.
class IndexReserve {
 public:
  IndexReserve(FileSystem& file_system, std::string path, uint64_t bytes)
      : file_system_(file_system), path_(std::move(path)), bytes_(bytes) {}

  // Fills the file as far as there is space. 0 or -errno; bytes written before an error stay.
  int fill();
  // Returns all of it to the disk. False: it was empty.
  bool release();
  uint64_t missing() const { return bytes_ - held_; }

 private:
  FileSystem& file_system_;
  const std::string path_;
  const uint64_t bytes_;
  std::mutex mutex_;  // the committing thread gives, others take
  std::atomic<uint64_t> held_{0};
};

// All under the engine's mutex, which it releases while it commits.
class SlotSpace {
 public:
  using Lock = GroupCommit::Lock;

  SlotSpace(const StoreOptions& options, const SlotLayout& layout, FileSystem& file_system,
            PrefixIndex& prefixes, GroupCommit& commits, StoreStats& stats)
      : options_(options),
        layout_(layout),
        file_system_(file_system),
        prefixes_(prefixes),
        commits_(commits),
        stats_(stats),
        index_reserve_(file_system, options.directory + "/reserve", options.index_reserve_bytes) {}
  void start(SlabFiles& slabs) { slabs_ = &slabs; }

  uint32_t capacity() const;  // areas
  FreeAreas& free_areas() { return free_areas_; }
  IndexReserve& index_reserve() { return index_reserve_; }

  // --- entries that go

  // Removes an entry without children; its area is free once the deletion is durable.
  void free_entry(EntryId id);
  void drop_subtree(EntryId id);
  uint64_t drop_expired();
  // Frees areas whose deletion is durable.
  void take_freed(const std::vector<uint32_t>& areas);

  // Freed areas are not handed out until each hold has ended: a backup copies.
  void hold() { ++holds_; }
  void end_hold();
  bool is_held() const { return holds_ > 0; }
  uint64_t held() const { return held_.size(); }

  // --- areas for a put

  // Returns up to `wanted` free areas; evicts entries if needed, and waits until that is durable.
  std::vector<uint32_t> allocate(Lock& lock, uint64_t wanted, uint64_t tenant, uint64_t quota);
  // Evicts ahead of the next put. The deletions go with the next commit, the caller's.
  void keep_reserve();
  // The area could not be written: returns its space to the disk.
  void refuse(uint32_t area);

  // --- a full disk

  // Whether the last write to a new slot found no space.
  bool disk_is_full() const { return disk_is_full_; }
  void note_full_disk();
  // Updates disk_is_full(): room for twice `bytes` clears it, an index reserve that cannot be
  // filled sets it.
  void look_for_space(uint64_t bytes);
  // Returns `bytes` to the disk from free slots, then from the least recently used entries.
  // trusts_disk: its reported free space counts, too.
  void pool_space(Lock& lock, uint64_t bytes, bool trusts_disk);
  bool make_room_for_index(IndexDatabase& index, int attempt);
  // Size of a slot on disk, in whole blocks of most file systems.
  uint64_t space_of(uint32_t count, uint32_t usable_from) const {
    return (layout_.image_bytes(count, usable_from) + 4095) / 4096 * 4096;
  }
  // As StoreEngine's.
  std::optional<int64_t> oldest_use() const;
  uint64_t give_space_back(Lock& lock, uint64_t bytes, int64_t used_until_ms);

  void note_stored(bool is_all, bool lacked_space);
  const std::string& no_space() const { return no_space_; }  // the message for failure()

 private:
  // Entries evicted by an allocation; restored if the deletion cannot be made durable.
  using Evicted = std::vector<AreaRow>;
  enum class Wanted { kYes, kNo, kNoMore };
  using IsWanted = std::function<Wanted(const Entry& entry)>;

  int64_t now() const { return options_.now_ms(); }
  bool is_evictable(const Entry& entry) const;
  uint64_t evict_while(const IsWanted& is_wanted, Evicted* evicted);
  uint64_t evict(uint64_t wanted, const uint64_t* tenant, Evicted* evicted = nullptr);
  uint64_t evict_bytes(uint64_t bytes, int64_t used_until_ms, Evicted* evicted);
  void restore(Evicted evicted);
  uint64_t reserve() const;
  void feed_reserve();
  uint64_t areas_for_reserve() const;
  bool discard(const std::vector<uint32_t>& areas);

  const StoreOptions& options_;
  const SlotLayout& layout_;
  FileSystem& file_system_;
  PrefixIndex& prefixes_;
  GroupCommit& commits_;
  StoreStats& stats_;
  SlabFiles* slabs_ = nullptr;
  IndexReserve index_reserve_;
  FreeAreas free_areas_;
  uint32_t holds_ = 0;
  std::vector<uint32_t> held_;
  bool disk_is_full_ = false;
  bool can_discard_ = true;  // the file system takes space back
  std::string no_space_;
};

}  // namespace lmdecode::store
