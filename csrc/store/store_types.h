// Arguments and results of the store's calls.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "store/file_system.h"
#include "store/slot_layout.h"

namespace lmdecode::store {

struct StoreOptions {
  std::string directory;    // of this fingerprint; its parent exists
  std::string fingerprint;  // every number and hash that the KV depends on
  ModelShape shape;
  uint32_t chunk_tokens = 0;  // 0: the store's own, or the default
  bool values_by_column = true;
  uint64_t capacity_bytes = 0;  // of all slots
  uint64_t slab_bytes = uint64_t{1} << 30;
  bool relaxed = false;  // acknowledged changes survive a kill, and a loss of power after the flush
  bool readonly = false;
  int64_t flush_interval_ms = 1000;                  // of relaxed; 0: only when asked to
  int64_t idle_ms = 60000;                           // after which a freed area counts as idle
  int io_threads = 2;                                // of one put or load
  uint64_t index_reserve_bytes = uint64_t{4} << 20;  // of the disk, for the index
  std::function<int64_t()> now_ms;                   // null: the system's clock
  FileSystem* file_system = nullptr;                 // null: the real one
};

// A plane in a tensor's memory: [num_kv_heads, num_tokens, head_size], the last num_tokens tokens
// of a prefix.
struct TensorPlane {
  char* data = nullptr;
  PlaneStrides strides;
  uint64_t num_tokens = 0;
};

// Polled by a long call, on the thread that made it; false: stop. Null: never stop.
using GoesOn = std::function<bool()>;

struct PutOptions {
  int64_t ttl_ms = 0;                 // 0: kept until evicted
  bool pin = false;                   // never evicted
  uint64_t quota_bytes = UINT64_MAX;  // of the tenant
  GoesOn goes_on = nullptr;           // if it stops the put, the unwritten rest is not stored
};

struct StoreStats {
  uint64_t entries, sessions, capacity_areas, used_areas, idle_areas, freed_areas;
  uint64_t unusable_areas, slot_bytes, chunk_tokens, hits, misses, puts, declined, evicted, expired,
      damaged;
  uint64_t bytes_written, bytes_read, commits;
};

struct VerifyReport {
  uint64_t entries = 0;
  uint64_t bytes = 0;
  uint64_t sessions = 0;
  std::vector<std::string> damage;  // a line each
};

// Progress callback: done and total; return false to stop.
using Progress = std::function<bool(uint64_t done, uint64_t total)>;

}  // namespace lmdecode::store
