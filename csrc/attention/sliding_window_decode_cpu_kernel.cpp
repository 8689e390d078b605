// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "attention/sliding_window_decode_cpu_kernel.h"

#include "attention/sliding_window_decode.h"
namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

namespace {

template <class Rows, class T, CacheLayout kLayout>
void run_parts(const SlidingWindowAttentionParams& params, const DecodePart* parts,
               const DecodePartials& partials, int64_t begin, int64_t end, void* workspace) {
  DecodeAttention<Rows, T, kLayout> attention(params, partials, workspace);
  for (int64_t i = begin; i < end; ++i)
    attention.run(parts[i], i + 1 < end ? parts + i + 1 : nullptr);
}

bool are_whole_vectors(const SlidingWindowAttentionParams& params, int64_t vector_size) {
  return params.head_size % vector_size == 0 && params.value_size % vector_size == 0;
}

// A block of the kernel's is part of a block of the cache, or of a row.
bool are_at_equal_distances(const KeyPlaces& places, int64_t keys) {
  return places.block_table != nullptr ? places.block_size % keys == 0
                                       : places.indirection == nullptr;
}

// dtype and sizes alone choose the products, so that strides do not change bits.
template <class Rows>
void run_rows(const SlidingWindowAttentionParams& params, const DecodePart* parts,
              const DecodePartials& partials, int64_t begin, int64_t end, void* workspace) {
  using T = typename Rows::Row;
  const bool side_by_side = params.k_strides.element == 1 && params.v_strides.element == 1;
  if (!side_by_side || !are_whole_vectors(params, Rows::kVectorSize)) {
    run_parts<Rows, T, CacheLayout::kCopied>(params, parts, partials, begin, end, workspace);
  } else if (are_at_equal_distances(params.places, Rows::kBlockKeys)) {
    run_parts<Rows, T, CacheLayout::kStrided>(params, parts, partials, begin, end, workspace);
  } else {
    run_parts<Rows, T, CacheLayout::kListed>(params, parts, partials, begin, end, workspace);
  }
}

template <class T>
void add_slots(const SlidingWindowAttentionParams& p, const DecodeHead& head,
               const DecodePartials& partials) {
  const int64_t group = p.group();
  for (int64_t row = 0; row < p.q_len * group; ++row) {
    const int64_t token = row / group, q_head = head.kv_head * group + row % group;
    const auto at = [&](int64_t slot) { return (head.first_slot + slot) * partials.rows + row; };
    float top = minus_infinity();
    for (int64_t slot = 0; slot < head.slots; ++slot) {
      const float of_slot = partials.row_max[at(slot)];
      top = of_slot > top ? of_slot : top;
    }
    // The first slot takes up the others.
    float* out = partials.out + at(0) * partials.out_stride;
    double sum = 0.0;
    for (int64_t slot = 0; slot < head.slots; ++slot) {
      const float of_slot = partials.row_max[at(slot)];
      const bool has_keys = of_slot > minus_infinity();  // or NaN alone: its sum tells
      const double share = has_keys ? __builtin_exp2(static_cast<double>(of_slot - top)) : 1.0;
      sum += partials.row_sum[at(slot)] * share;
      const float* from = partials.out + at(slot) * partials.out_stride;
      const F32 factor = splat(static_cast<float>(share));
      for (int64_t i = 0; i < partials.out_stride; i += kLanes) {
        const F32 part = load(from + i) * factor;
        store(out + i, slot == 0 ? part : load(out + i) + part);
      }
    }
    const RowTotal total = RowTotal::of(static_cast<double>(top), sum,
                                        p.sinks == nullptr ? nullptr : p.sinks + q_head);
    T* to = static_cast<T*>(p.out) + head.sequence * p.out_strides.sequence +
            q_head * p.out_strides.head + token * p.out_strides.token;
    store_quotient(to, out, p.value_size, total.is_empty() ? 1.0f : total.divisor);
    if (p.lse != nullptr) {
      p.lse[head.sequence * p.lse_strides.sequence + q_head * p.lse_strides.head +
            token * p.lse_strides.token] = total.lse();
    }
  }
}

template <class T>
void add_heads(const SlidingWindowAttentionParams& params, const DecodeHead* heads,
               const DecodePartials& partials, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) add_slots<T>(params, heads[i], partials);
}

}  // namespace

void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,
                                 const DecodePart* parts, const DecodePartials& partials,
                                 int64_t begin, int64_t end, void* workspace) {
#if defined(LMD_SIMD_AVX512_BF16) && !defined(LMD_SIMD_AVX512_AMX)
  if (are_whole_vectors(params, PairRows::kVectorSize)) {
    run_rows<PairRows>(params, parts, partials, begin, end, workspace);
  } else {
    run_rows<FloatRows<BFloat16>>(params, parts, partials, begin, end, workspace);
  }
#elif defined(LMD_SIMD_AVX512_AMX)
  const TileScope scope(decode_matrix_config(partials.rows));
  run_rows<MatrixRows>(params, parts, partials, begin, end, workspace);
#else
  if (params.has_int8_keys) {
    return run_parts<FloatRows<float>, float, CacheLayout::kInt8>(params, parts, partials, begin,
                                                                  end, workspace);
  }
  with_element_type(params.dtype, [&](auto element) {
    run_rows<FloatRows<decltype(element)>>(params, parts, partials, begin, end, workspace);
  });
#endif
}

void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,
                                 const DecodeHead* heads, const DecodePartials& partials,
                                 int64_t begin, int64_t end) {
  with_element_type(params.dtype, [&](auto element) {
    add_heads<decltype(element)>(params, heads, partials, begin, end);
  });
}

}  // namespace lmdecode::LMD_SIMD::attention
