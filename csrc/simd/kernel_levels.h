// The kernels of an area at every level (simd/vec.h says what a level is): how a header declares
// them, and how the code that calls them picks a level.
//
//   // linear/norms.h, outside of any namespace
//   LMD_DECLARE_KERNELS(linear, void rms_norm_rows(const NormParams& params, int64_t begin,
//                                                  int64_t end);)
//   // linear/norms_cpu_kernel.cpp, compiled once for each level
//   namespace lmdecode::LMD_SIMD::linear { void rms_norm_rows(...) { ... } }
//   // linear/norms_cpu.cpp
//   const auto rows = LMD_SELECT_KERNEL(linear, rms_norm_rows);
#pragma once

#include "simd/cpu_capability.h"

// Declares kernels in lmdecode::<level>::<area> for every level. Used outside of any namespace,
// after the headers that declare the types of lmdecode::<area>, which need no namespace here. The
// other arguments are declarations, each with its semicolon. Levels that an area is not compiled
// for are declared as well, and nothing may refer to their kernels.
#define LMD_DECLARE_KERNELS(area, ...)                   \
  namespace lmdecode::area {}                            \
  LMD_DECLARE_KERNELS_AT(default_, area, __VA_ARGS__)    \
  LMD_DECLARE_KERNELS_AT(avx2, area, __VA_ARGS__)        \
  LMD_DECLARE_KERNELS_AT(avx512, area, __VA_ARGS__)      \
  LMD_DECLARE_KERNELS_AT(avx512_bf16, area, __VA_ARGS__) \
  LMD_DECLARE_KERNELS_AT(avx512_vnni, area, __VA_ARGS__) \
  LMD_DECLARE_KERNELS_AT(avx512_amx, area, __VA_ARGS__)
#define LMD_DECLARE_KERNELS_AT(level, area, ...) \
  namespace lmdecode::level::area {              \
  using namespace lmdecode::area;                \
  __VA_ARGS__                                    \
  }

// A pointer to a kernel (or to a constant object) at the level in use, from wherever it is used.
// LMD_SELECT_BF16_KERNEL and LMD_SELECT_VNNI_KERNEL: for kernels compiled for these too, at
// avx512_bf16 or avx512_vnni where the machine has them. LMD_SELECT_AMX_KERNEL: for kernels
// compiled for tiles too, at avx512_amx if it is in use, else the last argument. LMD_HAS_<LEVEL> is
// defined in code that is linked with a level (csrc/sources.cmake); a level that is not linked is
// never in use (simd/cpu_capability.h).
#define LMD_SELECT_KERNEL(area, kernel)                                                          \
  (::lmdecode::select_kernel(&::lmdecode::default_::area::kernel, LMD_AVX2_KERNEL(area, kernel), \
                             LMD_AVX512_KERNEL(area, kernel)))
#if defined(LMD_HAS_AVX2)
#define LMD_AVX2_KERNEL(area, kernel) (&::lmdecode::avx2::area::kernel)
#else
#define LMD_AVX2_KERNEL(area, kernel) nullptr
#endif
#if defined(LMD_HAS_AVX512)
#define LMD_AVX512_KERNEL(area, kernel) (&::lmdecode::avx512::area::kernel)
#else
#define LMD_AVX512_KERNEL(area, kernel) nullptr
#endif
#if defined(LMD_HAS_AVX512_BF16)
#define LMD_SELECT_BF16_KERNEL(area, kernel)                              \
  (::lmdecode::use_avx512_bf16() ? &::lmdecode::avx512_bf16::area::kernel \
                                 : LMD_SELECT_KERNEL(area, kernel))
#else
#define LMD_SELECT_BF16_KERNEL(area, kernel) LMD_SELECT_KERNEL(area, kernel)
#endif
#if defined(LMD_HAS_AVX512_VNNI)
#define LMD_SELECT_VNNI_KERNEL(area, kernel)                              \
  (::lmdecode::use_avx512_vnni() ? &::lmdecode::avx512_vnni::area::kernel \
                                 : LMD_SELECT_KERNEL(area, kernel))
#else
#define LMD_SELECT_VNNI_KERNEL(area, kernel) LMD_SELECT_KERNEL(area, kernel)
#endif
#if defined(LMD_HAS_AVX512_AMX)
#define LMD_SELECT_AMX_KERNEL(area, kernel, otherwise) \
  (::lmdecode::use_avx512_amx() ? &::lmdecode::avx512_amx::area::kernel : (otherwise))
#else
#define LMD_SELECT_AMX_KERNEL(area, kernel, otherwise) (otherwise)
#endif
