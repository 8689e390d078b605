// The ops become known to torch.
#include <torch/csrc/stable/library.h>

#include "bindings/op_schemas.h"

STABLE_TORCH_LIBRARY(lmdecode, m) {
  for (const lmdecode::OpSchema& op : lmdecode::kOpSchemas) m.def(op.text);
}
