#include "store/index_reserve.h"

#include <algorithm>
#include <vector>

namespace lmdecode::store {

int IndexReserve::fill() {
  const std::lock_guard lock(mutex_);
  if (held_ >= bytes_) return 0;
  int error = 0;
  const auto file = file_system_.open(path_, OpenMode::kCreate, &error);
  if (file == nullptr) return -error;
  const int64_t size = file->size();
  if (size < 0) return static_cast<int>(size);
  held_ = std::min<uint64_t>(bytes_, static_cast<uint64_t>(size));
  // Not zeros: a file system that compresses would keep no space for them.
  std::vector<uint8_t> content(std::min<uint64_t>(bytes_ - held_, uint64_t{1} << 16));
  uint64_t state = 0x9e3779b97f4a7c15;
  for (uint8_t& byte : content) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<uint8_t>(state >> 56);
  }
  while (held_ < bytes_) {
    const uint64_t most = std::min<uint64_t>(content.size(), bytes_ - held_);
    const int64_t put = file->write(held_, content.data(), most);
    if (put <= 0) return put < 0 ? static_cast<int>(put) : -EIO;
    held_ += static_cast<uint64_t>(put);
  }
  return 0;
}

bool IndexReserve::release() {
  const std::lock_guard lock(mutex_);
  int error = 0;
  const auto file = file_system_.open(path_, OpenMode::kWrite, &error);
  if (file == nullptr || file->size() <= 0 || file->truncate(0) != 0) return false;
  held_ = 0;
  return true;
}

}  // namespace lmdecode::store
