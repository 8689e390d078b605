// The emulated CUDA kernels of sliding_window_attention against double precision.
#include "emulated_attention.h"

namespace lmdecode::attention::test {
namespace {

template <class T, int kSize, bool kPlain>
bool run(const SlidingWindowAttentionParams& p, uint64_t seed) {
  if (p.value_size > kSize || (!kPlain && p.head_size > kSize)) return false;
  if constexpr (kPlain) {
    attend_plainly<T, kSize>(p, seed);
  } else {
    attend_by_tiles<T, kSize>(p, seed);
  }
  return true;
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

template <class T, int kSize, bool kPlain>
void run_cases(DType dtype, uint64_t first_seed, int count, int64_t size = 0) {
  for (uint64_t seed = first_seed; count > 0; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, false, 0, size);
    if (!run<T, kSize, kPlain>(c->p, seed % 6)) continue;
    c->check(rounding_of(dtype));
    --count;
  }
  const std::unique_ptr<Case> large = case_of_large_scores(dtype, false);
  CHECK((run<T, kSize, kPlain>(large->p, 0)));
  large->check(rounding_of(dtype));
}

TEST(bfloat16_64) { run_cases<BFloat16, 64, false>(DType::kBFloat16, 0, 120); }
TEST(bfloat16_128) { run_cases<BFloat16, 128, false>(DType::kBFloat16, 1000, 30); }
TEST(bfloat16_256) { run_cases<BFloat16, 256, false>(DType::kBFloat16, 2000, 15); }
TEST(float16_64) { run_cases<Half, 64, false>(DType::kFloat16, 3000, 20); }
TEST(float16_128) { run_cases<Half, 128, false>(DType::kFloat16, 4000, 6); }
// Rows that are exactly as long as the kernel's: the instances without branches.
TEST(bfloat16_exactly_64) { run_cases<BFloat16, 64, false>(DType::kBFloat16, 100, 24, 64); }
TEST(bfloat16_exactly_128) { run_cases<BFloat16, 128, false>(DType::kBFloat16, 1100, 12, 128); }
TEST(float16_exactly_128) { run_cases<Half, 128, false>(DType::kFloat16, 1200, 4, 128); }
TEST(bfloat16_exactly_256) { run_cases<BFloat16, 256, false>(DType::kBFloat16, 2100, 6, 256); }
TEST(float32) { run_cases<float, 64, true>(DType::kFloat32, 5000, 50); }
TEST(float32_256) { run_cases<float, 256, true>(DType::kFloat32, 6000, 6); }
TEST(bfloat16_without_tensor_cores) { run_cases<BFloat16, 1024, true>(DType::kBFloat16, 7000, 3); }

template <class T, int kSize, bool kPlain>
void check_invariance(DType dtype, int64_t size = 0) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, false, 0, size);
    if (c->p.value_size > kSize || c->p.head_size > kSize) continue;
    const auto run_one = [&](const SlidingWindowAttentionParams& p) {
      run<T, kSize, kPlain>(p, seed % 6);
    };
    check_sequences_alone(*c, run_one);
    check_strides(*c, run_one);
    if (c->mask == nullptr && c->padding == nullptr) check_tables(*c, run_one);
  }
}

TEST(sequences_layouts_and_tables_bfloat16) {
  check_invariance<BFloat16, 128, false>(DType::kBFloat16);
}
// Copied rows, and rows whose elements are read one by one.
TEST(sequences_layouts_and_tables_of_exact_rows) {
  check_invariance<BFloat16, 64, false>(DType::kBFloat16, 64);
}
TEST(sequences_layouts_and_tables_float32) { check_invariance<float, 256, true>(DType::kFloat32); }

// The tokens of a case, whatever its sequences, as ragged ones: the bits of each alone.
template <class T, int kSize, bool kPlain>
void check_ragged(DType dtype) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, false);
    SlidingWindowAttentionParams p = c->p;
    if (p.value_size > kSize || p.head_size > kSize) continue;
    const int64_t queries = p.sequences * p.q_len, keys = p.sequences * p.kv_len;
    p.mask_type = MaskType::kNone;
    p.key_padding = nullptr;
    p.kv_lengths = p.q_positions = nullptr;
    p.alibi_sequence_stride = 0;
    p.q_strides = {0, p.head_size, p.q_heads * p.head_size, 1};
    p.k_strides = {0, p.head_size, p.kv_heads * p.head_size, 1};
    p.v_strides = {0, p.value_size, p.kv_heads * p.value_size, 1};
    p.out_strides = {0, p.value_size, p.q_heads * p.value_size, 1};
    p.lse_strides = {0, 1, p.q_heads, 0};
    const int64_t cut = queries / 3, cut_keys = keys / 4;
    const std::vector<int64_t> ends_q = {0, cut, cut, queries};
    const std::vector<int64_t> ends_kv = {0, cut_keys, keys / 2, keys};
    SlidingWindowAttentionParams ragged = p;
    ragged.sequences = 3;
    ragged.q_len = ragged.kv_len = 0;
    ragged.ragged_queries = queries;
    ragged.ragged_keys = keys;
    ragged.cu_seqlens_q = ends_q.data();
    ragged.cu_seqlens_kv = ends_kv.data();
    const Bits together(ragged, queries);
    run<T, kSize, kPlain>(ragged, seed);
    for (size_t s = 0; s < 3; ++s) {
      SlidingWindowAttentionParams one = p;
      one.sequences = 1;
      one.q_len = ends_q[s + 1] - ends_q[s];
      one.kv_len = ends_kv[s + 1] - ends_kv[s];
      if (one.q_len == 0) continue;
      one.q = from_element(p.q, ends_q[s] * p.q_strides.token, dtype);
      one.k = from_element(p.k, ends_kv[s] * p.k_strides.token, dtype);
      one.v = from_element(p.v, ends_kv[s] * p.v_strides.token, dtype);
      const Bits alone(one, one.q_len);
      run<T, kSize, kPlain>(one, seed);
      CHECK_EQ(together.difference(alone, static_cast<size_t>(ends_q[s] * p.q_heads),
                                   static_cast<size_t>(one.q_len * p.q_heads)),
               "");
    }
    // Offsets that cannot be do no harm.
    const std::vector<int64_t> wild = {-9, queries + 70, 3, INT64_MAX};
    ragged.cu_seqlens_q = ragged.cu_seqlens_kv = wild.data();
    run<T, kSize, kPlain>(ragged, seed);
  }
}

TEST(ragged_bfloat16) { check_ragged<BFloat16, 128, false>(DType::kBFloat16); }
TEST(ragged_float32) { check_ragged<float, 256, true>(DType::kFloat32); }

TEST(a_prompt_in_chunks_has_the_bits_of_the_whole) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed + 50, DType::kBFloat16, false);
    SlidingWindowAttentionParams p = c->p;
    p.mask_type = MaskType::kNone;
    p.key_padding = nullptr;
    p.kv_lengths = p.q_positions = nullptr;
    p.window_right = 0;
    p.sequences = 1;
    p.lse_strides = {0, p.q_len, 1, 0};
    const Bits whole(p, p.q_len);
    attend_by_tiles<BFloat16, 128>(p, seed);
    SlidingWindowAttentionParams last = p;
    last.q_len = std::min<int64_t>(2, p.q_len);
    const int64_t skipped = p.q_len - last.q_len;
    last.q = from_element(p.q, skipped * p.q_strides.token, p.dtype);
    const Bits alone(last, p.q_len);
    attend_by_tiles<BFloat16, 128>(last, seed);
    const size_t bytes = static_cast<size_t>(p.value_size) * 2;
    for (int64_t head = 0; head < p.q_heads; ++head) {
      const size_t from = static_cast<size_t>(head * p.q_len + skipped);
      const size_t to = static_cast<size_t>(head * p.q_len);
      const size_t rows = static_cast<size_t>(last.q_len);
      CHECK(std::memcmp(whole.out.data() + from * bytes, alone.out.data() + to * bytes,
                        rows * bytes) == 0);
      CHECK(std::memcmp(whole.lse.data() + from, alone.lse.data() + to, rows * 4) == 0);
    }
  }
}

TEST(tiles_hold_every_row_once) {
  for (const int64_t group : {1, 3, 8}) {
    for (const int tile_rows : {16, 64}) {
      const std::vector<int64_t> ends = {0, 0, 5, 6, 70, 70, 150};
      SlidingWindowAttentionParams p;
      p.sequences = 6;
      p.kv_heads = 2;
      p.q_heads = 2 * group;
      p.cu_seqlens_q = p.cu_seqlens_kv = ends.data();
      p.ragged_queries = p.ragged_keys = 150;
      std::vector<int> seen(static_cast<size_t>(150 * p.q_heads));
      const AttentionTiles tiles = AttentionTiles::of(p, tile_rows);
      for (int64_t i = 0; i < tiles.count; ++i) {
        const AttentionRows rows = tiles.tile(p, i);
        for (int r = 0; r < rows.count; ++r) {
          const int64_t token = rows.sequence.first_query + rows.token(r);
          CHECK(rows.token(r) < rows.sequence.queries);
          ++seen[static_cast<size_t>(token * p.q_heads + rows.head(r))];
        }
      }
      for (const int times : seen) CHECK_EQ(times, 1);
    }
  }
}

TEST(eight_rows_of_a_chunk_lie_in_all_banks) {
  for (int column = 0; column < 128; column += cuda_kernels::kChunk) {
    for (int first = 0; first < 64; first += 8) {
      int banks = 0;
      for (int row = first; row < first + 8; ++row) {
        const int place = cuda_kernels::swizzled<128>(row, column);
        CHECK(place >= row * 128 && place < (row + 1) * 128 && place % 8 == 0);
        banks |= 1 << (place / 8 % 8);
      }
      CHECK_EQ(banks, 0xff);
    }
  }
}

#else

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, DType::kBFloat16, false);
    const std::string error = check::error_of([&] { run<BFloat16, 128, false>(c->p, seed); });
    noticed += check::contains(error, "race") || check::contains(error, "nobody wrote");
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
