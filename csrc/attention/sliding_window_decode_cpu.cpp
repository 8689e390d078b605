// Caches to parts, parts to threads, then heads to threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention/attention_tuning.h"
#include "attention/sliding_window_decode.h"
#include "common/parallel_rows.h"

namespace lmdecode::attention {

namespace {

using namespace tuning;

struct DecodeSplit {
  std::vector<DecodePart> parts;
  std::vector<DecodeHead> heads;
  int64_t slots = 0;
  int64_t keys = 0;  // of all parts
};

// The parts that the keys of a head are cut into: at least one, if of no keys.
int64_t parts_of(KeyRange seen) {
  if (seen.begin == seen.end) return 1;
  return (seen.end - 1) / kSplitKeys - seen.begin / kSplitKeys + 1;
}

DecodeSplit split_keys(const SlidingWindowAttentionParams& p) {
  DecodeSplit split;
  std::vector<KeyRange> seen;
  int64_t most_parts = 0;
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    seen.push_back(keys_seen_by_queries(p, sequence));
    const int64_t parts = parts_of(seen.back());
    most_parts = std::max(most_parts, parts);
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      split.heads.push_back({sequence, head, split.slots, parts});
      split.slots += parts;
    }
    split.keys += p.kv_heads * (seen.back().end - seen.back().begin);
  }
  const auto add_part = [&](const DecodeHead& head, int64_t part) {
    if (part >= head.slots) return;
    const KeyRange keys = seen[static_cast<size_t>(head.sequence)];
    const int64_t cut = (keys.begin / kSplitKeys + part) * kSplitKeys;
    split.parts.push_back({head.sequence,
                           head.kv_head,
                           {std::max(keys.begin, cut), std::min(keys.end, cut + kSplitKeys)},
                           head.first_slot + part});
  };
  if (!p.places.has_table()) {
    for (const DecodeHead& head : split.heads) {
      for (int64_t part = 0; part < head.slots; ++part) add_part(head, part);
    }
    return split;
  }
  // Sequences may share keys: run the same part of all of them in succession, while it is in the
  // caches.
  for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
    for (int64_t part = 0; part < most_parts; ++part) {
      for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
        add_part(split.heads[static_cast<size_t>(sequence * p.kv_heads + kv_head)], part);
      }
    }
  }
  return split;
}

}  // namespace

void sliding_window_decode_cpu(const SlidingWindowAttentionParams& params) {
  const bool is_bfloat16 = params.dtype == DType::kBFloat16;
  const auto by_vectors = is_bfloat16
                              ? LMD_SELECT_BF16_KERNEL(attention, sliding_window_decode_parts)
                              : LMD_SELECT_KERNEL(attention, sliding_window_decode_parts);
  // By the heads alone, not by the queries: a row has the same bits with one query and with more.
  const auto run_parts =
      is_bfloat16 && params.group() >= kTileHeads
          ? LMD_SELECT_AMX_KERNEL(attention, sliding_window_decode_parts, by_vectors)
          : by_vectors;
  const auto run_heads = LMD_SELECT_KERNEL(attention, sliding_window_decode_heads);
  if (params.sequences == 0 || params.q_len == 0) return;
  const DecodeSplit split = split_keys(params);
  DecodePartials partials;
  partials.rows = padded_decode_rows(params.q_len * params.group());
  partials.out_stride = padded_decode_size(params.value_size);
  partials.to_first_cache = is_zen5();
  const size_t rows = static_cast<size_t>(split.slots * partials.rows);
  const auto out =
      std::make_unique_for_overwrite<float[]>(rows * static_cast<size_t>(partials.out_stride));
  const auto row_max = std::make_unique_for_overwrite<float[]>(rows);
  const auto row_sum = std::make_unique_for_overwrite<double[]>(rows);
  partials.out = out.get();
  partials.row_max = row_max.get();
  partials.row_sum = row_sum.get();

  const int64_t parts = static_cast<int64_t>(split.parts.size());
  const double part_nanoseconds = kNanosecondsPerElement *
                                  static_cast<double>(params.head_size + params.value_size) *
                                  static_cast<double>(1 + split.keys / parts);
  parallel_rows("sliding_window_decode", parts, part_nanoseconds,
                decode_workspace_bytes(partials.rows, params.head_size, params.value_size),
                [&](int64_t begin, int64_t end, void* memory) {
                  run_parts(params, split.parts.data(), partials, begin, end, memory);
                });
  const double head_nanoseconds =
      kNanosecondsPerElement * static_cast<double>(partials.rows * partials.out_stride) *
      static_cast<double>(split.slots) / static_cast<double>(split.heads.size());
  parallel_rows(static_cast<int64_t>(split.heads.size()), head_nanoseconds,
                [&](int64_t begin, int64_t end) {
                  run_heads(params, split.heads.data(), partials, begin, end);
                });
}

}  // namespace lmdecode::attention
