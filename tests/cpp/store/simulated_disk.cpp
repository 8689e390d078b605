#include "simulated_disk.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "simulated_vfs.h"

namespace lmdecode::store {

void SimulatedFile::apply(const SimulatedWrite& write, std::vector<uint8_t>* bytes) {
  if (write.is_truncate) {
    bytes->resize(write.offset);
    return;
  }
  if (bytes->size() < write.offset + write.bytes.size()) {
    bytes->resize(write.offset + write.bytes.size());
  }
  std::copy(write.bytes.begin(), write.bytes.end(), bytes->begin() + write.offset);
}

void SimulatedFile::write(uint64_t offset, const uint8_t* data, size_t size) {
  pending.push_back({offset, std::vector<uint8_t>(data, data + size), false});
  apply(pending.back(), &visible);
  const size_t first = offset / kSector, end = (offset + size + kSector - 1) / kSector;
  if (blocks.size() < end) blocks.resize(end);
  take(first, end, true);
}

void SimulatedFile::truncate(uint64_t size) {
  pending.push_back({size, {}, true});
  apply(pending.back(), &visible);
  const size_t end = (size + kSector - 1) / kSector;
  take(end, blocks.size(), false);
  blocks.resize(end);
}

void SimulatedFile::take(size_t first, size_t end, bool is_taken) {
  for (size_t block = first; block < end; ++block) {
    if (blocks[block] == is_taken) continue;
    blocks[block] = is_taken;
    num_blocks += is_taken ? 1 : -1;
  }
}

// Whole sectors; it is not said whether a crash brings their content back.
void SimulatedFile::discard(uint64_t offset, uint64_t size) {
  const uint64_t end = std::min<uint64_t>(offset + size, visible.size());
  if (offset >= end) return;
  pending.push_back({offset, std::vector<uint8_t>(end - offset), false});
  apply(pending.back(), &visible);
  const size_t first = (offset + kSector - 1) / kSector;
  const size_t last = std::min<size_t>((offset + size) / kSector, blocks.size());
  take(first, last, false);
}

void SimulatedFile::sync() {
  for (const SimulatedWrite& write : pending) apply(write, &durable);
  pending.clear();
}

namespace {

class OpenFile : public File {
 public:
  OpenFile(SimulatedDisk& disk, SimulatedFilePointer file, std::string path)
      : disk_(disk), file_(std::move(file)), path_(std::move(path)) {}

  int64_t read(uint64_t offset, void* data, size_t size) override {
    int64_t got = 0;
    const int error = disk_.read(file_, offset, data, size, &got);
    return error != 0 ? error : got;
  }
  int64_t write(uint64_t offset, const void* data, size_t size) override {
    return disk_.write(file_, offset, data, size);
  }
  int sync() override { return disk_.sync(file_, path_); }
  int truncate(uint64_t size) override { return disk_.truncate(file_, size); }
  int discard(uint64_t offset, uint64_t size) override {
    return disk_.discard(file_, offset, size);
  }
  int64_t size() override {
    const std::lock_guard lock(disk_.mutex());
    return static_cast<int64_t>(file_->visible.size());
  }

 private:
  SimulatedDisk& disk_;
  SimulatedFilePointer file_;
  std::string path_;
};

}  // namespace

class LockedFile : public File {
 public:
  LockedFile(SimulatedDisk& disk, std::string path) : disk_(disk), path_(std::move(path)) {}
  ~LockedFile() override {
    const std::lock_guard lock(disk_.mutex_);
    disk_.locks_.erase(path_);
  }
  int64_t read(uint64_t, void*, size_t) override { return 0; }
  int64_t write(uint64_t, const void*, size_t) override { return -EBADF; }
  int sync() override { return 0; }
  int truncate(uint64_t) override { return 0; }
  int64_t size() override { return 0; }

 private:
  SimulatedDisk& disk_;
  std::string path_;
};

SimulatedDisk::SimulatedDisk() : vfs_(std::make_unique<SimulatedVfs>(*this)) {
  static std::atomic<int> boots{0};
  vfs_name_ = vfs_->name();
  boot_ = std::to_string(++boots);
}

SimulatedDisk::~SimulatedDisk() = default;

void SimulatedDisk::fail_from(FaultKind kind, uint64_t first, uint64_t count) {
  const std::lock_guard lock(mutex_);
  fault_ = kind;
  fault_first_ = first;
  fault_count_ = count;
  applicable_ = 0;
  faults_ = 0;
}

int SimulatedDisk::begin_call(FaultKind applicable, bool* short_write) {
  const std::lock_guard lock(mutex_);
  if (calls_ >= power_ends_at_) return -EIO;
  ++calls_;
  if (power_is_lost()) return -EIO;
  // EIO fits every call; no space and short writes fit writes, failed syncs fit syncs.
  const bool fits = fault_ == FaultKind::kInputOutput || fault_ == applicable ||
                    (fault_ == FaultKind::kShortWrite && applicable == FaultKind::kNoSpace);
  if (fault_ == FaultKind::kNone || !fits) return 0;
  const uint64_t number = applicable_++;
  if (number < fault_first_ || number - fault_first_ >= fault_count_) return 0;
  ++faults_;
  if (fault_ == FaultKind::kShortWrite) {
    if (short_write != nullptr) *short_write = true;
    return 0;
  }
  return fault_ == FaultKind::kNoSpace ? -ENOSPC : -EIO;
}

int SimulatedDisk::read(const SimulatedFilePointer& file, uint64_t offset, void* data, size_t size,
                        int64_t* got) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  const uint64_t end = std::min<uint64_t>(offset + size, file->visible.size());
  *got = end > offset ? static_cast<int64_t>(end - offset) : 0;
  if (*got > 0) std::memcpy(data, file->visible.data() + offset, static_cast<size_t>(*got));
  return 0;
}

int64_t SimulatedDisk::write(const SimulatedFilePointer& file, uint64_t offset, const void* data,
                             size_t size) {
  bool half = false;
  if (const int error = begin_call(FaultKind::kNoSpace, &half); error != 0) return error;
  if (half) size = (size + 1) / 2;
  const std::lock_guard lock(mutex_);
  if (limit_ != UINT64_MAX) {
    const uint64_t used = used_locked();
    uint64_t left = limit_ > used ? limit_ - used : 0;
    uint64_t end = offset;
    for (size_t block = offset / kSector; end < offset + size; ++block) {
      const bool is_there = block < file->blocks.size() && file->blocks[block];
      if (!is_there && left < kSector) break;
      if (!is_there) left -= kSector;
      end = std::min<uint64_t>(offset + size, (block + 1) * kSector);
    }
    size = end - offset;
    if (size == 0) return -ENOSPC;
  }
  file->write(offset, static_cast<const uint8_t*>(data), size);
  return static_cast<int64_t>(size);
}

int SimulatedDisk::discard(const SimulatedFilePointer& file, uint64_t offset, uint64_t size) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  file->discard(offset, size);
  return 0;
}

uint64_t SimulatedDisk::used_locked() const {
  uint64_t used = 0;
  for (const auto& [path, file] : names_) used += file->used();
  return used;
}

uint64_t SimulatedDisk::used_bytes() {
  const std::lock_guard lock(mutex_);
  return used_locked();
}

uint64_t SimulatedDisk::free_bytes(const std::string&) {
  const std::lock_guard lock(mutex_);
  if (limit_ == UINT64_MAX) return UINT64_MAX;
  const uint64_t used = used_locked();
  return limit_ > used ? limit_ - used : 0;
}

int SimulatedDisk::truncate(const SimulatedFilePointer& file, uint64_t size) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  file->truncate(size);
  return 0;
}

int SimulatedDisk::sync(const SimulatedFilePointer& file, const std::string& path) {
  if (sync_milliseconds_ > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(sync_milliseconds_));
  }
  if (const int error = begin_call(FaultKind::kFailedSync); error != 0) {
    // As Linux does: the pages count as clean, and the next sync says that all is well.
    const std::lock_guard lock(mutex_);
    if (!power_is_lost()) file->pending.clear();
    return error;
  }
  if (!ignored_syncs_.empty() && path.find(ignored_syncs_) != std::string::npos) return 0;
  const std::lock_guard lock(mutex_);
  file->sync();
  return 0;
}

SimulatedFilePointer SimulatedDisk::open_file(const std::string& path, bool create, int* error) {
  if (const int failed = begin_call(FaultKind::kNone); failed != 0) {
    *error = -failed;
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(path);
  if (found != names_.end()) return found->second;
  if (!create) {
    *error = ENOENT;
    return nullptr;
  }
  const auto file = std::make_shared<SimulatedFile>();
  names_[path] = file;
  pending_names_.push_back({path, file});
  return file;
}

std::unique_ptr<File> SimulatedDisk::open(const std::string& path, OpenMode mode, int* error) {
  auto file = open_file(path, mode == OpenMode::kCreate, error);
  return file == nullptr ? nullptr : std::make_unique<OpenFile>(*this, file, path);
}

int SimulatedDisk::make_directory(const std::string&) { return begin_call(FaultKind::kNone); }

int SimulatedDisk::rename(const std::string& from, const std::string& to) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  // A directory: all names below it.
  std::vector<std::pair<std::string, SimulatedFilePointer>> moved;
  for (const auto& [path, file] : names_) {
    if (path == from || path.rfind(from + "/", 0) == 0) moved.push_back({path, file});
  }
  if (moved.empty()) return -ENOENT;
  for (const auto& [path, file] : moved) {
    const std::string target = to + path.substr(from.size());
    names_.erase(path);
    names_[target] = file;
    pending_names_.push_back({path, nullptr});
    pending_names_.push_back({target, file});
  }
  return 0;
}

int SimulatedDisk::remove(const std::string& path) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  if (names_.erase(path) == 0) return -ENOENT;
  pending_names_.push_back({path, nullptr});
  return 0;
}

int SimulatedDisk::sync_directory(const std::string& path) {
  if (const int error = begin_call(FaultKind::kFailedSync); error != 0) return error;
  const std::lock_guard lock(mutex_);
  // Names in this directory, not below it.
  std::vector<SimulatedName> others;
  for (SimulatedName& name : pending_names_) {
    if (name.path.substr(0, name.path.rfind('/')) != path) {
      others.push_back(name);
    } else if (name.file == nullptr) {
      durable_names_.erase(name.path);
    } else {
      durable_names_[name.path] = name.file;
    }
  }
  pending_names_ = std::move(others);
  return 0;
}

bool SimulatedDisk::exists(const std::string& path) {
  const std::lock_guard lock(mutex_);
  return std::any_of(names_.begin(), names_.end(), [&](const auto& name) {
    return name.first == path || name.first.rfind(path + "/", 0) == 0;
  });
}

int SimulatedDisk::list(const std::string& path, std::vector<std::string>* names) {
  if (const int error = begin_call(FaultKind::kNone); error != 0) return error;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, file] : names_) {
    if (name.rfind(path + "/", 0) == 0) names->push_back(name.substr(path.size() + 1));
  }
  return 0;
}

std::unique_ptr<File> SimulatedDisk::lock(const std::string& path, int* error) {
  if (const int failed = begin_call(FaultKind::kNone); failed != 0) {
    *error = -failed;
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  if (locks_[path]) {
    *error = EWOULDBLOCK;
    return nullptr;
  }
  locks_[path] = true;
  return std::make_unique<LockedFile>(*this, path);
}

SimulatedFilePointer SimulatedDisk::file(const std::string& path) {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(path);
  return found == names_.end() ? nullptr : found->second;
}

std::vector<std::string> SimulatedDisk::paths() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> paths;
  for (const auto& [path, file] : names_) paths.push_back(path);
  return paths;
}

namespace {

// Some of the pending writes, each whole, torn or lost.
std::vector<uint8_t> surviving(const SimulatedFile& file, std::mt19937_64& random) {
  std::vector<uint8_t> bytes = file.durable;
  // Of a crash: how much of what was not synced reached the disk.
  const uint64_t kept_of_16 = random() % 17;
  for (const SimulatedWrite& write : file.pending) {
    if (random() % 16 >= kept_of_16) continue;
    const bool is_torn = !write.is_truncate && random() % 4 == 0;
    if (!is_torn) {
      SimulatedFile::apply(write, &bytes);
      continue;
    }
    for (size_t begin = 0; begin < write.bytes.size();) {
      const uint64_t sector = (write.offset + begin) / kSector;
      const size_t end =
          std::min<size_t>(write.bytes.size(), (sector + 1) * kSector - write.offset);
      if (random() % 2 == 0) {
        const auto first = write.bytes.begin();
        SimulatedFile::apply({write.offset + begin, {first + begin, first + end}, false}, &bytes);
      }
      begin = end;
    }
  }
  return bytes;
}

}  // namespace

std::unique_ptr<SimulatedDisk> SimulatedDisk::crashed(std::mt19937_64& random) const {
  const std::lock_guard lock(mutex_);
  auto names = durable_names_;
  for (const SimulatedName& name : pending_names_) {
    if (random() % 2 == 0) continue;
    if (name.file == nullptr) {
      names.erase(name.path);
    } else {
      names[name.path] = name.file;
    }
  }
  auto disk = std::make_unique<SimulatedDisk>();
  for (const auto& [path, file] : names) {
    const auto copy = std::make_shared<SimulatedFile>();
    copy->durable = surviving(*file, random);
    copy->visible = copy->durable;
    // As if every sector took space.
    copy->blocks.resize((copy->visible.size() + kSector - 1) / kSector);
    copy->take(0, copy->blocks.size(), true);
    disk->names_[path] = disk->durable_names_[path] = copy;
  }
  return disk;
}

std::unique_ptr<SimulatedDisk> SimulatedDisk::restarted() const {
  const std::lock_guard lock(mutex_);
  auto disk = std::make_unique<SimulatedDisk>();
  for (const auto& [path, file] : names_) {
    const auto copy = std::make_shared<SimulatedFile>();
    copy->durable = copy->visible = file->visible;
    copy->blocks = file->blocks;
    copy->num_blocks = file->num_blocks;
    disk->names_[path] = disk->durable_names_[path] = copy;
  }
  disk->boot_ = boot_;
  return disk;
}

}  // namespace lmdecode::store
