// cpu_capability, which takes no tensor.
#include "simd/cpu_capability.h"

#include <torch/csrc/stable/library.h>

namespace lmdecode {
namespace {

int64_t cpu_capability_number() { return static_cast<int64_t>(cpu_capability()); }

}  // namespace
}  // namespace lmdecode

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&lmdecode::cpu_capability_number));
}
