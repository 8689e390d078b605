// Which build of the CPU kernels runs: chosen once, from CPUID or LMDECODE_CPU_CAPABILITY.
#pragma once

#include <cstdint>

namespace lmdecode {

enum class CpuCapability : int32_t { kDefault = 0, kAvx2 = 1, kAvx512 = 2 };

// The level in use. Throws std::invalid_argument where the environment variable holds another word
// than default, avx2 or avx512, or a level that this machine lacks.
CpuCapability cpu_capability();

// The best level of this machine.
CpuCapability max_cpu_capability();

// Whether avx512 is in use on a machine that multiplies bfloat16 pairs as well (AVX512_BF16).
bool use_avx512_bf16();

// Likewise, on a machine that multiplies four pairs of bytes at once (AVX512_VNNI).
bool use_avx512_vnni();

const char* cpu_capability_name(CpuCapability capability);

// Picks one of the builds of a kernel.
template <class Function>
Function* select_kernel(Function* by_default, Function* avx2, Function* avx512) {
  switch (cpu_capability()) {
    case CpuCapability::kAvx512:
      return avx512;
    case CpuCapability::kAvx2:
      return avx2;
    default:
      return by_default;
  }
}

}  // namespace lmdecode
