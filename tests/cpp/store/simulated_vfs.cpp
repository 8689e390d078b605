#include "simulated_vfs.h"

#include <atomic>
#include <cstring>
#include <new>

namespace lmdecode::store {

namespace {

struct VfsFile {
  sqlite3_file base;
  SimulatedDisk* disk;
  SimulatedFilePointer file;
  std::string path;
  bool delete_on_close;
  bool name_is_new;  // the first sync makes the name durable too, as SQLite's own VFS does
  bool has_shared_memory;
  int shared_held;  // bits of SQLite's eight locks
  int exclusive_held;
};

VfsFile& of(sqlite3_file* file) { return *reinterpret_cast<VfsFile*>(file); }
SimulatedDisk& of(sqlite3_vfs* vfs) { return *static_cast<SimulatedDisk*>(vfs->pAppData); }

std::string directory_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

int close_file(sqlite3_file* base) {
  VfsFile& file = of(base);
  if (file.delete_on_close) file.disk->remove(file.path);
  file.~VfsFile();
  return SQLITE_OK;
}

int read_file(sqlite3_file* base, void* data, int size, sqlite3_int64 offset) {
  VfsFile& file = of(base);
  int64_t got = 0;
  if (file.disk->read(file.file, static_cast<uint64_t>(offset), data, static_cast<size_t>(size),
                      &got) != 0) {
    return SQLITE_IOERR_READ;
  }
  if (got == size) return SQLITE_OK;
  std::memset(static_cast<char*>(data) + got, 0, static_cast<size_t>(size - got));
  return SQLITE_IOERR_SHORT_READ;
}

int write_file(sqlite3_file* base, const void* data, int size, sqlite3_int64 offset) {
  VfsFile& file = of(base);
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const int64_t put = file.disk->write(file.file, static_cast<uint64_t>(offset), bytes,
                                         static_cast<size_t>(size));
    if (put == -ENOSPC) return SQLITE_FULL;
    if (put <= 0) return SQLITE_IOERR_WRITE;
    bytes += put, offset += put, size -= static_cast<int>(put);
  }
  return SQLITE_OK;
}

int truncate_file(sqlite3_file* base, sqlite3_int64 size) {
  VfsFile& file = of(base);
  const int error = file.disk->truncate(file.file, static_cast<uint64_t>(size));
  return error != 0 ? SQLITE_IOERR_TRUNCATE : SQLITE_OK;
}

int sync_file(sqlite3_file* base, int) {
  VfsFile& file = of(base);
  if (file.disk->sync(file.file, file.path) != 0) return SQLITE_IOERR_FSYNC;
  if (!file.name_is_new) return SQLITE_OK;
  file.name_is_new = false;
  return file.disk->sync_directory(directory_of(file.path)) != 0 ? SQLITE_IOERR_DIR_FSYNC
                                                                 : SQLITE_OK;
}

int file_size(sqlite3_file* base, sqlite3_int64* size) {
  VfsFile& file = of(base);
  const std::lock_guard lock(file.disk->mutex());
  *size = static_cast<sqlite3_int64>(file.file->visible.size());
  return SQLITE_OK;
}

// The tests' writers and readers take turns: only the locks of the log matter.
int lock_file(sqlite3_file*, int) { return SQLITE_OK; }
int check_lock(sqlite3_file*, int* held) {
  *held = 0;
  return SQLITE_OK;
}
int control(sqlite3_file*, int, void*) { return SQLITE_NOTFOUND; }
int sector_size(sqlite3_file*) { return static_cast<int>(kSector); }
int characteristics(sqlite3_file*) { return SQLITE_IOCAP_POWERSAFE_OVERWRITE; }

int map_shared(sqlite3_file* base, int region, int size, int extend, void volatile** memory) {
  VfsFile& file = of(base);
  const std::lock_guard lock(file.disk->mutex());
  auto& shared = file.disk->shared_memory[file.path];
  if (!file.has_shared_memory) {
    file.has_shared_memory = true;
    ++shared.users;
  }
  auto& bytes = shared.regions[region];
  if (bytes == nullptr) {
    if (extend == 0) {
      shared.regions.erase(region);
      *memory = nullptr;
      return SQLITE_OK;
    }
    bytes = std::make_unique<std::vector<uint8_t>>(static_cast<size_t>(size));
  }
  *memory = bytes->data();
  return SQLITE_OK;
}

int lock_shared(sqlite3_file* base, int offset, int count, int flags) {
  VfsFile& file = of(base);
  const std::lock_guard lock(file.disk->mutex());
  auto& shared = file.disk->shared_memory[file.path];
  const bool is_shared = (flags & SQLITE_SHM_SHARED) != 0;
  for (int i = offset; i < offset + count; ++i) {
    if ((flags & SQLITE_SHM_UNLOCK) != 0) continue;
    const bool others_share = shared.shared[i] > (file.shared_held >> i & 1);
    const bool others_own = shared.exclusive[i] && (file.exclusive_held >> i & 1) == 0;
    if (others_own || (!is_shared && others_share)) return SQLITE_BUSY;
  }
  for (int i = offset; i < offset + count; ++i) {
    int& held = is_shared ? file.shared_held : file.exclusive_held;
    const bool has = (held >> i & 1) != 0, wants = (flags & SQLITE_SHM_LOCK) != 0;
    if (has == wants) continue;
    held ^= 1 << i;
    if (is_shared) {
      shared.shared[i] += wants ? 1 : -1;
    } else {
      shared.exclusive[i] = wants;
    }
  }
  return SQLITE_OK;
}

void barrier(sqlite3_file* base) { const std::lock_guard lock(of(base).disk->mutex()); }

int unmap_shared(sqlite3_file* base, int remove) {
  VfsFile& file = of(base);
  const std::lock_guard lock(file.disk->mutex());
  auto& shared = file.disk->shared_memory[file.path];
  if (file.has_shared_memory && --shared.users == 0 && remove != 0) {
    file.disk->shared_memory.erase(file.path);
  }
  file.has_shared_memory = false;
  return SQLITE_OK;
}

constexpr sqlite3_io_methods kMethods = {
    2,           close_file, read_file,    write_file, truncate_file, sync_file,       file_size,
    lock_file,   lock_file,  check_lock,   control,    sector_size,   characteristics, map_shared,
    lock_shared, barrier,    unmap_shared, nullptr,    nullptr,
};

int open_vfs(sqlite3_vfs* vfs, sqlite3_filename name, sqlite3_file* base, int flags,
             int* out_flags) {
  SimulatedDisk& disk = of(vfs);
  static std::atomic<int> temporary{0};
  const bool is_temporary = name == nullptr;
  const std::string path =
      is_temporary ? "/temporary/" + std::to_string(temporary++) : std::string(name);
  int error = 0;
  const bool existed = disk.file(path) != nullptr;
  auto opened = disk.open_file(path, (flags & SQLITE_OPEN_CREATE) != 0 || is_temporary, &error);
  base->pMethods = nullptr;
  if (opened == nullptr) return error == ENOENT ? SQLITE_CANTOPEN : SQLITE_IOERR;
  const int synced = SQLITE_OPEN_WAL | SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_SUPER_JOURNAL;
  new (base) VfsFile{{&kMethods},
                     &disk,
                     std::move(opened),
                     path,
                     is_temporary || (flags & SQLITE_OPEN_DELETEONCLOSE) != 0,
                     !existed && (flags & synced) != 0,
                     false,
                     0,
                     0};
  if (out_flags != nullptr) *out_flags = flags;
  return SQLITE_OK;
}

int delete_vfs(sqlite3_vfs* vfs, const char* name, int sync_directory) {
  SimulatedDisk& disk = of(vfs);
  if (disk.file(name) == nullptr) return SQLITE_IOERR_DELETE_NOENT;
  if (disk.remove(name) != 0) return SQLITE_IOERR_DELETE;
  if (sync_directory != 0 && disk.sync_directory(directory_of(name)) != 0) {
    return SQLITE_IOERR_DIR_FSYNC;
  }
  return SQLITE_OK;
}

int access_vfs(sqlite3_vfs* vfs, const char* name, int, int* result) {
  *result = of(vfs).file(name) != nullptr;
  return SQLITE_OK;
}

int full_path(sqlite3_vfs*, const char* name, int size, char* out) {
  std::strncpy(out, name, static_cast<size_t>(size));
  return SQLITE_OK;
}

int randomness(sqlite3_vfs*, int size, char* out) {
  std::memset(out, 42, static_cast<size_t>(size));
  return size;
}

int sleep_vfs(sqlite3_vfs*, int microseconds) { return microseconds; }

int current_time(sqlite3_vfs*, double* days) {
  *days = 2460000.5;
  return SQLITE_OK;
}

int last_error(sqlite3_vfs*, int, char*) { return 0; }

}  // namespace

SimulatedVfs::SimulatedVfs(SimulatedDisk& disk) {
  static std::atomic<uint64_t> number{0};
  name_ = "simulated-" + std::to_string(number++);
  std::memset(&vfs_, 0, sizeof(vfs_));
  vfs_.iVersion = 1;
  vfs_.szOsFile = sizeof(VfsFile);
  vfs_.mxPathname = 512;
  vfs_.zName = name_.c_str();
  vfs_.pAppData = &disk;
  vfs_.xOpen = open_vfs;
  vfs_.xDelete = delete_vfs;
  vfs_.xAccess = access_vfs;
  vfs_.xFullPathname = full_path;
  vfs_.xRandomness = randomness;
  vfs_.xSleep = sleep_vfs;
  vfs_.xCurrentTime = current_time;
  vfs_.xGetLastError = last_error;
  sqlite3_vfs_register(&vfs_, 0);
}

SimulatedVfs::~SimulatedVfs() { sqlite3_vfs_unregister(&vfs_); }

}  // namespace lmdecode::store
