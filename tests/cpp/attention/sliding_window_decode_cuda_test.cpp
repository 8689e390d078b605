// The emulated CUDA kernels of sliding_window_decode against double precision.
#include "emulated_attention.h"

namespace lmdecode::attention::test {
namespace {

template <class T, int kSize, bool kPlain>
bool fits(const SlidingWindowAttentionParams& p) {
  return p.value_size <= kSize && (kPlain || p.head_size <= kSize);
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

template <class T, int kSize, bool kPlain>
void run_cases(DType dtype, uint64_t first_seed, int count, int64_t size = 0) {
  for (uint64_t seed = first_seed; count > 0; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, true, 0, size);
    if (!fits<T, kSize, kPlain>(c->p)) continue;
    decode_by_parts<T, kSize, kPlain>(c->p, c->one_of({64, 128, 512}), seed % 6);
    c->check(rounding_of(dtype));
    --count;
  }
  const std::unique_ptr<Case> large = case_of_large_scores(dtype, true);
  CHECK((fits<T, kSize, kPlain>(large->p)));
  decode_by_parts<T, kSize, kPlain>(large->p, 64, 0);
  large->check(rounding_of(dtype));
}

TEST(bfloat16_64) { run_cases<BFloat16, 64, false>(DType::kBFloat16, 0, 150); }
TEST(bfloat16_128) { run_cases<BFloat16, 128, false>(DType::kBFloat16, 1000, 40); }
TEST(bfloat16_256) { run_cases<BFloat16, 256, false>(DType::kBFloat16, 2000, 20); }
TEST(float16_64) { run_cases<Half, 64, false>(DType::kFloat16, 3000, 20); }
TEST(float16_128) { run_cases<Half, 128, false>(DType::kFloat16, 4000, 40); }
// Rows that are exactly as long as the kernel's: the instances without branches.
TEST(bfloat16_exactly_64) { run_cases<BFloat16, 64, false>(DType::kBFloat16, 100, 30, 64); }
TEST(bfloat16_exactly_128) { run_cases<BFloat16, 128, false>(DType::kBFloat16, 1100, 16, 128); }
TEST(float16_exactly_128) { run_cases<Half, 128, false>(DType::kFloat16, 1200, 6, 128); }
TEST(bfloat16_exactly_256) { run_cases<BFloat16, 256, false>(DType::kBFloat16, 2100, 8, 256); }
TEST(float32) { run_cases<float, 64, true>(DType::kFloat32, 5000, 60); }
TEST(float32_256) { run_cases<float, 256, true>(DType::kFloat32, 6000, 8); }
TEST(bfloat16_without_tensor_cores) { run_cases<BFloat16, 1024, true>(DType::kBFloat16, 7000, 4); }

// More parts than the shares of which are held at once, and numbers that its loads do not divide.
template <class T, bool kPlain>
void run_long_caches(DType dtype) {
  uint64_t seed = 0;
  for (const int64_t kv_len : {9000, 128 * 64, 17 * 64 - 1, 33 * 64}) {
    const std::unique_ptr<Case> c = random_case(++seed, dtype, true, kv_len);
    c->p.window = kUnlimited;
    decode_by_parts<T, 128, kPlain>(c->p, 64, seed);
    c->check(rounding_of(dtype));
  }
}

TEST(many_parts_bfloat16) { run_long_caches<BFloat16, false>(DType::kBFloat16); }
TEST(many_parts_float32) { run_long_caches<float, true>(DType::kFloat32); }

template <class T, int kSize, bool kPlain>
void check_invariance(DType dtype, int64_t size = 0) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, true, 0, size);
    if (!fits<T, kSize, kPlain>(c->p)) continue;
    const auto run = [&](const SlidingWindowAttentionParams& p) {
      decode_by_parts<T, kSize, kPlain>(p, 64, seed % 6);
    };
    check_sequences_alone(*c, run);
    check_strides(*c, run);
    check_tables(*c, run);
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

TEST(lengths_out_of_range_are_held_to_it) {
  const std::unique_ptr<Case> c = random_case(1, DType::kBFloat16, true);
  std::vector<int64_t> lengths(static_cast<size_t>(c->p.sequences), int64_t{1} << 50);
  c->p.kv_lengths = lengths.data();
  std::vector<int64_t> positions(static_cast<size_t>(c->p.sequences * c->p.q_len), INT64_MAX);
  c->p.q_positions = positions.data();
  c->p.position_strides = {c->p.q_len, 0, 1, 0};
  decode_by_parts<BFloat16, 128, false>(c->p, 64, 0);
  lengths.assign(lengths.size(), -7);
  decode_by_parts<BFloat16, 128, false>(c->p, 64, 0);
}

TEST(parts_are_as_many_as_a_window_can_have) {
  for (int64_t kv_len = 1; kv_len < 50; kv_len += 3) {
    for (int64_t window = 1; window < 40; ++window) {
      for (int64_t right = 0; right < 3; ++right) {
        SlidingWindowAttentionParams p;
        p.kv_len = kv_len;
        p.q_len = 1 + window % 3;
        p.window = window;
        p.window_right = right;
        int64_t needed = 0;
        for (int64_t length = 0; length <= kv_len; ++length) {
          p.kv_lengths = &length;
          const AttentionSequence sequence = AttentionSequence::of(p, 0);
          RowsKeys keys = RowsKeys::of_no_row();
          for (int64_t token = 0; token < p.q_len; ++token) {
            keys.add(sequence.keys_seen(p, token));
          }
          int64_t count = 0, part = 0;
          for (; decode_part(keys.some, part, 8).end > 0; ++part) {
            const KeyRange of_part = decode_part(keys.some, part, 8);
            CHECK(of_part.begin / 8 == (of_part.end - 1) / 8);
            count += of_part.end - of_part.begin;
          }
          if (keys.some.begin < keys.some.end) CHECK_EQ(count, keys.some.end - keys.some.begin);
          needed = std::max(needed, part);
        }
        const int64_t most = most_decode_parts(p, 8);
        CHECK(needed <= most && most <= std::max<int64_t>(1, (kv_len + 7) / 8));
        CHECK(most <= needed + 2);
      }
    }
  }
}

#else

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, DType::kBFloat16, true);
    const std::string error =
        check::error_of([&] { decode_by_parts<BFloat16, 128, false>(c->p, 512, seed); });
    noticed += check::contains(error, "race") || check::contains(error, "nobody wrote");
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
