#include "simd/cpu_capability.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace lmdecode {

CpuCapability max_cpu_capability() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return CpuCapability::kAvx512;
  if (avx2) return CpuCapability::kAvx2;
#endif
  return CpuCapability::kDefault;
}

bool use_avx512_bf16() {
#if defined(__x86_64__)
  return cpu_capability() == CpuCapability::kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool use_avx512_vnni() {
#if defined(__x86_64__)
  return cpu_capability() == CpuCapability::kAvx512 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

const char* cpu_capability_name(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kAvx512:
      return "avx512";
    case CpuCapability::kAvx2:
      return "avx2";
    default:
      return "default";
  }
}

namespace {

CpuCapability detect() {
  const CpuCapability best = max_cpu_capability();
  const char* forced = std::getenv("LMDECODE_CPU_CAPABILITY");
  if (forced == nullptr || *forced == '\0') return best;
  for (const CpuCapability level :
       {CpuCapability::kDefault, CpuCapability::kAvx2, CpuCapability::kAvx512}) {
    if (std::string(forced) != cpu_capability_name(level)) continue;
    if (level > best) {
      throw std::invalid_argument(std::string("LMDECODE_CPU_CAPABILITY is ") + forced +
                                  ", but this machine has at most " + cpu_capability_name(best));
    }
    return level;
  }
  throw std::invalid_argument(std::string("LMDECODE_CPU_CAPABILITY is '") + forced +
                              "'; expected default, avx2 or avx512");
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability capability =
      detect();  // a throw leaves it unset: the next call tries again
  return capability;
}

}  // namespace lmdecode
