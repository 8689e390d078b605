// Caches to parts, parts to threads, then heads to threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention/attention_tuning.h"
#include "attention/sliding_window_decode.h"
#include "common/parallel_workspace.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

#define LMD_DECLARE_LEVEL(level)                                                          \
  namespace level {                                                                       \
  void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,            \
                                   const DecodePart* parts, const DecodePartials& partials, \
                                   int64_t begin, int64_t end, void* workspace);          \
  void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,            \
                                   const DecodeHead* heads, const DecodePartials& partials, \
                                   int64_t begin, int64_t end);                           \
  }
LMD_DECLARE_LEVEL(default_)
#if defined(LMD_HAS_X86_KERNELS)
LMD_DECLARE_LEVEL(avx2)
LMD_DECLARE_LEVEL(avx512)
LMD_DECLARE_LEVEL(avx512_bf16)
#endif
#undef LMD_DECLARE_LEVEL

namespace {

using namespace attention_tuning;

struct DecodePlan {
  std::vector<DecodePart> parts;
  std::vector<DecodeHead> heads;
  int64_t slots = 0;
  int64_t keys = 0;  // of all parts
};

DecodePlan decode_plan(const SlidingWindowAttentionParams& p) {
  DecodePlan plan;
  for (int64_t sequence = 0; sequence < p.sequences; ++sequence) {
    KeyRange seen = {0, 0};
    for (int64_t token = 0; token < p.q_len; ++token) {
      seen = hull(seen, p.keys_seen(sequence, token));
    }
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      DecodeHead of_head = {sequence, head, plan.slots, 0};
      int64_t begin = seen.begin;
      do {  // at least one slot, if of no keys
        const int64_t end = std::min(seen.end, (begin / kSplitKeys + 1) * kSplitKeys);
        plan.parts.push_back({sequence, head, {begin, end}, plan.slots + of_head.slots++});
        begin = end;
      } while (begin < seen.end);
      plan.heads.push_back(of_head);
      plan.slots += of_head.slots;
      plan.keys += seen.end - seen.begin;
    }
  }
  return plan;
}

}  // namespace

void sliding_window_decode_cpu(const SlidingWindowAttentionParams& params) {
#if defined(LMD_HAS_X86_KERNELS)
  auto run_parts =
      select_kernel(&default_::sliding_window_decode_parts, &avx2::sliding_window_decode_parts,
                    &avx512::sliding_window_decode_parts);
  const auto run_heads =
      select_kernel(&default_::sliding_window_decode_heads, &avx2::sliding_window_decode_heads,
                    &avx512::sliding_window_decode_heads);
  if (params.dtype == DType::kBFloat16 && use_avx512_bf16()) {
    run_parts = &avx512_bf16::sliding_window_decode_parts;
  }
#else
  const auto run_parts = &default_::sliding_window_decode_parts;
  const auto run_heads = &default_::sliding_window_decode_heads;
#endif
  if (params.sequences == 0 || params.q_len == 0) return;
  const DecodePlan plan = decode_plan(params);
  DecodePartials partials;
  partials.rows = padded_decode_rows(params.q_len * params.group());
  partials.out_stride = padded_decode_size(params.value_size);
  const size_t rows = static_cast<size_t>(plan.slots * partials.rows);
  const auto out = std::make_unique_for_overwrite<float[]>(
      rows * static_cast<size_t>(partials.out_stride));
  const auto row_max = std::make_unique_for_overwrite<float[]>(rows);
  const auto row_sum = std::make_unique_for_overwrite<double[]>(rows);
  partials.out = out.get();
  partials.row_max = row_max.get();
  partials.row_sum = row_sum.get();

  const int64_t parts = static_cast<int64_t>(plan.parts.size());
  const double part_nanoseconds =
      kNanosecondsPerElement * static_cast<double>(params.head_size + params.value_size) *
      static_cast<double>(1 + plan.keys / parts);
  parallel_with_workspace(
      "sliding_window_decode", parts,
      1 + static_cast<int64_t>(kMinTaskNanoseconds / part_nanoseconds),
      decode_workspace_bytes(partials.rows, params.head_size, params.value_size),
      [&](int64_t begin, int64_t end, void* memory) {
        run_parts(params, plan.parts.data(), partials, begin, end, memory);
      },
      [] { return std::string(); });
  const double head_nanoseconds = kNanosecondsPerElement *
                                  static_cast<double>(partials.rows * partials.out_stride) *
                                  static_cast<double>(plan.slots) /
                                  static_cast<double>(plan.heads.size());
  parallel_for(static_cast<int64_t>(plan.heads.size()),
               1 + static_cast<int64_t>(kMinTaskNanoseconds / head_nanoseconds),
               [&](int64_t begin, int64_t end) {
                 run_heads(params, plan.heads.data(), partials, begin, end);
               });
}

}  // namespace lmdecode
