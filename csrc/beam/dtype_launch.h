// Picks the launch of a kernel by the dtype of its logits. For .cu files.
#pragma once

#include "common/half.h"

namespace lmdecode::beam {

// launch.operator()<T>(), T being the type that a dtype stands for.
template <class Launch>
void launch_of_dtype(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::kFloat32:
      return launch.template operator()<float>();
    case DType::kFloat16:
      return launch.template operator()<Half>();
    case DType::kBFloat16:
      return launch.template operator()<BFloat16>();
  }
}

}  // namespace lmdecode::beam
