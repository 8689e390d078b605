// A file system in memory that loses power. Writes are kept apart until they are synced; a crash
// keeps, loses or tears (at sectors of 512 bytes) each of them on its own, in any combination, and
// so it does with names that were made, renamed or removed. It can also fail at the k-th call.
// SQLite gets at the same files by a VFS, so that its log and its file crash too.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "store/file_system.h"

namespace lmdecode::store {

constexpr size_t kSector = 512;

struct SimulatedWrite {
  uint64_t offset = 0;
  std::vector<uint8_t> bytes;
  bool is_truncate = false;  // to `offset`
};

// A file: what survives a loss of power, what programs see, and the writes between the two.
struct SimulatedFile {
  std::vector<uint8_t> durable;
  std::vector<uint8_t> visible;
  std::vector<SimulatedWrite> pending;
  std::vector<bool> blocks;  // sectors of `visible` that take space
  uint64_t num_blocks = 0;

  void write(uint64_t offset, const uint8_t* data, size_t size);
  void truncate(uint64_t size);
  void sync();
  void discard(uint64_t offset, uint64_t size);
  void take(size_t first, size_t end, bool is_taken);  // sectors
  uint64_t used() const { return kSector * num_blocks; }
  static void apply(const SimulatedWrite& write, std::vector<uint8_t>* bytes);
};

using SimulatedFilePointer = std::shared_ptr<SimulatedFile>;

// A change of the directory: the name now refers to the file (null: to none).
struct SimulatedName {
  std::string path;
  SimulatedFilePointer file;
};

enum class FaultKind { kNone, kInputOutput, kNoSpace, kShortWrite, kFailedSync };

class SimulatedDisk : public FileSystem {
 public:
  SimulatedDisk();
  ~SimulatedDisk() override;

  std::unique_ptr<File> open(const std::string& path, OpenMode mode, int* error) override;
  int make_directory(const std::string& path) override;
  int rename(const std::string& from, const std::string& to) override;
  int remove(const std::string& path) override;
  int sync_directory(const std::string& path) override;
  bool exists(const std::string& path) override;
  int list(const std::string& path, std::vector<std::string>* names) override;
  std::unique_ptr<File> lock(const std::string& path, int* error) override;
  const char* sqlite_vfs() override { return vfs_name_.c_str(); }
  std::string boot() override { return boot_; }

  // One of the states that a loss of power may leave, as a disk that has seen no call yet.
  std::unique_ptr<SimulatedDisk> crashed(std::mt19937_64& random) const;
  // What a restart without loss of power finds.
  std::unique_ptr<SimulatedDisk> restarted() const;

  // From the call with this number on nothing is done any more: the power is gone.
  void lose_power_at(uint64_t call) { power_ends_at_ = call; }
  bool power_is_lost() const { return calls_ >= power_ends_at_; }
  // The calls from the first-th on that the kind applies to fail, `count` of them.
  void fail_from(FaultKind kind, uint64_t first, uint64_t count = 1);
  // Syncs of files whose path contains this do nothing: a mutant.
  void ignore_syncs_of(const std::string& part) { ignored_syncs_ = part; }

  // All files together have at most so many bytes, in whole sectors: writes end there, and fail.
  void limit_to(uint64_t bytes) { limit_ = bytes; }
  uint64_t used_bytes();
  uint64_t free_bytes(const std::string& path) override;

  // Syncs take so long.
  void slow_syncs(int milliseconds) { sync_milliseconds_ = milliseconds; }

  uint64_t calls() const { return calls_; }
  uint64_t faults() const { return faults_; }
  SimulatedFilePointer file(const std::string& path);
  std::vector<std::string> paths() const;

  // For the files and the VFS: counts the call; what it fails with, or 0. *short_write: half is
  // written.
  int begin_call(FaultKind applicable, bool* short_write = nullptr);
  int read(const SimulatedFilePointer& file, uint64_t offset, void* data, size_t size,
           int64_t* read);
  int64_t write(const SimulatedFilePointer& file, uint64_t offset, const void* data, size_t size);
  int truncate(const SimulatedFilePointer& file, uint64_t size);
  int sync(const SimulatedFilePointer& file, const std::string& path);
  int discard(const SimulatedFilePointer& file, uint64_t offset, uint64_t size);
  SimulatedFilePointer open_file(const std::string& path, bool create, int* error);
  std::mutex& mutex() { return mutex_; }

  // Shared memory and locks of SQLite's log; gone with the power.
  struct SharedMemory {
    std::map<int, std::unique_ptr<std::vector<uint8_t>>> regions;
    int shared[8] = {};
    bool exclusive[8] = {};
    int users = 0;
  };
  std::map<std::string, SharedMemory> shared_memory;

 private:
  friend class LockedFile;
  mutable std::mutex mutex_;
  std::map<std::string, SimulatedFilePointer> names_;          // what programs see
  std::map<std::string, SimulatedFilePointer> durable_names_;  // what survives
  std::vector<SimulatedName> pending_names_;
  std::map<std::string, bool> locks_;
  uint64_t used_locked() const;

  uint64_t limit_ = UINT64_MAX;
  uint64_t calls_ = 0;
  uint64_t power_ends_at_ = UINT64_MAX;
  FaultKind fault_ = FaultKind::kNone;
  uint64_t fault_first_ = 0;
  uint64_t fault_count_ = 0;
  uint64_t applicable_ = 0;
  uint64_t faults_ = 0;
  std::string ignored_syncs_;
  int sync_milliseconds_ = 0;
  std::string vfs_name_;
  std::string boot_;
  std::unique_ptr<struct SimulatedVfs> vfs_;
};

}  // namespace lmdecode::store
