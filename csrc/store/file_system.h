// Interface of the store to the operating system. Tests replace the implementation: one records the
// writes and replays every state that a loss of power could leave, one fails at the k-th call.
// SQLite accesses its files through the VFS of the same implementation.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lmdecode::store {

// Results below 0 are -errno.
class File {
 public:
  virtual ~File() = default;
  // The number of bytes read or written, which may be fewer than requested.
  virtual int64_t read(uint64_t offset, void* data, size_t size) = 0;
  virtual int64_t write(uint64_t offset, const void* data, size_t size) = 0;
  // fdatasync: the written bytes and the length survive a loss of power.
  virtual int sync() = 0;
  // A hint to start writing the bytes to the disk, without a wait.
  virtual void start_writing(uint64_t offset, size_t size) { (void)offset, (void)size; }
  virtual int truncate(uint64_t size) = 0;
  // Frees the space of a range, which then reads as zeros; the length is unchanged. -EOPNOTSUPP if
  // the file system cannot.
  virtual int discard(uint64_t offset, uint64_t size) {
    return static_cast<void>(offset), static_cast<void>(size), -EOPNOTSUPP;
  }
  virtual int64_t size() = 0;
  // The bytes in memory that is the file's, where all of them are in the page cache; they may
  // change or go at any time, see bus_error.h. length: of the longest such file. Null: read() them.
  virtual const uint8_t* cached(uint64_t offset, size_t size, uint64_t length) {
    return static_cast<void>(offset), static_cast<void>(size), static_cast<void>(length), nullptr;
  }
  // Drops the mapping's pages from the resident set. Existing readers stay valid.
  virtual void leave_cached() {}
};

enum class OpenMode {
  kRead,    // must exist
  kWrite,   // must exist
  kCreate,  // made with mode 0600 where it does not exist
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Null and *error (an errno) where it fails. Symbolic links are not followed.
  virtual std::unique_ptr<File> open(const std::string& path, OpenMode mode, int* error) = 0;
  // 0 or -errno; mode 0700. One that exists is fine.
  virtual int make_directory(const std::string& path) = 0;
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int remove(const std::string& path) = 0;
  // Names made in, or removed from, the directory survive a loss of power.
  virtual int sync_directory(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual int list(const std::string& path, std::vector<std::string>* names) = 0;
  // A lock that one holder has; it is free when the file is destroyed by the process that took it,
  // whoever that forked meanwhile, and when all of these die. Null with *error EWOULDBLOCK where it
  // is held.
  virtual std::unique_ptr<File> lock(const std::string& path, int* error) = 0;
  // Which start of the system this is: what was written since is there, synced or not. Empty: not
  // known.
  virtual std::string boot() { return {}; }
  // Free bytes for files in the directory; UINT64_MAX: not known.
  virtual uint64_t free_bytes(const std::string& path) {
    return static_cast<void>(path), UINT64_MAX;
  }
  // The VFS by which SQLite reaches the same files; null: SQLite's own.
  virtual const char* sqlite_vfs() = 0;
};

FileSystem& posix_file_system();

// Loop over short transfers; 0 or -errno. A file that ends early is -ENODATA.
int read_all(File& file, uint64_t offset, void* data, size_t size);
int write_all(File& file, uint64_t offset, const void* data, size_t size);

// "what path: reason", and the errno in the error.
[[noreturn]] void throw_errno(int error, const std::string& what, const std::string& path);

}  // namespace lmdecode::store
