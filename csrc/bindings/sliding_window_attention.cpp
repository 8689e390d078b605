// sliding_window_attention and sliding_window_decode on either device.
#include "attention/sliding_window_attention.h"

#include <cmath>

#include "attention/sliding_window_decode.h"
#include "bindings/device.h"
#include "bindings/tensor_checks.h"

namespace lmdecode::attention {
namespace {

constexpr int64_t kMaxHeadSize = 1024;

// Options shared by sliding_window_attention and sliding_window_decode.
struct AttentionOptions {
  int64_t window;
  int64_t window_right;
  double scale;
  double softcap;
  const OptionalTensor& sinks;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& q_positions;
  const OptionalTensor& kv_lengths;
  const OptionalTensor& key_padding_mask;
  const OptionalTensor& block_table;
  const OptionalTensor& indirection;
};

// The arguments of an attention op, checked, as kernel parameters.
class AttentionArguments {
 public:
  AttentionArguments(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_kv,
                     const OptionalTensor& attn_mask, bool true_is_visible,
                     const AttentionOptions& options)
      : op_(op), q_(q), arguments_(op, "q", q) {
    p.dtype = float_dtype(op, "q", q);
    check_like_q("k", k);
    check_like_q("v", v);
    const bool has_table = options.block_table || options.indirection;
    if (cu_seqlens_kv ? !cu_seqlens_q.has_value() : cu_seqlens_q && !has_table) {
      fail(op, cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_kv", " was given without ",
           cu_seqlens_q ? "cu_seqlens_kv" : "cu_seqlens_q", "; expected both or none");
    }
    if (cu_seqlens_kv && has_table) {
      fail(op, "cu_seqlens_kv was given with ", options.block_table ? "block_table" : "indirection",
           "; expected kv_lengths");
    }
    if (cu_seqlens_q) {
      set_ragged_queries(*cu_seqlens_q);
    } else {
      set_dense_queries();
    }
    if (cu_seqlens_kv) {
      set_ragged_keys(k, v, *cu_seqlens_q, *cu_seqlens_kv);
    } else if (options.block_table) {
      set_blocks(k, v, options);
    } else if (options.indirection) {
      set_indirect_keys(k, v, *options.indirection);
    } else {
      set_dense_keys(k, v);
    }
    check_sizes(k, v);
    p.q = q.const_data_ptr();
    p.k = k.const_data_ptr();
    p.v = v.const_data_ptr();
    set_window(options);
    p.scale = checked_number("scale", options.scale);
    p.softcap = checked_number("softcap", options.softcap);
    // 0 means none; a value too small for float32 does not.
    if (options.softcap < 0.0 || (p.softcap == 0.0f && options.softcap != 0.0)) {
      fail(op, "softcap is ", options.softcap, "; expected a float32 of more than 0");
    }
    set_row_arguments(options);
    set_masks(attn_mask, true_is_visible, options.key_padding_mask);
    check_places(options.block_table ? options.block_table : options.indirection);
  }

  // Allocates the outputs; lse where asked for, else undefined.
  std::tuple<Tensor, Tensor> make_outputs(bool return_lse) {
    const bool ragged = p.cu_seqlens_q != nullptr;
    const int64_t heads = p.q_heads, size = p.value_size;
    const int64_t tokens = ragged ? q_.size(0) : p.q_len;
    Tensor out = ragged ? new_tensor(q_, {tokens, heads, size}, dtype_of(q_))
                        : new_tensor(q_, {p.sequences, heads, tokens, size}, dtype_of(q_));
    p.out = out.mutable_data_ptr();
    p.out_strides = ragged ? AttentionStrides{0, size, heads * size, 1}
                           : AttentionStrides{heads * tokens * size, tokens * size, size, 1};
    Tensor lse;
    if (return_lse) {
      lse = ragged ? new_tensor(q_, {heads, tokens}, ScalarType::Float)
                   : new_tensor(q_, {p.sequences, heads, tokens}, ScalarType::Float);
      p.lse = lse.mutable_data_ptr<float>();
      p.lse_strides = {ragged ? 0 : heads * tokens, tokens, 1, 0};
    }
    return {out, lse};
  }

  SlidingWindowAttentionParams p;

 private:
  void check_like_q(const char* name, const Tensor& tensor) const {
    check_dtype(op_, name, tensor, dtype_of(q_));
    arguments_.check_device(name, tensor);
  }

  static AttentionStrides head_strides(const Tensor& t) {
    const auto strides = t.strides();
    return {strides[0], strides[1], strides[2], strides[3]};
  }
  static AttentionStrides ragged_strides(const Tensor& t) {
    return {0, t.stride(1), t.stride(0), t.stride(2)};
  }

  void set_dense_queries() {
    check_rank(op_, "q", q_, 4, "[batch, q_heads, tokens, head_size]");
    p.sequences = q_.size(0);
    p.q_heads = q_.size(1);
    p.q_len = q_.size(2);
    p.head_size = q_.size(3);
    p.q_strides = head_strides(q_);
  }

  void set_ragged_queries(const Tensor& cu_q) {
    check_rank(op_, "q", q_, 3, "[tokens, q_heads, head_size], with cu_seqlens_q");
    p.q_heads = q_.size(1);
    p.head_size = q_.size(2);
    check_offsets("cu_seqlens_q", cu_q, q_.size(0), "q");
    p.sequences = cu_q.size(0) - 1;
    p.ragged_queries = q_.size(0);
    p.cu_seqlens_q = cu_q.const_data_ptr<int64_t>();
    p.q_strides = ragged_strides(q_);
  }

  // k and v of `rows` rows, as many as k has where it is negative.
  void set_heads(const Tensor& k, const Tensor& v, int64_t rows, const char* rows_name,
                 const char* tokens_name) {
    if (k.dim() != 4 || v.dim() != 4) {
      const std::string shape = std::string("[") + rows_name + ", kv_heads, " + tokens_name + ", ";
      check_rank(op_, "k", k, 4, (shape + "head_size]").c_str());
      check_rank(op_, "v", v, 4, (shape + "value_size]").c_str());
    }
    if (rows < 0) rows = k.size(0);
    if (k.size(0) != rows || k.size(3) != p.head_size) {
      fail(op_, "k has shape ", shape_text(k), "; expected [", rows, ", kv_heads, ", tokens_name,
           ", ", p.head_size, "] for q ", shape_text(q_));
    }
    p.kv_heads = k.size(1);
    p.value_size = v.size(3);
    if (v.size(0) != rows || v.size(1) != p.kv_heads || v.size(2) != k.size(2)) {
      fail(op_, "v has shape ", shape_text(v), "; expected [", rows, ", ", p.kv_heads, ", ",
           k.size(2), ", value_size] for k ", shape_text(k));
    }
    p.k_strides = head_strides(k);
    p.v_strides = head_strides(v);
    p.places.rows = rows;
  }

  void set_dense_keys(const Tensor& k, const Tensor& v) {
    set_heads(k, v, p.sequences, "batch", "tokens");
    p.kv_len = k.size(2);
  }

  const int32_t* table_entries(const char* name, const Tensor& table) {
    check_dtype(op_, name, table, ScalarType::Int);
    arguments_.check_device(name, table);
    if (table.dim() != 2 || table.size(0) != p.sequences ||
        (table.stride(1) != 1 && table.size(1) > 1)) {
      fail(op_, name, " has shape ", shape_text(table), "; expected [", p.sequences,
           ", entries], the entries of a sequence side by side");
    }
    p.places.sequence_stride = table.stride(0);
    return table.const_data_ptr<int32_t>();
  }

  void set_blocks(const Tensor& k, const Tensor& v, const AttentionOptions& options) {
    if (options.indirection) {
      fail(op_, "indirection was given with block_table; expected one of them");
    }
    set_heads(k, v, -1, "num_blocks", "block_size");
    p.places.block_size = k.size(2);
    if (p.places.block_size < 1) {
      fail(op_, "k has shape ", shape_text(k), "; expected blocks of at least 1 token");
    }
    p.places.block_table = table_entries("block_table", *options.block_table);
    p.kv_len = options.block_table->size(1) * p.places.block_size;
  }

  void set_indirect_keys(const Tensor& k, const Tensor& v, const Tensor& indirection) {
    set_heads(k, v, -1, "rows", "tokens");
    p.kv_len = k.size(2);
    p.places.indirection = table_entries("indirection", indirection);
    if (indirection.size(1) < p.kv_len) {
      fail(op_, "indirection has shape ", shape_text(indirection), "; expected at least ", p.kv_len,
           " entries a sequence, the tokens of k");
    }
  }

  // The entries that are read: of other keys there may be anything. Not looked at on a device.
  void check_places(const OptionalTensor& table) const {
    if (!table || !table->is_cpu()) return;
    const bool has_blocks = p.places.block_table != nullptr;
    const int64_t keys_of_entry = has_blocks ? p.places.block_size : 1;
    const int32_t* entries = has_blocks ? p.places.block_table : p.places.indirection;
    for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
      const KeyRange seen = keys_seen_by_queries(p, sequence);
      const int64_t end = (seen.end + keys_of_entry - 1) / keys_of_entry;
      for (int64_t i = seen.begin / keys_of_entry; i < end; ++i) {
        const int32_t entry = entries[sequence * p.places.sequence_stride + i];
        if (entry >= 0 && entry < p.places.rows) continue;
        fail(op_, has_blocks ? "block_table" : "indirection", "[", sequence, ", ", i, "] is ",
             entry, "; expected 0 to ", p.places.rows - 1, " for keys ", i * keys_of_entry, " to ",
             min_of((i + 1) * keys_of_entry, seen.end) - 1);
      }
    }
  }

  void set_ragged_keys(const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_kv) {
    check_rank(op_, "k", k, 3, "[tokens, kv_heads, head_size], with cu_seqlens_q");
    check_rank(op_, "v", v, 3, "[tokens, kv_heads, value_size], with cu_seqlens_q");
    p.kv_heads = k.size(1);
    p.value_size = v.size(2);
    if (k.size(2) != p.head_size) {
      fail(op_, "k has shape ", shape_text(k), "; expected [tokens, kv_heads, ", p.head_size,
           "] for q ", shape_text(q_));
    }
    if (v.size(0) != k.size(0) || v.size(1) != p.kv_heads) {
      fail(op_, "v has shape ", shape_text(v), "; expected [", k.size(0), ", ", p.kv_heads,
           ", value_size] for k ", shape_text(k));
    }
    check_offsets("cu_seqlens_kv", cu_kv, k.size(0), "k");
    if (cu_q.size(0) != cu_kv.size(0)) {
      fail(op_, "cu_seqlens_kv has shape ", shape_text(cu_kv), "; expected ", shape_text(cu_q),
           ", that of cu_seqlens_q");
    }
    p.ragged_keys = k.size(0);
    p.cu_seqlens_kv = cu_kv.const_data_ptr<int64_t>();
    p.k_strides = ragged_strides(k);
    p.v_strides = ragged_strides(v);
  }

  void check_offsets(const char* name, const Tensor& offsets, int64_t tokens,
                     const char* of) const {
    check_rank(op_, name, offsets, 1, "[sequences + 1]");
    check_dtype(op_, name, offsets, ScalarType::Long);
    arguments_.check_device(name, offsets);
    if (offsets.size(0) < 1 || !offsets.is_contiguous()) {
      fail(op_, name, " has shape ", shape_text(offsets), "; expected [sequences + 1], contiguous");
    }
    if (offsets.size(0) == 1 && tokens > 0) {  // on a device, only sizes are known
      fail(op_, name, " has shape [1], of no sequence; expected one that ends at ", tokens,
           ", the tokens of ", of);
    }
    if (!offsets.is_cpu()) return;
    const int64_t* at = offsets.const_data_ptr<int64_t>();
    const int64_t sequences = offsets.size(0) - 1;
    for (int64_t i = 0; i < sequences; ++i) {
      if (at[i] > at[i + 1]) {
        fail(op_, name, "[", i + 1, "] is ", at[i + 1], " after ", at[i], "; expected no descent");
      }
    }
    if (at[0] != 0 || at[sequences] != tokens) {
      fail(op_, name, " goes from ", at[0], " to ", at[sequences], "; expected 0 to ", tokens,
           ", the tokens of ", of);
    }
  }

  void check_sizes(const Tensor& k, const Tensor& v) const {
    if (p.kv_heads < 1 || p.q_heads < 1 || p.q_heads % p.kv_heads != 0) {
      fail(op_, "k has shape ", shape_text(k), ", ", p.kv_heads,
           " heads; expected a divisor of the ", p.q_heads, " heads of q");
    }
    if (p.head_size < 1 || p.head_size > kMaxHeadSize) {
      fail(op_, "q has shape ", shape_text(q_), "; expected a head_size of 1 to ", kMaxHeadSize);
    }
    if (p.value_size < 1 || p.value_size > kMaxHeadSize) {
      fail(op_, "v has shape ", shape_text(v), "; expected a value_size of 1 to ", kMaxHeadSize);
    }
  }

  void set_window(const AttentionOptions& options) {
    if (options.window != kUnlimited && options.window < 1) {
      fail(op_, "window is ", options.window, "; expected at least 1, or None");
    }
    if (options.window_right != kUnlimited && options.window_right < 0) {
      fail(op_, "window_right is ", options.window_right, "; expected at least 0, or None");
    }
    // Beyond every key.
    p.window = options.window == kUnlimited ? kUnlimited : min_of(options.window, 4 * kMaxPosition);
    p.window_right = options.window_right == kUnlimited
                         ? kUnlimited
                         : min_of(options.window_right, 4 * kMaxPosition);
  }

  float checked_number(const char* name, double value) const {
    const float number = static_cast<float>(value);
    if (!std::isfinite(number)) fail(op_, name, " is ", value, "; expected a finite float32");
    return number;
  }

  void set_row_arguments(const AttentionOptions& options) {
    p.sinks = arguments_.contiguous<const float>("sinks", options.sinks, {p.q_heads});
    if (options.alibi_slopes) {
      const Tensor& slopes = *options.alibi_slopes;
      p.alibi_slopes = slopes.dim() == 1
                           ? arguments_.contiguous<const float>("alibi_slopes", slopes, {p.q_heads})
                           : arguments_.contiguous<const float>("alibi_slopes", slopes,
                                                                {p.sequences, p.q_heads});
      p.alibi_sequence_stride = slopes.dim() == 1 ? 0 : p.q_heads;
    }
    if (options.kv_lengths) set_kv_lengths(*options.kv_lengths);
    if (options.q_positions) set_q_positions(*options.q_positions);
  }

  void set_kv_lengths(const Tensor& lengths) {
    if (p.cu_seqlens_kv != nullptr) {
      fail(op_, "kv_lengths was given with cu_seqlens_kv; expected one of them");
    }
    p.kv_lengths = arguments_.contiguous<const int64_t>("kv_lengths", lengths, {p.sequences});
    for (int64_t i = 0; lengths.is_cpu() && i < p.sequences; ++i) {
      if (p.kv_lengths[i] < 0 || p.kv_lengths[i] > p.kv_len) {
        fail(op_, "kv_lengths[", i, "] is ", p.kv_lengths[i], "; expected 0 to ", p.kv_len);
      }
    }
  }

  void set_q_positions(const Tensor& positions) {
    const char* const name = "q_positions";
    if (p.cu_seqlens_q != nullptr) {
      p.q_positions = arguments_.strided<const int64_t>(name, positions, {q_.size(0)});
      p.position_strides.token = positions.stride(0);
    } else {
      p.q_positions = arguments_.strided<const int64_t>(name, positions, {p.sequences, p.q_len});
      p.position_strides.sequence = positions.stride(0);
      p.position_strides.token = positions.stride(1);
    }
    if (!positions.is_cpu()) return;
    for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
      for (int64_t token = 0; token < p.queries_of(sequence); ++token) {
        const int64_t position = p.position(sequence, token);
        if (position < -kMaxPosition || position > kMaxPosition) {
          fail(op_, "q_positions of sequence ", sequence, " has ", position,
               "; expected -2^40 to 2^40");
        }
      }
    }
  }

  // The stride of a dimension of a mask that may be broadcast.
  int64_t mask_stride(const Tensor& mask, int64_t dim, int64_t size) const {
    if (mask.size(dim) == size) return size == 1 ? 0 : mask.stride(dim);
    if (mask.size(dim) == 1) return 0;
    fail(op_, "attn_mask has shape ", shape_text(mask), "; expected one that broadcasts to [",
         p.sequences, ", ", p.q_heads, ", ", p.q_len, ", ", p.kv_len, "]");
  }

  void set_masks(const OptionalTensor& mask, bool true_is_visible, const OptionalTensor& padding) {
    if (p.cu_seqlens_q != nullptr && (mask || padding)) {
      fail(op_, mask ? "attn_mask" : "key_padding_mask",
           " was given with cu_seqlens_q; expected none for ragged sequences");
    }
    if (mask) {
      arguments_.check_device("attn_mask", *mask);
      check_rank(op_, "attn_mask", *mask, 4, "[batch or 1, heads or 1, q_tokens, kv_tokens]");
      p.mask_type = dtype_of(*mask) == ScalarType::Bool ? MaskType::kBool : additive_type(*mask);
      p.mask_true_is_visible = true_is_visible;
      p.mask = mask->const_data_ptr();
      p.mask_strides = {mask_stride(*mask, 0, p.sequences), mask_stride(*mask, 1, p.q_heads),
                        mask_stride(*mask, 2, p.q_len), mask_stride(*mask, 3, p.kv_len)};
    }
    if (padding) {
      p.key_padding =
          arguments_.strided<const bool>("key_padding_mask", *padding, {p.sequences, p.kv_len});
      p.key_padding_strides.sequence = padding->stride(0);
      p.key_padding_strides.token = padding->stride(1);
    }
  }

  MaskType additive_type(const Tensor& mask) const {
    switch (float_dtype(op_, "attn_mask", mask)) {
      case DType::kFloat16:
        return MaskType::kFloat16;
      case DType::kBFloat16:
        return MaskType::kBFloat16;
      default:
        return MaskType::kFloat32;
    }
  }

  const char* op_;
  const Tensor& q_;
  const Arguments arguments_;
};

std::tuple<Tensor, Tensor> attend(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t window, int64_t window_right,
    double scale, double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
    const OptionalTensor& q_positions, const OptionalTensor& kv_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_kv,
    const OptionalTensor& attn_mask, bool true_is_visible, const OptionalTensor& key_padding_mask,
    const OptionalTensor& block_table, const OptionalTensor& indirection, bool return_lse) {
  AttentionArguments arguments(
      "sliding_window_attention", q, k, v, cu_seqlens_q, cu_seqlens_kv, attn_mask, true_is_visible,
      {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
       key_padding_mask, block_table, indirection});
  const OnDevice device(q);
  std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
  if constexpr (kIsCuda) {
    sliding_window_attention_cuda(arguments.p, device.stream());
  } else {
    sliding_window_attention_cpu(arguments.p);
  }
  return outputs;
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window,
                                  int64_t window_right, double scale, double softcap,
                                  const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                                  const OptionalTensor& q_positions,
                                  const OptionalTensor& kv_lengths,
                                  const OptionalTensor& key_padding_mask,
                                  const OptionalTensor& block_table,
                                  const OptionalTensor& indirection, bool return_lse) {
  AttentionArguments arguments(
      "sliding_window_decode", q, k, v, {}, {}, {}, false,
      {window, window_right, scale, softcap, sinks, alibi_slopes, q_positions, kv_lengths,
       key_padding_mask, block_table, indirection});
  const OnDevice device(q);
  std::tuple<Tensor, Tensor> outputs = arguments.make_outputs(return_lse);
  if constexpr (kIsCuda) {
    Tensor workspace =
        new_tensor(q, {sliding_window_decode_cuda_workspace(arguments.p)}, ScalarType::Float);
    sliding_window_decode_cuda(arguments.p, workspace.mutable_data_ptr<float>(), device.stream());
  } else {
    sliding_window_decode_cpu(arguments.p);
  }
  return outputs;
}

}  // namespace

}  // namespace lmdecode::attention

LMD_OPS(m) {
  m.impl("sliding_window_attention", TORCH_BOX(&lmdecode::attention::attend));
  m.impl("sliding_window_decode", TORCH_BOX(&lmdecode::attention::decode));
}
