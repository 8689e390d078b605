// The CPU kernels of sliding_window_decode at every level; tiles also emulated.
#include "amx_emulation.h"
#include "attention/sliding_window_decode.h"
#include "attention_case.h"
#include "simd/cpu_capability.h"

#if defined(LMD_HAS_AVX512)
LMD_DECLARE_KERNELS_AT(
    avx512_amx_emulated, attention,
    void sliding_window_decode_parts(const SlidingWindowAttentionParams& params,
                                     const DecodePart* parts, const DecodePartials& partials,
                                     int64_t begin, int64_t end, void* workspace);
    void sliding_window_decode_heads(const SlidingWindowAttentionParams& params,
                                     const DecodeHead* heads, const DecodePartials& partials,
                                     int64_t begin, int64_t end);)
#endif

namespace lmdecode::attention::test {
namespace {

using Parts = decltype(&default_::attention::sliding_window_decode_parts);
using Heads = decltype(&default_::attention::sliding_window_decode_heads);

// Keys in parts of `split`, a multiple of 64.
void decode(Parts run_parts, Heads run_heads, const SlidingWindowAttentionParams& p, int64_t split,
            bool to_first_cache = false) {
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
  partials.to_first_cache = to_first_cache;
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
  CHECK(!amx_emulation::in_use());
  run_heads(p, heads.data(), partials, 0, static_cast<int64_t>(heads.size()));
}

void run_cases(Parts parts, Heads heads, DType dtype) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, dtype, true);
    const int64_t split = c->one_of({64, 128, 512});
    decode(parts, heads, c->p, split);
    c->check(tolerance_of(dtype));
    const size_t bytes = c->out->values().size() * (dtype == DType::kFloat32 ? 4 : 2);
    const std::string before(static_cast<const char*>(c->p.out), bytes);
    decode(parts, heads, c->p, split, /*to_first_cache=*/true);
    CHECK(std::memcmp(before.data(), c->p.out, bytes) == 0);
  }
  const std::unique_ptr<Case> large = case_of_large_scores(dtype, true);
  decode(parts, heads, large->p, 64);
  large->check(tolerance_of(dtype));
}

using Bits = std::vector<uint16_t>;

Bits out_of(const Case& c) {
  const size_t size = c.out->values().size();
  Bits bits(size);
  std::memcpy(bits.data(), c.p.out, size * sizeof(uint16_t));
  return bits;
}

// A row has the same bits with the other queries and without them.
void check_queries_alone(Parts parts, Heads heads, Case* c, int64_t split) {
  decode(parts, heads, c->p, split);
  const Bits bits = out_of(*c);
  const std::vector<float> lse = c->lse;
  SlidingWindowAttentionParams alone = c->p;
  std::vector<int64_t> positions;
  for (int64_t s = 0; s < c->p.sequences; ++s) {
    for (int64_t t = 0; t < c->p.q_len; ++t) positions.push_back(c->p.position(s, t));
  }
  std::fill(c->lse.begin(), c->lse.end(), 7.0f);
  alone.q_len = 1;
  alone.position_strides = {c->p.q_len, 0, 1, 0};
  for (int64_t t = 0; t < c->p.q_len; ++t) {
    alone.q = static_cast<const uint16_t*>(c->p.q) + t * c->p.q_strides.token;
    alone.out = static_cast<uint16_t*>(c->p.out) + t * c->p.out_strides.token;
    alone.lse = c->p.lse + t * c->p.lse_strides.token;
    alone.q_positions = positions.data() + t;
    decode(parts, heads, alone, split);
  }
  CHECK(out_of(*c) == bits);
  CHECK(std::memcmp(lse.data(), c->lse.data(), lse.size() * sizeof(float)) == 0);
}

// The same bits wherever keys and values lie: in blocks of a pool, with elements apart.
void check_places(Parts parts, Heads heads, Case* c, int64_t split) {
  decode(parts, heads, c->p, split);
  const Bits bits = out_of(*c);
  SlidingWindowAttentionParams moved = c->p;
  const int64_t block = c->one_of({4, 16, 64}), apart = c->one_of({1, 1, 2});
  const int64_t blocks = (c->p.kv_len + block - 1) / block;
  std::vector<int32_t> table;  // backwards
  for (int64_t i = c->p.sequences * blocks; i-- > 0;) table.push_back(static_cast<int32_t>(i));
  moved.places.block_table = table.data();
  moved.places.sequence_stride = blocks;
  moved.places.block_size = block;
  moved.places.rows = c->p.sequences * blocks;
  const auto pool = [&](const void* data, const AttentionStrides& from, int64_t size,
                        AttentionStrides* to) {
    *to = {c->p.kv_heads * block * size * apart, block * size * apart, size * apart, apart};
    const size_t elements = static_cast<size_t>(moved.places.rows * to->sequence);
    Bits copy(elements, 0x7fc0);  // NaN, where nobody may read
    for (int64_t s = 0; s < c->p.sequences; ++s) {
      for (int64_t h = 0; h < c->p.kv_heads; ++h) {
        for (int64_t key = 0; key < c->p.kv_len; ++key) {
          for (int64_t i = 0; i < size; ++i) {
            copy[static_cast<size_t>(moved.key_offset(*to, s, h, key) + i * apart)] =
                static_cast<const uint16_t*>(
                    data)[s * from.sequence + h * from.head + key * from.token + i];
          }
        }
      }
    }
    return copy;
  };
  const Bits keys = pool(c->p.k, c->p.k_strides, c->p.head_size, &moved.k_strides);
  const Bits values = pool(c->p.v, c->p.v_strides, c->p.value_size, &moved.v_strides);
  moved.k = keys.data();
  moved.v = values.data();
  decode(parts, heads, moved, split);
  CHECK(out_of(*c) == bits);
}

void run_tiles(Parts parts, Heads heads) {
  run_cases(parts, heads, DType::kBFloat16);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const std::unique_ptr<Case> c = random_case(seed, DType::kBFloat16, true);
    check_places(parts, heads, c.get(), 128);
    check_queries_alone(parts, heads, c.get(), 128);
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
#if defined(LMD_HAS_AVX2)
TEST(avx2) {
  if (max_cpu_capability() >= CpuCapability::kAvx2) {
    run_all_dtypes(&avx2::attention::sliding_window_decode_parts,
                   &avx2::attention::sliding_window_decode_heads);
  }
}
#endif
#if defined(LMD_HAS_AVX512)
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
TEST(avx512_amx_emulated) {
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    run_tiles(&avx512_amx_emulated::attention::sliding_window_decode_parts,
              &avx512_amx_emulated::attention::sliding_window_decode_heads);
  }
}
#if defined(LMD_HAS_AVX512_AMX)
TEST(avx512_amx) {
  if (use_avx512_amx()) {
    run_tiles(&avx512_amx::attention::sliding_window_decode_parts,
              &avx512_amx::attention::sliding_window_decode_heads);
  }
}
#endif
#endif

}  // namespace
}  // namespace lmdecode::attention::test

CHECK_MAIN()
