// The CPU kernels of sliding_window_decode at every level that the machine has.
#include "attention/sliding_window_decode.h"
#include "attention_case.h"
#include "simd/cpu_capability.h"

namespace lmdecode::attention::test {
namespace {

using Parts = decltype(&default_::attention::sliding_window_decode_parts);
using Heads = decltype(&default_::attention::sliding_window_decode_heads);

// Keys in parts of `split`, a multiple of 64.
void decode(Parts run_parts, Heads run_heads, const SlidingWindowAttentionParams& p,
            int64_t split) {
  std::vector<DecodePart> parts;
  std::vector<DecodeHead> heads;
  int64_t slots = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      heads.push_back({s, h, slots, 0});
      int64_t begin = 0;
      do {
        const int64_t end = std::min(begin + split, p.keys_of(s));
        parts.push_back({s, h, {begin, end}, slots++});
        ++heads.back().slots;
        begin = end;
      } while (begin < p.keys_of(s));
    }
  }
  DecodePartials partials;
  partials.rows = padded_decode_rows(p.q_len * p.group());
  partials.out_stride = padded_decode_size(p.value_size);
  const size_t rows = static_cast<size_t>(slots * partials.rows);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out(rows * static_cast<size_t>(partials.out_stride), nan), row_max(rows, nan);
  std::vector<double> row_sum(rows);
  partials.out = out.data();
  partials.row_max = row_max.data();
  partials.row_sum = row_sum.data();
  const size_t bytes = decode_workspace_bytes(partials.rows, p.head_size, p.value_size);
  void* workspace = std::aligned_alloc(64, bytes);
  std::memset(workspace, 0xff, bytes);
  run_parts(p, parts.data(), partials, 0, static_cast<int64_t>(parts.size()), workspace);
  std::free(workspace);
  run_heads(p, heads.data(), partials, 0, static_cast<int64_t>(heads.size()));
}

void run_cases(Parts parts, Heads heads, DType dtype) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, true);
    decode(parts, heads, c->p, c->one_of({64, 128, 512}));
    c->check(tolerance_of(dtype));
  }
}

void run_all_dtypes(Parts parts, Heads heads) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    run_cases(parts, heads, dtype);
  }
}

TEST(default_level) {
  run_all_dtypes(&default_::attention::sliding_window_decode_parts,
                 &default_::attention::sliding_window_decode_heads);
}
#if defined(LMD_HAS_X86_KERNELS)
TEST(avx2) {
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    run_all_dtypes(&avx2::attention::sliding_window_decode_parts,
                   &avx2::attention::sliding_window_decode_heads);
  }
}
TEST(avx512) {
  if (max_cpu_capability() >= CpuCapability::kAvx512) {
    run_all_dtypes(&avx512::attention::sliding_window_decode_parts,
                   &avx512::attention::sliding_window_decode_heads);
  }
}
TEST(avx512_bf16) {
  if (use_avx512_bf16()) {
    run_cases(&avx512_bf16::attention::sliding_window_decode_parts,
              &avx512_bf16::attention::sliding_window_decode_heads, DType::kBFloat16);
  }
}
#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
