#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>
#include <vector>

#include "store/file_system.h"
#include "store/store_error.h"

namespace lmdecode::store {

namespace {

// Calls again where a signal came between.
template <class Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

class PosixFile : public File {
 public:
  explicit PosixFile(int descriptor) : descriptor_(descriptor) {}
  ~PosixFile() override {
    if (mapped_ != nullptr) ::munmap(mapped_, length_);
    ::close(descriptor_);
  }
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  int64_t read(uint64_t offset, void* data, size_t size) override {
    const ssize_t got =
        retried([&] { return ::pread(descriptor_, data, size, static_cast<off_t>(offset)); });
    return got < 0 ? -errno : got;
  }
  int64_t write(uint64_t offset, const void* data, size_t size) override {
    const ssize_t put =
        retried([&] { return ::pwrite(descriptor_, data, size, static_cast<off_t>(offset)); });
    return put < 0 ? -errno : put;
  }
  // Not tried again after a failure: the kernel may have dropped the pages and say yes next time.
  int sync() override { return ::fdatasync(descriptor_) != 0 ? -errno : 0; }
  void start_writing([[maybe_unused]] uint64_t offset, [[maybe_unused]] size_t size) override {
#if defined(SYNC_FILE_RANGE_WRITE)
    static_cast<void>(::sync_file_range(descriptor_, static_cast<off_t>(offset),
                                        static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE));
#endif
  }
  int truncate(uint64_t size) override {
    return retried([&] { return ::ftruncate(descriptor_, static_cast<off_t>(size)); }) != 0 ? -errno
                                                                                            : 0;
  }
  int discard([[maybe_unused]] uint64_t offset, [[maybe_unused]] uint64_t size) override {
#if defined(FALLOC_FL_PUNCH_HOLE)
    const auto punch = [&] {
      return ::fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(offset), static_cast<off_t>(size));
    };
    return retried(punch) != 0 ? -errno : 0;
#else
    return -EOPNOTSUPP;
#endif
  }
  int64_t size() override {
    struct stat status;
    return ::fstat(descriptor_, &status) != 0 ? -errno : status.st_size;
  }
#if defined(MADV_POPULATE_READ)
  const uint8_t* cached(uint64_t offset, size_t size, uint64_t length) override {
    std::call_once(once_, [&] { map(length); });
    const uint64_t begin = offset / kPage * kPage, bytes = offset + size - begin;
    if (mapped_ == nullptr || begin + bytes > length_) return nullptr;
    uint8_t* first = static_cast<uint8_t*>(mapped_) + begin;
    thread_local std::vector<unsigned char> is_cached;
    is_cached.resize((bytes + kPage - 1) / kPage);
    if (::mincore(first, bytes, is_cached.data()) != 0) return nullptr;
    const auto is_absent = [](unsigned char state) { return (state & 1) == 0; };
    if (std::any_of(is_cached.begin(), is_cached.end(), is_absent)) return nullptr;
    in_use_ = true;
    // A page that cannot be had is an error here, and no signal.
    if (::madvise(first, bytes, MADV_POPULATE_READ) != 0) return nullptr;
    return first + (offset - begin);
  }
  void leave_cached() override {
    if (in_use_.exchange(false)) ::madvise(mapped_, length_, MADV_DONTNEED);
  }

 private:
  void map(uint64_t length) {
    void* mapped = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, descriptor_, 0);
    if (mapped == MAP_FAILED) return;
    ::madvise(mapped, length, MADV_DONTFORK);  // a forked process opens the store again
    mapped_ = mapped;
    length_ = length;
  }
#endif

 private:
  static constexpr uint64_t kPage = 4096;
  int descriptor_;
  std::once_flag once_;
  void* mapped_ = nullptr;
  uint64_t length_ = 0;
  std::atomic<bool> in_use_{false};
};

// A file that is locked while it is open.
class PosixLock : public PosixFile {
 public:
  explicit PosixLock(int descriptor) : PosixFile(descriptor), locked_(descriptor) {}
  // All copies of a descriptor share its lock, and forked processes have some: they would go on
  // holding it, and may not take it away.
  ~PosixLock() override {
    if (::getpid() == owner_) ::flock(locked_, LOCK_UN);
  }

 private:
  int locked_;
  ::pid_t owner_ = ::getpid();
};

class PosixFileSystem : public FileSystem {
 public:
  std::unique_ptr<File> open(const std::string& path, OpenMode mode, int* error) override {
    const int access = mode == OpenMode::kRead ? O_RDONLY : O_RDWR;
    const int create = mode == OpenMode::kCreate ? O_CREAT : 0;
    const int descriptor = open_descriptor(path, access | create);
    if (descriptor < 0) {
      *error = errno;
      return nullptr;
    }
    return std::make_unique<PosixFile>(descriptor);
  }
  int make_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0700) == 0) return 0;
    struct stat status;
    const int error = errno;
    const bool there = error == EEXIST && ::stat(path.c_str(), &status) == 0;
    return there && S_ISDIR(status.st_mode) ? 0 : -error;
  }
  int rename(const std::string& from, const std::string& to) override {
    return ::rename(from.c_str(), to.c_str()) != 0 ? -errno : 0;
  }
  int remove(const std::string& path) override { return ::unlink(path.c_str()) != 0 ? -errno : 0; }
  int sync_directory(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return -errno;
    const int error = ::fsync(descriptor) != 0 ? -errno : 0;
    ::close(descriptor);
    return error;
  }
  std::string boot() override {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return boot;
  }
  bool exists(const std::string& path) override { return ::access(path.c_str(), F_OK) == 0; }
  int list(const std::string& path, std::vector<std::string>* names) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return -errno;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names->push_back(name);
    }
    ::closedir(directory);
    return 0;
  }
  std::unique_ptr<File> lock(const std::string& path, int* error) override {
    const int descriptor = open_descriptor(path, O_RDWR | O_CREAT);
    if (descriptor < 0) {
      *error = errno;
      return nullptr;
    }
    if (retried([&] { return ::flock(descriptor, LOCK_EX | LOCK_NB); }) != 0) {
      *error = errno;
      ::close(descriptor);
      return nullptr;
    }
    return std::make_unique<PosixLock>(descriptor);
  }
  uint64_t free_bytes(const std::string& path) override {
    struct statvfs status;
    if (::statvfs(path.c_str(), &status) != 0) return UINT64_MAX;
    const uint64_t blocks = ::geteuid() == 0 ? status.f_bfree : status.f_bavail;
    return blocks * status.f_frsize;
  }
  const char* sqlite_vfs() override { return nullptr; }

 private:
  static int open_descriptor(const std::string& path, int flags) {
    return retried([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600); });
  }
};

}  // namespace

FileSystem& posix_file_system() {
  static PosixFileSystem file_system;
  return file_system;
}

int read_all(File& file, uint64_t offset, void* data, size_t size) {
  char* target = static_cast<char*>(data);
  while (size > 0) {
    const int64_t got = file.read(offset, target, size);
    if (got < 0) return static_cast<int>(got);
    if (got == 0) return -ENODATA;
    offset += got, target += got, size -= got;
  }
  return 0;
}

int write_all(File& file, uint64_t offset, const void* data, size_t size) {
  const char* source = static_cast<const char*>(data);
  while (size > 0) {
    const int64_t put = file.write(offset, source, size);
    if (put < 0) return static_cast<int>(put);
    if (put == 0) return -EIO;
    offset += put, source += put, size -= put;
  }
  return 0;
}

void throw_errno(int error, const std::string& what, const std::string& path) {
  throw StoreError(ErrorKind::kInputOutput, what + " " + path + ": " + std::strerror(error), error);
}

}  // namespace lmdecode::store
