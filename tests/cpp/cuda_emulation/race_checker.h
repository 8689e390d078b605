// What the runtime (cuda_emulation.cpp) and the race checker (race_checker.cpp) know of each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_emulation.h"

namespace lmdecode::emulation {

// The running thread and the barriers it has passed. Two accesses of different threads are ordered
// if a barrier that both threads take part in came between them.
struct Actor {
  std::uint32_t thread, warp, block;  // numbered through the cluster
  std::uint32_t cluster_epoch, block_epoch, warp_epoch;
};

struct Place {
  enum Kind { kElsewhere, kOwnStack, kOtherStack, kShared, kOutsideShared, kLeftShared } kind;
  std::uint32_t block;  // whose shared memory
  std::size_t offset;   // in it
};

// For callers inside which nothing may be thrown.
[[noreturn]] void fail_without_unwinding(const char* what);
bool current_actor(Actor* actor);  // false outside kernels
Place place_of(const void* address, std::size_t bytes);

namespace race_checker {

extern bool active;
void start_cluster(unsigned blocks, std::size_t shared_bytes);
void check(const void* address, std::size_t bytes, Access access, const void* code);

}  // namespace race_checker
}  // namespace lmdecode::emulation
