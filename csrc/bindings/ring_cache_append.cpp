// ring_cache_append_ on either device.
#include "kv_cache/ring_cache_append.h"

#include "bindings/device.h"
#include "bindings/kv_cache_checks.h"

namespace lmdecode::kv_cache {
namespace {

constexpr const char* kOp = "ring_cache_append_";

// The arguments of ring_cache_append_, checked, as kernel parameters.
class RingAppendArguments {
 public:
  RingCacheAppendParams p;

  RingAppendArguments(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                      int64_t position, const std::optional<Tensor>& position_rows,
                      int64_t num_sink_tokens)
      : keys_(keys), arguments_(kOp, "keys", keys) {
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
    check_shares_no_bytes(kOp, "values", values, "keys", keys);
    check_apart_from_ring("k", k, values);
    check_apart_from_ring("v", v, values);
    if (position_rows) {
      check_shape(kOp, "position", *position_rows, p.rows);
      check_integers(kOp, "position", *position_rows);
      arguments_.check_device("position", *position_rows);
      check_apart_from_ring("position", *position_rows, values);
      p.positions.rows = integer_rows(*position_rows);
    } else {
      if (!is_position(position)) fail(kOp, "position is ", position, "; expected 0 to 2^40");
    }
    p.positions.all = position;
  }

  // For positions on the CPU only.
  void check_positions() const {
    if (p.positions.rows.data == nullptr) return;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t position = p.positions.at(row);
      if (is_position(position)) continue;
      fail(kOp, "position[", row, "] is ", position, "; expected 0 to 2^40");
    }
  }

 private:
  static bool is_position(int64_t position) {
    return position >= 0 && position <= kMaxRingPosition;
  }

  void check_ring(const char* name, const Tensor& ring) const {
    arguments_.check_device(name, ring);
    check_dtype(kOp, name, ring, dtype_of(keys_));
    if (ring.dim() == 4 && ring.size(0) == keys_.size(0) && ring.size(1) == keys_.size(1) &&
        ring.size(2) == keys_.size(2)) {
      return;
    }
    fail(kOp, name, " has shape ", shape_text(ring), "; expected [", keys_.size(0), ", ",
         keys_.size(1), ", ", keys_.size(2), ", head_size], as keys");
  }

  void check_states(const char* name, const Tensor& states, const char* ring_name,
                    const Tensor& ring, int64_t tokens) const {
    arguments_.check_device(name, states);
    if (dtype_of(states) != dtype_of(ring)) {
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

  void check_apart_from_ring(const char* name, const Tensor& tensor, const Tensor& values) const {
    check_shares_no_bytes(kOp, name, tensor, "keys", keys_);
    check_shares_no_bytes(kOp, name, tensor, "values", values);
  }

  const Tensor& keys_;
  const Arguments arguments_;
};

void ring_cache_append(const Tensor& keys, const Tensor& values, const Tensor& k, const Tensor& v,
                       int64_t position, const std::optional<Tensor>& position_rows,
                       int64_t num_sink_tokens) {
  const RingAppendArguments arguments(keys, values, k, v, position, position_rows, num_sink_tokens);
  const OnDevice device(keys);
  if constexpr (kIsCuda) {
    ring_cache_append_cuda(arguments.p, device.stream());
  } else {
    arguments.check_positions();
    ring_cache_append_cpu(arguments.p);
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache

LMD_OPS(m) { m.impl("ring_cache_append_", TORCH_BOX(&lmdecode::kv_cache::ring_cache_append)); }
