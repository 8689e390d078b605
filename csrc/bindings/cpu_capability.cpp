// cpu_capability and cpu_capabilities, which take no tensor.
#include "simd/cpu_capability.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace lmdecode {
namespace {

int64_t cpu_capability_number() { return static_cast<int64_t>(cpu_capability()); }

std::tuple<int64_t, int64_t> cpu_capability_sets() {
  int64_t built = 0, usable = 0;
  for (const CpuCapability level : {CpuCapability::kDefault, CpuCapability::kAvx2,
                                    CpuCapability::kAvx512, CpuCapability::kAmx}) {
    const int64_t bit = int64_t{1} << static_cast<int64_t>(level);
    if (!is_built(level)) continue;
    built |= bit;
    if (level <= max_cpu_capability()) usable |= bit;
  }
  return {built, usable};
}

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&lmdecode::cpu_capability_number));
  m.impl("cpu_capabilities", TORCH_BOX(&lmdecode::cpu_capability_sets));
}
