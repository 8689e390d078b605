// Which build of the CPU kernels runs: chosen once, from CPUID or LMDECODE_CPU_CAPABILITY.
#pragma once

#include <cstdint>

namespace lmdecode {

// kAmx: kAvx512 with AVX512_BF16 and AVX512_VNNI, and Intel's matrix units (AMX_TILE, AMX_BF16,
// AMX_INT8), which the system has permitted to this process.
enum class CpuCapability : int32_t { kDefault = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// The level in use. Throws std::invalid_argument if the environment variable is not default, avx2,
// avx512 or amx, or names a level that this machine or build does not have.
CpuCapability cpu_capability();

// The best level that this machine runs and this build has. The first call asks the system for the
// use of tiles, where the processor has them.
CpuCapability max_cpu_capability();

// Whether this build has a level (csrc/sources.cmake: LMDECODE_LEVELS).
bool is_built(CpuCapability capability);

// Whether avx512 or amx is in use on a machine that multiplies bfloat16 pairs as well
// (AVX512_BF16), faster than floats, by a build that has these kernels.
bool use_avx512_bf16();

// Likewise, on a machine that multiplies four pairs of bytes at once (AVX512_VNNI).
bool use_avx512_vnni();

// Whether amx is in use.
bool use_avx512_amx();

// Whether it is an AMD processor of family 26, which wants to be asked for memory in another way.
// Results have the same bits.
bool is_zen5();

const char* cpu_capability_name(CpuCapability capability);

// Picks one of the builds of a kernel; null: the build lacks it.
template <class Function, class Avx2, class Avx512>
Function* select_kernel(Function* by_default, Avx2 avx2, Avx512 avx512) {
  switch (cpu_capability()) {
    case CpuCapability::kAmx:
    case CpuCapability::kAvx512:
      return avx512;
    case CpuCapability::kAvx2:
      return avx2;
    default:
      return by_default;
  }
}

}  // namespace lmdecode
