// gather_tree, on CPU tensors alone.
#include "decoder/gather_tree.h"

#include "bindings/decoder_checks.h"

namespace lmdecode::decoder {
namespace {

constexpr const char* kGatherTreeOp = "gather_tree";

template <class T>
void run_gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                     int64_t end_token, const Tensor& sequences) {
  GatherTreeParams<T> p;
  p.steps = step_ids.size(0);
  p.batch = step_ids.size(1);
  p.beams = step_ids.size(2);
  p.step_ids = static_cast<const T*>(step_ids.const_data_ptr());
  p.parent_ids = static_cast<const T*>(parent_ids.const_data_ptr());
  p.lengths = static_cast<const T*>(lengths.const_data_ptr());
  p.end_token = static_cast<T>(end_token);
  p.sequences = static_cast<T*>(sequences.mutable_data_ptr());
  const GatherTreeFault fault = gather_tree_cpu(p);
  if (fault.is_found) {
    fail(kGatherTreeOp, "parent_ids of step ", fault.step, ", batch ", fault.batch, " is ",
         fault.parent, "; expected a beam of the same request, 0 to ", p.beams - 1);
  }
}

Tensor gather_tree(const Tensor& step_ids, const Tensor& parent_ids, const Tensor& lengths,
                   int64_t end_token) {
  const char* const op = kGatherTreeOp;
  check_rank(op, "step_ids", step_ids, 3, "[steps, batch, beams]");
  const ScalarType type = dtype_of(step_ids);
  if (type != ScalarType::Int && type != ScalarType::Long) {
    fail(op, "step_ids has dtype ", dtype_name(type), "; expected int32 or int64");
  }
  if (type == ScalarType::Int && end_token != static_cast<int32_t>(end_token)) {
    fail(op, "end_token is ", end_token, "; expected an int32, as step_ids are");
  }
  const int64_t steps = step_ids.size(0), batch = step_ids.size(1), beams = step_ids.size(2);
  const Arguments arguments(op);
  const auto check = [&](const char* name, const Tensor& tensor, Arguments::Sizes sizes) {
    arguments.contiguous<const void>(name, tensor, sizes, nullptr, type);
  };
  check("step_ids", step_ids, {steps, batch, beams});
  check("parent_ids", parent_ids, {steps, batch, beams});
  check("max_sequence_lengths", lengths, {batch});
  Tensor sequences = new_tensor(step_ids, {steps, batch, beams}, type);
  if (type == ScalarType::Int) {
    run_gather_tree<int32_t>(step_ids, parent_ids, lengths, end_token, sequences);
  } else {
    run_gather_tree<int64_t>(step_ids, parent_ids, lengths, end_token, sequences);
  }
  return sequences;
}

}  // namespace
}  // namespace lmdecode::decoder

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("gather_tree", TORCH_BOX(&lmdecode::decoder::gather_tree));
}
