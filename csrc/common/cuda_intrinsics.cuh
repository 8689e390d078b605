// The one header CUDA kernels include. Under nvcc the CUDA names are the compiler's own and this
// adds thin wrappers for what CUDA C++ spells in PTX; under LMDECODE_CUDA_EMULATION all of them
// come from tests/cpp/cuda_emulation.
//
// A kernel keeps to these rules, so that it can be run on the CPU:
//   - shared memory is one struct in dynamic shared memory, reached by shared_storage<S>(); no
//   __shared__ variables;
//   - warp intrinsics name their mask; no __activemask, no reliance on lockstep between lanes;
//   - nothing waits by reading memory in a loop; threads wait at barriers and warp exchanges.
#pragma once

#if defined(LMDECODE_CUDA_EMULATION)
#include "cuda_emulation.h"
#elif defined(__CUDACC__)
#include <cuda_runtime.h>

namespace lmdecode::cuda {

// The block's dynamic shared memory as one struct. Contents are undefined at kernel start: S must
// not need constructing.
template <class S>
__device__ __forceinline__ S& shared_storage() {
  static_assert(alignof(S) <= 128);
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<S*>(dynamic_shared_memory);
}

// Lets the emulation switch threads here; costs nothing on a GPU.
__device__ __forceinline__ void schedule_point() {}

// Thread block clusters. Below sm_90 a block is a cluster of one, so one source serves both.

__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ unsigned cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  unsigned size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// A barrier of all threads of the cluster, which makes earlier writes visible to all. Not
// `.aligned`: that would ask for converged warps, which CUDA C++ does not promise after a branch.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The address in block `rank`'s shared memory of what `pointer` is in this block's. Valid between a
// first cluster_sync (the other block runs) and a last one (it has not left yet).
template <class T>
__device__ __forceinline__ T* map_shared_rank(T* pointer, unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  T* mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
  return mapped;
#else
  return pointer;
#endif
}

// Asynchronous 16-byte copy, global to shared, both 16-byte aligned; bytes past `valid_bytes`
// (0..16) become zero and are not read. The data is there for this thread after copy_async_wait,
// for others after a barrier that follows.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global,
                                              unsigned valid_bytes = 16) {
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const size_t source = __cvta_generic_to_global(global);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

// Closes the group of the copies issued since the last commit.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for the line of the L1 cache that this address lies in, and does not wait for it.
template <class T>
__device__ __forceinline__ void prefetch(const T* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

// a / b, to 2 units in the last place; 2^-126 <= |b| <= 2^126, or b is 0.
__device__ __forceinline__ float divide_approximate(float a, float b) { return __fdividef(a, b); }

// 2^x, to about 2 units in the last place; results below the normal ones are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to nearest even, as 16-bit elements of one register: `first` in the low half.
__device__ __forceinline__ unsigned round_to_bf16(float first, float second) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ unsigned round_to_f16(float first, float second) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// The functions below are called by all lanes of a warp.

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l names row l % 8 of matrix l /
// 8, 16 aligned bytes; it receives from each matrix elements 2 (l % 4) and 2 (l % 4) + 1 of row l /
// 4, the first in the low half.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same of the matrices transposed: column l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ __forceinline__ void load_transposed_matrices(unsigned (&to)[4], const void* row) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// sum [16, 8] += a [16, 16] b [16, 8], of 16-bit elements, in f32. With g = lane / 4 and c = 2
// (lane % 4), two elements in a register:
//   a: columns c, c + 1 of rows g and g + 8, then columns c + 8, c + 9 of rows g and g + 8;
//   b: rows c, c + 1 of column g, then rows c + 8, c + 9;
//   sum: columns c, c + 1 of row g, then of row g + 8.
__device__ __forceinline__ void multiply_add_bf16(float (&sum)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add_f16(float (&sum)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace lmdecode::cuda
#else
#error "compile with nvcc, or define LMDECODE_CUDA_EMULATION (tests/cpp/cuda_emulation)"
#endif

// A device function that is compiled once, not into each of its callers: for long ones that several
// kernels call.
#if defined(LMDECODE_CUDA_EMULATION)
#define LMD_OUT_OF_LINE [[gnu::noinline]]
#else
#define LMD_OUT_OF_LINE __noinline__
#endif

// A kernel's parameter that is passed on by reference: without this each thread keeps a copy of it
// in its local memory.
#if defined(LMDECODE_CUDA_EMULATION)
#define LMD_KERNEL_PARAM
#else
#define LMD_KERNEL_PARAM __grid_constant__
#endif

namespace lmdecode::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// For one-dimensional blocks.
__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / kWarpSize); }

}  // namespace lmdecode::cuda
