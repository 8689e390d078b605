// Space that the index has to itself on a full disk: a file of bytes that mean nothing. What the
// index needs then is taken from it, and it is filled again from slots that are given up.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "store/file_system.h"

namespace lmdecode::store {

// Any number of threads may call.
class IndexReserve {
 public:
  IndexReserve(FileSystem& file_system, std::string path, uint64_t bytes)
      : file_system_(file_system), path_(std::move(path)), bytes_(bytes) {}

  // As far as there is space. 0 or -errno; what was written before an error stays.
  int fill();
  // Gives all of it to the disk. False: there was nothing.
  bool release();
  uint64_t missing() const { return bytes_ - held_; }

 private:
  FileSystem& file_system_;
  const std::string path_;
  const uint64_t bytes_;
  std::mutex mutex_;  // the committing thread gives, others take
  std::atomic<uint64_t> held_{0};
};

}  // namespace lmdecode::store
