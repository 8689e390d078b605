// dynamic_time_warping, on CPU tensors alone.
#include "decoder/dynamic_time_warping.h"

#include "bindings/tensor_checks.h"

namespace lmdecode::decoder {
namespace {

Tensor dynamic_time_warping(const Tensor& cost) {
  const Arguments arguments("dynamic_time_warping");
  DynamicTimeWarpingParams p;
  p.cost = arguments.contiguous<const float>("cost", cost, {-1, -1});
  p.tokens = cost.size(0);
  p.frames = cost.size(1);
  Tensor first_frames = new_tensor(cost, {p.tokens}, ScalarType::Long);
  Tensor sums = new_tensor(cost, {2, p.frames + 1}, ScalarType::Float);
  Tensor steps = new_tensor(cost, {p.tokens, p.frames}, ScalarType::Byte);
  p.sums = static_cast<float*>(sums.mutable_data_ptr());
  p.steps = static_cast<uint8_t*>(steps.mutable_data_ptr());
  p.first_frames = static_cast<int64_t*>(first_frames.mutable_data_ptr());
  dynamic_time_warping_cpu(p);
  return first_frames;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("dynamic_time_warping", TORCH_BOX(&lmdecode::decoder::dynamic_time_warping));
}
