// Slots in files: area a lies in slab a / slots_per_slab.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "store/file_system.h"

namespace lmdecode::store {

// Any number of threads may call; two never write the same area.
class SlabFiles {
 public:
  SlabFiles(FileSystem& file_system, const std::string& directory, uint64_t slot_bytes,
            uint32_t slots_per_slab, bool readonly);

  // Within an area. 0 or -errno.
  int read(uint32_t area, uint64_t offset, void* data, size_t size);
  // As File::cached().
  const uint8_t* cached(uint32_t area, uint64_t offset, size_t size);
  void leave_cached();
  int write(uint32_t area, const void* data, size_t size);
  // All that was written before the call survives a loss of power. After an error nobody knows: it
  // is returned from then on.
  int sync();
  // The next sync() takes all files for written: another process may not have synced them.
  int doubt_all();
  // Gives the space of an area that nothing refers to back. 0 or -errno.
  int discard(uint32_t area);
  // Gives the space from this area on back to the operating system.
  int truncate(uint32_t areas);

  std::string path(uint32_t slab) const;

 private:
  std::shared_ptr<File> file(uint32_t slab, int* error);

  FileSystem& file_system_;
  const std::string directory_;
  const uint64_t slot_bytes_;
  const uint32_t slots_per_slab_;
  const bool readonly_;
  std::mutex sync_mutex_;  // held during a sync: one that begins meanwhile must not end before it
  int sync_error_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<File>> files_;
  std::set<uint32_t> unsynced_;
  bool names_unsynced_ = false;
};

}  // namespace lmdecode::store
