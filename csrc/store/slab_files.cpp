#include "store/slab_files.h"

#include <cerrno>
#include <cstdio>

namespace lmdecode::store {

SlabFiles::SlabFiles(FileSystem& file_system, const std::string& directory, uint64_t slot_bytes,
                     uint32_t slots_per_slab, bool readonly)
    : file_system_(file_system),
      directory_(directory),
      slot_bytes_(slot_bytes),
      slots_per_slab_(slots_per_slab),
      readonly_(readonly) {}

std::string SlabFiles::path(uint32_t slab) const {
  char name[32];
  std::snprintf(name, sizeof(name), "/slab-%05u", slab);
  return directory_ + name;
}

std::shared_ptr<File> SlabFiles::file(uint32_t slab, int* error) {
  const std::lock_guard lock(mutex_);
  if (slab >= files_.size()) files_.resize(slab + 1);
  if (files_[slab] == nullptr) {
    const OpenMode mode = readonly_ ? OpenMode::kRead : OpenMode::kCreate;
    if (!readonly_ && !file_system_.exists(path(slab))) names_unsynced_ = true;
    files_[slab] = file_system_.open(path(slab), mode, error);
  }
  return files_[slab];
}

int SlabFiles::read(uint32_t area, uint64_t offset, void* data, size_t size) {
  int error = 0;
  const auto slab = file(area / slots_per_slab_, &error);
  if (slab == nullptr) return -error;
  return read_all(*slab, area % slots_per_slab_ * slot_bytes_ + offset, data, size);
}

const uint8_t* SlabFiles::cached(uint32_t area, uint64_t offset, size_t size) {
  int error = 0;
  const auto slab = file(area / slots_per_slab_, &error);
  if (slab == nullptr) return nullptr;
  return slab->cached(area % slots_per_slab_ * slot_bytes_ + offset, size,
                      slots_per_slab_ * slot_bytes_);
}

void SlabFiles::leave_cached() {
  const std::lock_guard lock(mutex_);
  for (const auto& file : files_) {
    if (file != nullptr) file->leave_cached();
  }
}

int SlabFiles::write(uint32_t area, const void* data, size_t size) {
  int error = 0;
  const auto slab = file(area / slots_per_slab_, &error);
  if (slab == nullptr) return -error;
  const uint64_t offset = area % slots_per_slab_ * slot_bytes_;
  const int result = write_all(*slab, offset, data, size);
  slab->start_writing(offset, size);  // while the next slot is filled
  // Not before: a sync that another thread makes meanwhile would take it for done.
  const std::lock_guard lock(mutex_);
  unsynced_.insert(area / slots_per_slab_);
  return result;
}

int SlabFiles::doubt_all() {
  for (uint32_t slab = 0; file_system_.exists(path(slab)); ++slab) {
    int error = 0;
    if (file(slab, &error) == nullptr) return -error;
    const std::lock_guard lock(mutex_);
    unsynced_.insert(slab);
    names_unsynced_ = true;
  }
  return 0;
}

int SlabFiles::sync() {
  const std::lock_guard sync_lock(sync_mutex_);
  if (sync_error_ != 0) return sync_error_;
  std::vector<std::shared_ptr<File>> files;
  bool names;
  {
    const std::lock_guard lock(mutex_);
    for (const uint32_t slab : unsynced_) files.push_back(files_[slab]);
    unsynced_.clear();
    names = names_unsynced_;
    names_unsynced_ = false;
  }
  for (const auto& file : files) {
    if (sync_error_ = file->sync(); sync_error_ != 0) return sync_error_;
  }
  if (names) sync_error_ = file_system_.sync_directory(directory_);
  return sync_error_;
}

int SlabFiles::discard(uint32_t area) {
  int error = 0;
  const auto slab = file(area / slots_per_slab_, &error);
  if (slab == nullptr) return -error;
  return slab->discard(area % slots_per_slab_ * slot_bytes_, slot_bytes_);
}

int SlabFiles::truncate(uint32_t areas) {
  const uint32_t first = areas / slots_per_slab_;
  for (uint32_t slab = first;; ++slab) {
    const uint64_t keep = slab == first ? areas % slots_per_slab_ * slot_bytes_ : 0;
    if (!file_system_.exists(path(slab))) return 0;
    int error = 0;
    const auto open = file(slab, &error);
    if (open == nullptr) return -error;
    const int64_t size = open->size();
    if (size < 0) return static_cast<int>(size);
    if (static_cast<uint64_t>(size) <= keep) continue;
    if (const int failed = open->truncate(keep); failed != 0) return failed;
    const std::lock_guard lock(mutex_);
    unsynced_.insert(slab);
  }
}

}  // namespace lmdecode::store
