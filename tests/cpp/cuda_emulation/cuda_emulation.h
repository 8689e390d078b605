// Runs CUDA kernels on the CPU, for tests: the names of csrc/common/cuda_intrinsics.cuh with a host
// meaning.
//
//   emulation::launch(kernel, grid, block, cluster_size, shared_bytes, seed, kernel arguments...);
//
// The threads of one cluster at a time live as fibers on the calling thread, so a run is
// deterministic. The seed picks the schedule: 0 and 1 run one thread until it must wait, lowest or
// highest first; 2 the last warp first; others are random, switch also at atomics and schedule
// points, and shuffle the order of clusters. What a test should try is 0..5 or so: a missing
// barrier shows under one of the first, a missing atomic under the last.
//
// Reported as std::runtime_error, with block, thread and source line: threads at different
// barriers, deadlock, lanes that miss, leave or mismatch a warp exchange, shuffles from outside the
// mask, writes outside shared memory. Reads too under ASan, and data races and reads of unwritten
// shared memory with race_checker.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)
// Atomics race with nothing: the race checker is told of their accesses.
#define LMDECODE_UNCHECKED [[gnu::noinline, gnu::no_sanitize("thread")]]

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
// Vectors are what kernels load any type through, hence may_alias.
#define LMDECODE_VECTOR_TYPE(T, name)                                         \
  struct alignas(2 * sizeof(T)) [[gnu::may_alias]] name##2 { T x, y; };       \
  struct alignas(4 * sizeof(T)) [[gnu::may_alias]] name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                  \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
LMDECODE_VECTOR_TYPE(float, float)
LMDECODE_VECTOR_TYPE(int, int)
LMDECODE_VECTOR_TYPE(unsigned, uint)
LMDECODE_VECTOR_TYPE(unsigned short, ushort)
#undef LMDECODE_VECTOR_TYPE

inline uint3 threadIdx, blockIdx;  // of the fiber that runs now
inline dim3 blockDim, gridDim;

namespace lmdecode::emulation {

using Location = std::source_location;

struct LaunchShape {
  dim3 grid, block;
  unsigned cluster_size = 1;
  std::size_t shared_bytes = 0;
  std::uint64_t seed = 0;
};
void run(const LaunchShape& shape, void (*body)(void*), void* argument);

// cluster_size counts blocks along x, as cudaLaunchAttributeClusterDimension; 1: no cluster.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster_size,
            std::size_t shared_bytes, std::uint64_t seed, Arguments... arguments) {
  auto body = [&] { kernel(arguments...); };
  run(
      {grid, block, cluster_size, shared_bytes, seed},
      [](void* self) { (*static_cast<decltype(body)*>(self))(); }, &body);
}

// True where the kernels were compiled for the race checker (see race_checker.cpp).
bool race_checker_active();

// ---- what the intrinsics below are made of ---------------------------------------------------

enum class Vote { kNone, kCount, kAnd, kOr };
enum class Ordering { kNone, kMemory };  // of the warp intrinsics, __syncwarp alone orders memory
enum class Access { kRead, kWrite, kAtomic };
// What a lane gets out of an exchange: of the values of `mask`'s lanes and its own argument.
using Resolve = std::uint64_t (*)(const std::uint64_t* values, std::uint64_t argument,
                                  unsigned mask);

int block_barrier(Vote vote, int predicate, Location where);
void cluster_barrier(Location where);
std::uint64_t exchange(const char* name, Resolve resolve, Ordering ordering, unsigned mask,
                       std::uint64_t value, std::uint64_t argument, Location where);
unsigned current_lane();
unsigned current_cluster_rank();
unsigned current_cluster_size();
void schedule_point();
void announce(const void* address, std::size_t bytes, Access access, const void* code);
void* shared_memory(std::size_t bytes);
void* map_shared(void* pointer, unsigned rank);
void copy_async(void* shared, const void* global, unsigned valid_bytes, const void* code);
void commit_copies();
void wait_copies(int pending);
// Ends the run: launch() throws, with the running block and thread named before `what`.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class T>
concept Exchangeable =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, long> ||
    std::is_same_v<T, unsigned long> || std::is_same_v<T, long long> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, float> || std::is_same_v<T, double>;

template <class T>
std::uint64_t pack(T value) {
  std::uint64_t packed = 0;
  std::memcpy(&packed, &value, sizeof(T));
  return packed;
}

template <class T>
T unpack(std::uint64_t packed) {
  T value;
  std::memcpy(&value, &packed, sizeof(T));
  return value;
}

std::uint64_t resolve_nothing(const std::uint64_t* values, std::uint64_t argument, unsigned mask);
std::uint64_t resolve_shuffle(const std::uint64_t* values, std::uint64_t argument, unsigned mask);
std::uint64_t resolve_ballot(const std::uint64_t* values, std::uint64_t argument, unsigned mask);
std::uint64_t resolve_match(const std::uint64_t* values, std::uint64_t argument, unsigned mask);

template <class T, class Combine>
std::uint64_t resolve_reduce(const std::uint64_t* values, std::uint64_t, unsigned mask) {
  T result = unpack<T>(values[__builtin_ctz(mask)]);
  for (unsigned rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    result = Combine::of(result, unpack<T>(values[__builtin_ctz(rest)]));
  }
  return pack(result);
}

template <Exchangeable T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, Location where) {
  if (source >= 32 || (mask >> source & 1) == 0) {
    fail("%s reads lane %u, outside its mask %08x (line %u)", name, source, mask,
         unsigned(where.line()));
  }
  return unpack<T>(
      exchange(name, resolve_shuffle, Ordering::kNone, mask, pack(value), source, where));
}

}  // namespace lmdecode::emulation

// ---- barriers ----------------------------------------------------------------------------------
#define LMDECODE_HERE \
  ::lmdecode::emulation::Location where = ::lmdecode::emulation::Location::current()

inline void __syncthreads(LMDECODE_HERE) {
  lmdecode::emulation::block_barrier(lmdecode::emulation::Vote::kNone, 0, where);
}
inline int __syncthreads_count(int predicate, LMDECODE_HERE) {
  return lmdecode::emulation::block_barrier(lmdecode::emulation::Vote::kCount, predicate, where);
}
inline int __syncthreads_and(int predicate, LMDECODE_HERE) {
  return lmdecode::emulation::block_barrier(lmdecode::emulation::Vote::kAnd, predicate, where);
}
inline int __syncthreads_or(int predicate, LMDECODE_HERE) {
  return lmdecode::emulation::block_barrier(lmdecode::emulation::Vote::kOr, predicate, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, LMDECODE_HERE) {
  using namespace lmdecode::emulation;
  exchange("__syncwarp", resolve_nothing, Ordering::kMemory, mask, 0, 0, where);
}
inline void __threadfence() { lmdecode::emulation::schedule_point(); }
inline void __threadfence_block() { lmdecode::emulation::schedule_point(); }

// ---- warp exchanges ----------------------------------------------------------------------------
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, LMDECODE_HERE) {
  const unsigned segment = lmdecode::emulation::current_lane() & ~unsigned(width - 1);
  const unsigned from = segment | (unsigned(source) & unsigned(width - 1));
  return lmdecode::emulation::shuffle("__shfl_sync", mask, value, from, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, LMDECODE_HERE) {
  const unsigned lane = lmdecode::emulation::current_lane(), inside = lane & unsigned(width - 1);
  return lmdecode::emulation::shuffle("__shfl_up_sync", mask, value,
                                      inside < delta ? lane : lane - delta, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, LMDECODE_HERE) {
  const unsigned lane = lmdecode::emulation::current_lane(), inside = lane & unsigned(width - 1);
  return lmdecode::emulation::shuffle("__shfl_down_sync", mask, value,
                                      inside + delta >= unsigned(width) ? lane : lane + delta,
                                      where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, LMDECODE_HERE) {
  const unsigned lane = lmdecode::emulation::current_lane(), from = lane ^ unsigned(lane_mask);
  const bool later_segment = from >= (lane & ~unsigned(width - 1)) + unsigned(width);
  return lmdecode::emulation::shuffle("__shfl_xor_sync", mask, value, later_segment ? lane : from,
                                      where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, LMDECODE_HERE) {
  using namespace lmdecode::emulation;
  return unsigned(
      exchange("__ballot_sync", resolve_ballot, Ordering::kNone, mask, predicate != 0, 0, where));
}
inline int __any_sync(unsigned mask, int predicate, LMDECODE_HERE) {
  using namespace lmdecode::emulation;
  return exchange("__any_sync", resolve_ballot, Ordering::kNone, mask, predicate != 0, 0, where) !=
         0;
}
inline int __all_sync(unsigned mask, int predicate, LMDECODE_HERE) {
  using namespace lmdecode::emulation;
  return exchange("__all_sync", resolve_ballot, Ordering::kNone, mask, predicate != 0, 0, where) ==
         mask;
}
template <lmdecode::emulation::Exchangeable T>
unsigned __match_any_sync(unsigned mask, T value, LMDECODE_HERE) {
  using namespace lmdecode::emulation;
  const std::uint64_t packed = pack(value);
  return unsigned(
      exchange("__match_any_sync", resolve_match, Ordering::kNone, mask, packed, packed, where));
}

#include "cuda_emulation_matrix.h"
#include "cuda_emulation_memory.h"
