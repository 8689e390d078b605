#include "bindings/tensor_checks.h"
#include "linear/packed_linear.h"
namespace lmdecode { static Tensor pk(const Tensor& w, int64_t f) {
  PackedLinearShape s{w.size(1), w.size(0), static_cast<LinearFormat>(f)};
  Tensor t = new_tensor(w, {static_cast<int64_t>(packed_linear_bytes(s))}, ScalarType::Byte);
  pack_linear(s, static_cast<const float*>(w.const_data_ptr()), w.stride(0), w.stride(1), t.mutable_data_ptr()); return t; } }
STABLE_TORCH_LIBRARY_FRAGMENT(lmdecode, m) { m.def("pack_linear(Tensor w, int format) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) { m.impl("pack_linear", TORCH_BOX(&lmdecode::pk)); }
