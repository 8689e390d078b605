// The second half of cuda_emulation.h: atomics, memory, bits and floats, clusters, async copies.
#pragma once

// ---- reductions of a warp, and the atomics: one list of combinations ----------------------------
namespace lmdecode::emulation {

struct Add {
  template <class T>
  static T of(T a, T b) {
    if constexpr (std::is_same_v<T, int>)
      return int(unsigned(a) + unsigned(b));  // wraps, as in CUDA
    else
      return a + b;
  }
};
struct Min {
  template <class T>
  static T of(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return a < b ? b : a;
  }
};
struct And {
  template <class T>
  static T of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T of(T a, T b) {
    return a ^ b;
  }
};
struct Exchange {
  template <class T>
  static T of(T, T b) {
    return b;
  }
};

template <class Combine, class T>
LMDECODE_UNCHECKED T atomic(T* address, T value) {
  schedule_point();
  announce(address, sizeof(T), Access::kAtomic, __builtin_return_address(0));
  const T old = *address;
  *address = Combine::of(old, value);
  return old;
}

template <class T>
LMDECODE_UNCHECKED T atomic_compare_exchange(T* address, T expected, T value) {
  schedule_point();
  announce(address, sizeof(T), Access::kAtomic, __builtin_return_address(0));
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

}  // namespace lmdecode::emulation

// Overloads, as in CUDA, so that a type that nvcc rejects is rejected here.
#define LMDECODE_ATOMIC(name, Combine, T)                                                \
  inline T name(T* address, T value) {                                                   \
    return lmdecode::emulation::atomic<lmdecode::emulation::Combine, T>(address, value); \
  }
#define LMDECODE_ATOMIC_INTEGERS(name, Combine) \
  LMDECODE_ATOMIC(name, Combine, int)           \
  LMDECODE_ATOMIC(name, Combine, unsigned)      \
  LMDECODE_ATOMIC(name, Combine, unsigned long long)
LMDECODE_ATOMIC_INTEGERS(atomicAdd, Add)
LMDECODE_ATOMIC(atomicAdd, Add, float)
LMDECODE_ATOMIC_INTEGERS(atomicMin, Min)
LMDECODE_ATOMIC(atomicMin, Min, long long)
LMDECODE_ATOMIC_INTEGERS(atomicMax, Max)
LMDECODE_ATOMIC(atomicMax, Max, long long)
LMDECODE_ATOMIC_INTEGERS(atomicAnd, And)
LMDECODE_ATOMIC_INTEGERS(atomicOr, Or)
LMDECODE_ATOMIC_INTEGERS(atomicXor, Xor)
LMDECODE_ATOMIC_INTEGERS(atomicExch, Exchange)
#undef LMDECODE_ATOMIC_INTEGERS
#undef LMDECODE_ATOMIC

#define LMDECODE_COMPARE_EXCHANGE(T)                                                  \
  inline T atomicCAS(T* address, T expected, T value) {                               \
    return lmdecode::emulation::atomic_compare_exchange<T>(address, expected, value); \
  }
LMDECODE_COMPARE_EXCHANGE(int)
LMDECODE_COMPARE_EXCHANGE(unsigned)
LMDECODE_COMPARE_EXCHANGE(unsigned long long)
#undef LMDECODE_COMPARE_EXCHANGE

#define LMDECODE_REDUCE(name, Combine, T)                                               \
  inline T name(unsigned mask, T value, LMDECODE_HERE) {                                \
    using namespace lmdecode::emulation;                                                \
    return unpack<T>(exchange(#name, resolve_reduce<T, Combine>, Ordering::kNone, mask, \
                              pack(value), 0, where));                                  \
  }
LMDECODE_REDUCE(__reduce_add_sync, Add, unsigned)
LMDECODE_REDUCE(__reduce_add_sync, Add, int)
LMDECODE_REDUCE(__reduce_min_sync, Min, unsigned)
LMDECODE_REDUCE(__reduce_min_sync, Min, int)
LMDECODE_REDUCE(__reduce_max_sync, Max, unsigned)
LMDECODE_REDUCE(__reduce_max_sync, Max, int)
LMDECODE_REDUCE(__reduce_and_sync, And, unsigned)
LMDECODE_REDUCE(__reduce_or_sync, Or, unsigned)
LMDECODE_REDUCE(__reduce_xor_sync, Xor, unsigned)
#undef LMDECODE_REDUCE

// ---- loads and stores with a cache hint, bits, floats -------------------------------------------
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll((unsigned long long)value);
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (value >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((std::uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned value) { return __builtin_bit_cast(float, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }
inline long long __double_as_longlong(double value) { return __builtin_bit_cast(long long, value); }
inline double __longlong_as_double(long long value) { return __builtin_bit_cast(double, value); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

// ---- the wrappers of cuda_intrinsics.cuh
namespace lmdecode::cuda {

template <class S>
S& shared_storage() {
  static_assert(alignof(S) <= 128);
  static_assert(std::is_trivially_default_constructible_v<S>, "shared memory is not constructed");
  return *static_cast<S*>(emulation::shared_memory(sizeof(S)));
}
inline void schedule_point() { emulation::schedule_point(); }
inline unsigned cluster_rank() { return emulation::current_cluster_rank(); }
inline unsigned cluster_size() { return emulation::current_cluster_size(); }
inline void cluster_sync(LMDECODE_HERE) { emulation::cluster_barrier(where); }
template <class T>
T* map_shared_rank(T* pointer, unsigned rank) {
  return static_cast<T*>(emulation::map_shared(pointer, rank));
}
[[gnu::noinline]] inline void copy_async_16(void* shared, const void* global,
                                            unsigned valid_bytes = 16) {
  emulation::copy_async(shared, global, valid_bytes, __builtin_return_address(0));
}
// A hint, which races with nothing; a sanitizer sees whether there is anything at the address.
template <class T>
LMDECODE_UNCHECKED void prefetch(const T* address) {
  static_cast<void>(*reinterpret_cast<const volatile unsigned char*>(address));
}
inline void copy_async_commit() { emulation::commit_copies(); }
template <int kPending>
void copy_async_wait() {
  emulation::wait_copies(kPending);
}

}  // namespace lmdecode::cuda
