// Arguments of ring_cache_append_ to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include "bindings/kv_cache.h"
#include "kv_cache/ring_cache_append.h"

namespace lmdecode::kv_cache {

constexpr const char* kRingAppendOp = "ring_cache_append_";

// The arguments of ring_cache_append_, checked, as kernel parameters.
class RingAppendArguments {
 public:
  RingCacheAppendParams p;

  RingAppendArguments(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                      int64_t position, const std::optional<Tensor>& position_rows,
                      int64_t num_sink_tokens)
      : keys_(keys) {
    check_rank(kOp, "keys", keys, 4, "[batch, kv_heads, slots, head_size]");
    const int64_t slots = keys.size(2);
    if (num_sink_tokens < 0 || num_sink_tokens >= slots) {
      fail(kOp, "num_sink_tokens is ", num_sink_tokens, "; expected 0 to ", slots - 1,
           ", fewer than the slots of keys");
    }
    p.slots = {num_sink_tokens, slots - num_sink_tokens};
    check_ring("values", values);
    check_rank(kOp, "k", k, 4, "[batch, kv_heads, tokens, head_size]");
    check_states("k", k, "keys", keys, k.size(2));
    check_states("v", v, "values", values, k.size(2));
    p.rows = keys.size(0);
    p.heads = keys.size(1);
    p.tokens = k.size(2);
    set_states("keys", keys, "k", k, &p.states[0]);
    set_states("values", values, "v", v, &p.states[1]);
    check_apart("values", values, "keys", keys);
    check_apart_from_ring("k", k, values);
    check_apart_from_ring("v", v, values);
    if (position_rows) {
      check_shape(kOp, "position", *position_rows, p.rows);
      check_integers(kOp, "position", *position_rows);
      check_same_device(kOp, "position", *position_rows, "keys", keys);
      check_apart_from_ring("position", *position_rows, values);
      p.positions.rows = integer_rows(*position_rows);
    } else {
      check_position("position", position);
    }
    p.positions.all = position;
  }

  // Of positions on the CPU: elsewhere nobody looks.
  void check_positions() const {
    if (p.positions.rows.data == nullptr) return;
    for (int64_t row = 0; row < p.rows; ++row) {
      check_position("position[" + std::to_string(row) + "]", p.positions.at(row));
    }
  }

 private:
  static constexpr const char* kOp = kRingAppendOp;

  static void check_position(const std::string& name, int64_t position) {
    if (position >= 0 && position <= kMaxRingPosition) return;
    fail(kOp, name, " is ", position, "; expected 0 to 2^40");
  }

  void check_ring(const char* name, const Tensor& ring) const {
    check_same_device(kOp, name, ring, "keys", keys_);
    check_dtype(kOp, name, ring, keys_.scalar_type());
    if (ring.dim() == 4 && ring.size(0) == keys_.size(0) && ring.size(1) == keys_.size(1) &&
        ring.size(2) == keys_.size(2)) {
      return;
    }
    fail(kOp, name, " has shape ", shape_text(ring), "; expected [", keys_.size(0), ", ",
         keys_.size(1), ", ", keys_.size(2), ", head_size], as keys");
  }

  void check_states(const char* name, const Tensor& states, const char* ring_name,
                    const Tensor& ring, int64_t tokens) const {
    check_same_device(kOp, name, states, "keys", keys_);
    if (states.scalar_type() != ring.scalar_type()) {
      fail(kOp, name, " has another dtype than ", ring_name, "; expected the same");
    }
    if (states.dim() == 4 && states.size(0) == ring.size(0) && states.size(1) == ring.size(1) &&
        states.size(2) == tokens && states.size(3) == ring.size(3)) {
      return;
    }
    fail(kOp, name, " has shape ", shape_text(states), "; expected [", ring.size(0), ", ",
         ring.size(1), ", ", tokens, ", ", ring.size(3), "], to fit ", ring_name);
  }

  static void check_vectors(const char* name, const Tensor& tensor) {
    if (tensor.size(3) <= 1 || tensor.stride(3) == 1 || tensor.numel() == 0) return;
    fail(kOp, name, " has stride ", tensor.stride(3),
         " in its last dimension; expected contiguous vectors");
  }

  static void set_states(const char* ring_name, const Tensor& ring, const char* name,
                         const Tensor& states, RingStates* s) {
    check_vectors(ring_name, ring);
    check_vectors(name, states);
    const StridedTensor to = strided_tensor(ring);
    if (!elements_are_apart(to)) {
      fail(kOp, ring_name, " has strides that make elements overlap; expected a tensor whose ",
           "elements lie apart, not an expanded one");
    }
    const StridedTensor from = strided_input(states);
    s->ring = static_cast<unsigned char*>(ring.mutable_data_ptr());
    s->states = from.data;
    s->vector_bytes = ring.size(3) * to.element_bytes;
    s->ring_row_stride = to.dims[0].stride;
    s->ring_head_stride = to.dims[1].stride;
    s->slot_stride = to.dims[2].stride;
    s->row_stride = from.dims[0].stride;
    s->head_stride = from.dims[1].stride;
    s->token_stride = from.dims[2].stride;
  }

  // Expanded dimensions hold the same bytes again.
  static StridedTensor distinct_elements(const Tensor& tensor) {
    StridedTensor strided = strided_input(tensor);
    for (StridedDim& dim : strided.dims) {
      if (dim.stride == 0 && dim.size > 1) dim.size = 1;
    }
    return strided;
  }

  static void check_apart(const char* name, const Tensor& tensor, const char* ring_name,
                          const Tensor& ring) {
    if (tensors_share_bytes(strided_input(ring), distinct_elements(tensor))) {
      fail(kOp, name, " shares memory with ", ring_name, "; expected a tensor of its own");
    }
  }

  void check_apart_from_ring(const char* name, const Tensor& tensor, const Tensor& values) const {
    check_apart(name, tensor, "keys", keys_);
    check_apart(name, tensor, "values", values);
  }

  const Tensor& keys_;
};

}  // namespace lmdecode::kv_cache
