// The store: slots in slab files, an index in SQLite, and in memory the same index and the queues
// of free areas. docs/reference/store.md has the guarantees, docs/reference/store_format.md the
// format on disk.
//
// Thread-safe. One process at a time writes a directory, any number read it. All functions throw
// std::invalid_argument for invalid arguments and StoreError for other errors, before anything is
// changed. A miss, a full disk or a damaged slot is a result, not an exception.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "store/group_commit.h"
#include "store/index_database.h"
#include "store/prefix_index.h"
#include "store/slab_files.h"
#include "store/slot_layout.h"
#include "store/slot_space.h"
#include "store/store_error.h"
#include "store/store_types.h"
#include "store/token_chain.h"

namespace lmdecode::store {

// Page-aligned memory that is reused from slot to slot: the kernel and vector instructions are
// slower across cache lines. Its content is undefined after a change of size.
class StagingBuffer {
 public:
  std::span<uint8_t> resized(size_t size) {
    if (size > size_) {
      bytes_.reset(static_cast<uint8_t*>(::operator new(size, kPage)));
      size_ = size;
    }
    return {bytes_.get(), size};
  }

 private:
  static constexpr std::align_val_t kPage{4096};
  struct Delete {
    void operator()(uint8_t* bytes) const { ::operator delete(bytes, kPage); }
  };
  std::unique_ptr<uint8_t, Delete> bytes_;
  size_t size_ = 0;
};

class StoreEngine;

// A stored entry, and the tokens of it that a hit uses.
struct HitPart : Chunk {
  EntryId id;
  uint32_t take;  // of its tokens
};

// The longest stored prefix of the given tokens. It is not evicted during the lifetime of the hit.
class Hit {
 public:
  Hit() = default;
  ~Hit();
  Hit(const Hit&) = delete;
  Hit& operator=(const Hit&) = delete;
  Hit(Hit&& other) noexcept;
  Hit& operator=(Hit&& other) noexcept;

  uint64_t num_tokens() const { return tokens_.size(); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<HitPart>& parts() const { return parts_; }

  // Checksums of a part's planes, from a header already checked for other layers; nothing if there
  // is none yet. Thread-safe.
  std::optional<std::vector<uint32_t>> plane_crcs(size_t part) const;
  void keep_plane_crcs(size_t part, const std::vector<uint32_t>& crcs);

 private:
  friend class StoreEngine;
  std::shared_ptr<StoreEngine> engine_;
  std::vector<int32_t> tokens_;
  std::vector<HitPart> parts_;
  struct Checked {
    std::mutex mutex;
    std::vector<std::optional<std::vector<uint32_t>>> plane_crcs;
  };
  std::unique_ptr<Checked> checked_;
};

// A chunk to write in a put.
struct Step {
  uint64_t begin;
  uint32_t count;
  uint32_t usable_from;
  Digest key;
  Digest parent;
};

class StoreEngine : public std::enable_shared_from_this<StoreEngine> {
 public:
  static std::shared_ptr<StoreEngine> open(const StoreOptions& options);
  ~StoreEngine();
  StoreEngine(const StoreEngine&) = delete;
  StoreEngine& operator=(const StoreEngine&) = delete;

  const SlotLayout& layout() const { return layout_; }
  const StoreOptions& options() const { return options_; }

  // --- prefixes (store_load.cpp, store_put.cpp)

  Hit lookup(const Scope& scope, std::span<const int32_t> tokens);
  // The same, but it does not count as a use, neither for eviction nor in stats().
  Hit peek(const Scope& scope, std::span<const int32_t> tokens);
  // Reads the layers' planes, keys and values in turn, into memory of the caller: the last
  // num_tokens tokens of the hit; for a layer with a window the last window - 1. False: a slot
  // does not match the index, and was dropped with all that continue it; or it cannot be read now;
  // or the call was stopped. Then the content of the planes is undefined.
  bool load(Hit& hit, uint32_t first_layer, uint32_t num_layers,
            std::span<const TensorPlane> planes, const GoesOn& goes_on = nullptr);
  // Stores the part of the prefix that is not stored yet. Returns the number of leading tokens that
  // are now stored, in strict mode durably: fewer than all if there is no room or the disk fails.
  uint64_t put(const Scope& scope, std::span<const int32_t> tokens,
               std::span<const TensorPlane> planes, const PutOptions& options);
  void pin(const Hit& hit, bool pinned);

  // --- whole entries, for a second tier (store_transfer.cpp)

  // Entries of the hit that still exist, parents first.
  std::vector<AreaRow> entries_of(const Hit& hit);
  // Reads the hit's index-th entry, layout().image_bytes(count) bytes, every byte checked. False:
  // as for load().
  bool read_image(const Hit& hit, size_t index, std::span<uint8_t> image);
  // Stores an image of another store's read_image() as the entry with this key, whose parent is
  // stored. Nothing in the image is trusted. Overwrites the image. True: the entry is stored,
  // durably after the next commit.
  bool insert_image(const Scope& scope, const Digest& key, std::span<uint8_t> image,
                    const PutOptions& options);

  // --- sessions (store_engine.cpp)

  // Tokens of the session; nothing if there is none. Throws StoreError kDamaged.
  std::optional<std::vector<int32_t>> read_session(const Scope& scope, const std::string& name);
  // put() of the first `num_computed` tokens and the session's tokens in one transaction; 0 if
  // that failed.
  uint64_t commit_session(const Scope& scope, const std::string& name,
                          std::span<const int32_t> tokens, uint64_t num_computed,
                          std::span<const TensorPlane> planes, const PutOptions& options);
  // The tokens alone; false if the store declines to write.
  bool write_session(const Scope& scope, const std::string& name, std::span<const int32_t> tokens);
  bool remove_session(const Scope& scope, const std::string& name);
  std::vector<SessionRow> list_sessions();

  // --- erasing (store_erase.cpp)

  // Erases, of this tenant: the entries of the tokens' prefix and those that continue the tokens; a
  // session with the entries of its tokens; or everything, if both are null. Entries that other
  // sessions need are kept, except those that continue the tokens. When it returns, erased entries
  // are no longer found, and they are overwritten, as are free slots that held an earlier stage of
  // them. Returns the number of entries. Throws std::invalid_argument for an unknown session,
  // StoreError if the erasure cannot be made durable.
  uint64_t erase(const Scope& scope, const std::vector<int32_t>* tokens,
                 const std::string* session);
  // Returns which entries of another store the same call would erase, by the headers of their
  // images. All have one root: the root of the scope, if tokens or a session are given.
  std::vector<bool> erases(const Scope& scope, const std::vector<int32_t>* tokens,
                           const std::string* session,
                           const std::vector<std::vector<uint8_t>>& headers);
  // Roots of this tenant's entries that are still known here, and the root of the scope.
  std::vector<Digest> roots(const Scope& scope);

  // --- upkeep (store_engine.cpp, store_transfer.cpp)

  // True: all acknowledged entries are durable.
  bool flush();
  void close();
  // Drops expired entries and frees disk space. Returns the number of entries dropped.
  uint64_t collect();
  // Time of the last use of the next entry to evict; nothing if none can be evicted.
  std::optional<int64_t> oldest_use();
  // Returns the space of free slots to the file system, and evicts the least recently used entries
  // until their size reaches a number of bytes, or the next one was used after a given time.
  // Returns the size of the evicted entries. If the file system cannot take space back, it evicts
  // none and returns 0.
  uint64_t give_space_back(uint64_t bytes, int64_t used_until_ms);
  VerifyReport verify(const Progress& progress);
  void backup(const std::string& directory, const Progress& progress);
  void export_to(const std::string& path, const Scope* scope, const std::string& session,
                 const Progress& progress);
  // Returns the number of entries that are new.
  uint64_t import_from(const std::string& path, const Progress& progress);
  StoreStats stats();
  std::vector<AreaRow> entries();  // parents before their continuations
  // Why the store no longer writes, or that the disk had no space for the last put. Empty: the
  // store writes.
  std::string failure();
  Digest root(const Scope& scope) const;

 private:
  friend class Hit;
  explicit StoreEngine(const StoreOptions& options);
  using Lock = GroupCommit::Lock;

  // A call that uses files and releases the mutex in between: close() waits for it.
  class Activity {
   public:
    Activity(StoreEngine& engine, Lock& lock);
    ~Activity();
    Activity(const Activity&) = delete;
    Activity& operator=(const Activity&) = delete;

   private:
    StoreEngine& engine_;
    Lock& lock_;
  };

  // store_engine.cpp
  void open_files();
  void check_usable() const;
  void require_writer() const;
  // What acknowledged changes survive.
  Survives survives() const { return options_.relaxed ? Survives::kKill : Survives::kPowerLoss; }
  void recover_unsynced();
  void load_index();
  void refresh();
  void wait_for_commit(Lock& lock);
  void touch(EntryId leaf);
  void close_locked(Lock& lock);
  void run_flush_timer();
  void record_session(Lock& lock, const Digest& root, uint64_t tenant, const std::string& name,
                      std::span<const int32_t> tokens);
  int64_t now() const { return options_.now_ms(); }
  PrefixKeys keys_of(const Digest& root, std::span<const int32_t> tokens) const {
    return {root, tokens, layout_.chunk_tokens};
  }

  // store_erase.cpp
  class ErasedSlots;
  void settle(Lock& lock);
  void collect_erased(EntryId parent, ErasedSlots& slots, std::vector<EntryId>* found);
  std::vector<uint32_t> take_stale(Lock& lock, ErasedSlots* slots);
  void overwrite(Lock& lock, const std::vector<uint32_t>& areas);

  // store_load.cpp
  Hit hit_of(const PrefixChain& chain, std::span<const int32_t> tokens);
  void release(const HitPart& part);
  std::optional<std::vector<int32_t>> read_tokens(const Entry& entry);
  void drop_damaged(const HitPart& part);

  // store_put.cpp
  // False: the disk had no space for all of it.
  bool put_locked(Lock& lock, PrefixKeys& keys, uint64_t tenant,
                  std::span<const TensorPlane> planes, const PutOptions& options);
  uint64_t acknowledge(Lock& lock, PrefixKeys& keys, bool had_space);
  std::vector<Step> plan(PrefixKeys& keys, std::span<const TensorPlane> planes,
                         const PutOptions& options, EntryId* anchor);
  void renew(EntryId id, const PutOptions& options);
  bool publish(const Step& step, uint32_t area, uint32_t header_crc, uint64_t tenant,
               const PutOptions& options, std::span<const int32_t> tokens);
  void drop_superseded(EntryId id, EntryId parent, std::span<const int32_t> tokens);

  // store_transfer.cpp
  bool place_image(Lock& lock, SlotHeader& header, std::span<uint8_t> image,
                   const PutOptions& options);
  std::vector<AreaRow> chain_rows(const Scope& scope, const std::string& session);
  void import_session(Lock& lock, std::span<const uint8_t> content);

  StoreOptions options_;
  SlotLayout layout_;
  uint64_t slot_bytes_ = 0;
  uint32_t slots_per_slab_ = 0;
  FileSystem& file_system_;
  const int process_;
  StoreStats stats_{};

  std::mutex mutex_;  // guards all that follows, up to the next comment
  std::unique_ptr<File> writer_lock_;
  std::unique_ptr<SlabFiles> slabs_;
  std::unique_ptr<IndexDatabase> index_;  // a writer's is the committing thread's while it commits
  PrefixIndex prefixes_;
  GroupCommit commits_;
  SlotSpace space_;
  std::map<std::pair<Digest, std::string>, std::vector<int32_t>> sessions_;
  bool closed_ = false;
  uint32_t active_ = 0;  // of Activity
  bool stopping_ = false;
  std::condition_variable idle_;
  std::condition_variable timer_;
  std::thread flush_thread_;
};

// Returns the header if it matches the index.
std::optional<SlotHeader> check_header(const SlotLayout& layout, const Chunk& chunk,
                                       std::span<const uint8_t> bytes);
// Reads a slot and checks every byte; nothing if it is damaged or unreadable (*error is -errno).
std::optional<SlotHeader> read_whole(const SlotLayout& layout, SlabFiles& slabs, const Chunk& chunk,
                                     std::span<uint8_t> image, int* error);
// Throws StoreError kDamaged for an image that no store of this layout could have written.
SlotHeader check_image(const SlotLayout& layout, std::span<const uint8_t> image);

// Layers with a window may have more tokens than they need, or exactly these. Throws
// std::invalid_argument.
void check_planes(const SlotLayout& layout, std::span<const TensorPlane> planes,
                  uint32_t first_layer, uint32_t num_layers, uint64_t num_tokens, bool exactly);
// Throws std::invalid_argument if an id is below 0.
void check_token_ids(std::span<const int32_t> tokens);

// Calls body(i) for i in [0, size), on up to `threads` threads. body must not throw. Once goes_on
// returns false, no further i is started.
void parallel_items(size_t size, int threads, const std::function<void(size_t)>& body,
                    const GoesOn& goes_on);

}  // namespace lmdecode::store
