// Launches of the emulated attention kernels, as the .cu files make them but in small grids.
#pragma once

#include "attention/sliding_window_attention_kernel.cuh"
#include "attention/sliding_window_decode_kernel.cuh"
#include "attention_case.h"

namespace lmdecode::attention::test {

inline unsigned some_blocks(int64_t count, uint64_t seed) {
  const int64_t blocks = seed % 2 == 0 ? count : (count + 1) / 2;
  return static_cast<unsigned>(std::max<int64_t>(blocks, 1));
}

template <class T, int kSize>
void attend_by_tiles(const SlidingWindowAttentionParams& p, uint64_t seed) {
  using Shape = cuda_kernels::AttentionShape<kSize>;
  using namespace cuda_kernels;
  const auto launch = [&](const auto kernel) {
    emulation::launch(kernel, dim3(some_blocks(AttentionTiles::of(p, Shape::kRows).count, seed)),
                      dim3(Shape::kThreads), 1, sizeof(AttentionStorage<T, kSize>), seed, p);
  };
  if (needs_score_rule(p)) {
    return launch(sliding_window_attention_kernel<T, kSize, true, RowKind::kAny>);
  }
  with_row_kind(p, kSize,
                [&](auto kind) { launch(sliding_window_attention_kernel<T, kSize, false, kind>); });
}

template <class T, int kSize>
void attend_plainly(const SlidingWindowAttentionParams& p, uint64_t seed) {
  using Storage = cuda_kernels::PlainStorage<cuda_tuning::kPlainRows>;
  emulation::launch(cuda_kernels::plain_attention_kernel<T, kSize>,
                    dim3(some_blocks(AttentionTiles::of(p, Storage::kRows).count, seed)),
                    dim3(cuda_kernels::kPlainThreads), 1, sizeof(Storage), seed, p);
}

// Parts of `split` keys, a multiple of 64, and what they make.
template <class T, int kSize, bool kPlain>
void decode_by_parts(const SlidingWindowAttentionParams& p, int64_t split, uint64_t seed) {
  using namespace cuda_kernels;
  using Shape = DecodeShape<kSize>;
  using PlainRows = PlainStorage<cuda_tuning::kPlainDecodeRows>;
  DecodeLaunch launch = decode_launch(p, kPlain ? PlainRows::kRows : Shape::kRows, split);
  const size_t floats = static_cast<size_t>(launch.workspace());
  const std::unique_ptr<float[]> workspace(new float[floats]);
  for (size_t i = 0; i < floats; ++i) workspace[i] = std::numeric_limits<float>::quiet_NaN();
  set_decode_workspace(workspace.get(), &launch);
  if constexpr (kPlain) {
    const auto kernel = launch.is_whole() ? plain_decode_kernel<T, kSize, true>
                                          : plain_decode_kernel<T, kSize, false>;
    emulation::launch(kernel, dim3(some_blocks(launch.count(), seed)), dim3(kPlainThreads), 1,
                      sizeof(PlainRows), seed, launch);
  } else {
    with_row_kind(p, kSize, [&](auto kind) {
      const auto kernel = launch.is_whole() ? sliding_window_decode_kernel<T, kSize, true, kind>
                                            : sliding_window_decode_kernel<T, kSize, false, kind>;
      emulation::launch(kernel, dim3(some_blocks(launch.count(), seed)), dim3(Shape::kThreads), 1,
                        sizeof(DecodeStorage<T, kSize>), seed, launch);
    });
  }
  if (launch.is_whole()) return;
  emulation::launch(combine_parts_kernel<T>, dim3(2), dim3(64), 1, sizeof(CombineStorage), seed,
                    launch);
}

// What rounding allows: of the weights, and of the result, once each.
inline double rounding_of(DType dtype) {
  return dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kFloat16 ? 1e-3 : 8e-3;
}

inline size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// `data` from element `at` on.
inline const void* from_element(const void* data, int64_t at, DType dtype) {
  return static_cast<const char*>(data) + at * static_cast<int64_t>(element_bytes(dtype));
}

// The bits of an output and its lse: of a call on its own memory.
struct Bits {
  std::vector<char> out;
  std::vector<float> lse;

  explicit Bits(SlidingWindowAttentionParams& p, int64_t tokens)
      : out(static_cast<size_t>(tokens * p.q_heads * p.value_size) * element_bytes(p.dtype)),
        lse(static_cast<size_t>(tokens * p.q_heads)) {
    p.out = out.data();
    p.lse = lse.data();
  }
  std::string difference(const Bits& other, size_t begin, size_t rows) const {
    const size_t row = out.size() / lse.size();
    if (std::memcmp(out.data() + begin * row, other.out.data(), rows * row) != 0) return "out";
    if (std::memcmp(lse.data() + begin, other.lse.data(), rows * sizeof(float)) != 0) return "lse";
    return "";
  }
};

// Rows [sequences, heads, tokens] of `size` elements anew, by these strides.
inline std::vector<char> laid_out(const void* data, const AttentionStrides& from,
                                  const AttentionStrides& to, int64_t sequences, int64_t heads,
                                  int64_t tokens, int64_t size, DType dtype) {
  const size_t bytes = element_bytes(dtype);
  const int64_t last = (sequences - 1) * to.sequence + (heads - 1) * to.head +
                       (tokens - 1) * to.token + (size - 1) * to.element;
  std::vector<char> copy(static_cast<size_t>(last + 1) * bytes);
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < size; ++i) {
          const int64_t at = s * from.sequence + h * from.head + t * from.token + i * from.element;
          const int64_t place = s * to.sequence + h * to.head + t * to.token + i * to.element;
          std::memcpy(copy.data() + static_cast<size_t>(place) * bytes,
                      from_element(data, at, dtype), bytes);
        }
      }
    }
  }
  return copy;
}

// Tokens before heads, gaps between elements, rows that begin anywhere: the same bits.
template <class Run>
void check_strides(const Case& c, const Run& run) {
  SlidingWindowAttentionParams plain = c.p;
  const int64_t tokens = c.p.sequences * c.p.q_len;
  const Bits expected(plain, tokens);
  run(plain);
  for (const int64_t element : {1, 2, 3}) {
    SlidingWindowAttentionParams p = c.p;
    const auto strides = [&](int64_t heads, int64_t length, int64_t size) {
      const int64_t head = size * element + 1, token = heads * head;
      return AttentionStrides{length * token, head, token, element};
    };
    p.q_strides = strides(p.q_heads, p.q_len, p.head_size);
    p.k_strides = strides(p.kv_heads, p.kv_len, p.head_size);
    p.v_strides = strides(p.kv_heads, p.kv_len, p.value_size);
    const std::vector<char> q = laid_out(c.p.q, c.p.q_strides, p.q_strides, p.sequences, p.q_heads,
                                         p.q_len, p.head_size, p.dtype);
    const std::vector<char> k = laid_out(c.p.k, c.p.k_strides, p.k_strides, p.sequences, p.kv_heads,
                                         p.kv_len, p.head_size, p.dtype);
    const std::vector<char> v = laid_out(c.p.v, c.p.v_strides, p.v_strides, p.sequences, p.kv_heads,
                                         p.kv_len, p.value_size, p.dtype);
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    const Bits bits(p, tokens);
    run(p);
    CHECK_EQ(bits.difference(expected, 0, expected.lse.size()), "");
  }
}

// Run(params) of each sequence alone gives the bits that it gives of all together.
template <class Run>
void check_sequences_alone(const Case& c, const Run& run) {
  SlidingWindowAttentionParams all = c.p;
  const Bits together(all, c.p.sequences * c.p.q_len);
  run(all);
  for (int64_t s = 0; s < c.p.sequences; ++s) {
    SlidingWindowAttentionParams one = c.p;
    one.sequences = 1;
    one.q = from_element(c.p.q, s * c.p.q_strides.sequence, c.p.dtype);
    one.k = from_element(c.p.k, s * c.p.k_strides.sequence, c.p.dtype);
    one.v = from_element(c.p.v, s * c.p.v_strides.sequence, c.p.dtype);
    if (one.kv_lengths != nullptr) one.kv_lengths += s;
    if (one.q_positions != nullptr) one.q_positions += s * one.position_strides.sequence;
    if (one.key_padding != nullptr) one.key_padding += s * one.key_padding_strides.sequence;
    if (one.mask != nullptr) {
      one.mask = static_cast<const bool*>(one.mask) + s * one.mask_strides.sequence;
    }
    const Bits alone(one, one.q_len);
    run(one);
    const size_t rows = static_cast<size_t>(one.q_heads * one.q_len);
    CHECK_EQ(together.difference(alone, static_cast<size_t>(s) * rows, rows), "");
  }
}

// Blocks of a shuffled pool, or rows that an index names, give the bits of a cache in order; what a
// table says of keys that nobody sees is not looked at, and entries that cannot be do no harm.
template <class Run>
void check_tables(const Case& c, const Run& run) {
  SlidingWindowAttentionParams plain = c.p;
  const int64_t tokens = c.p.sequences * c.p.q_len;
  const Bits expected(plain, tokens);
  run(plain);

  constexpr int64_t kBlock = 5;
  const int64_t blocks = (c.p.kv_len + kBlock - 1) / kBlock, all = blocks * c.p.sequences;
  SlidingWindowAttentionParams paged = c.p;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < all; ++i) table.push_back(static_cast<int32_t>((i * 7 + 3) % all));
  if (all % 7 == 0) return;  // 7 does not shuffle these
  std::vector<char> pools[2];
  const AttentionStrides* from[2] = {&c.p.k_strides, &c.p.v_strides};
  AttentionStrides* to[2] = {&paged.k_strides, &paged.v_strides};
  for (int i = 0; i < 2; ++i) {
    const int64_t size = i == 0 ? c.p.head_size : c.p.value_size;
    *to[i] = {c.p.kv_heads * kBlock * size, kBlock * size, size, 1};
    const size_t bytes = element_bytes(c.p.dtype);
    pools[i].assign(static_cast<size_t>(all * c.p.kv_heads * kBlock * size) * bytes, '\xff');
    for (int64_t s = 0; s < c.p.sequences; ++s) {
      for (int64_t head = 0; head < c.p.kv_heads; ++head) {
        for (int64_t key = 0; key < c.p.keys_of(s); ++key) {
          const int64_t block = table[static_cast<size_t>(s * blocks + key / kBlock)];
          const int64_t at =
              block * to[i]->sequence + head * to[i]->head + key % kBlock * to[i]->token;
          std::memcpy(
              pools[i].data() + static_cast<size_t>(at) * bytes,
              from_element(i == 0 ? c.p.k : c.p.v,
                           s * from[i]->sequence + head * from[i]->head + key * from[i]->token,
                           c.p.dtype),
              static_cast<size_t>(size) * bytes);
        }
      }
    }
  }
  for (int64_t s = 0; s < c.p.sequences; ++s) {
    const KeyRange seen = keys_seen_by_queries(c.p, s);
    for (int64_t i = 0; i < blocks; ++i) {
      const bool is_seen = i * kBlock < seen.end && (i + 1) * kBlock > seen.begin;
      if (!is_seen) table[static_cast<size_t>(s * blocks + i)] = i % 2 == 0 ? -1 : 1 << 30;
    }
  }
  paged.k = pools[0].data();
  paged.v = pools[1].data();
  paged.kv_len = blocks * kBlock;
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < c.p.sequences; ++s) lengths.push_back(c.p.keys_of(s));
  paged.kv_lengths = lengths.data();
  paged.places.block_table = table.data();
  paged.places.sequence_stride = blocks;
  paged.places.block_size = kBlock;
  paged.places.rows = all;
  const Bits by_blocks(paged, tokens);
  run(paged);
  CHECK_EQ(by_blocks.difference(expected, 0, expected.lse.size()), "");

  // Each key in its own row of the cache: with one sequence more in the cache than there are.
  SlidingWindowAttentionParams indirect = c.p;
  std::vector<int32_t> index;
  for (int64_t s = 0; s < c.p.sequences; ++s) {
    for (int64_t key = 0; key < c.p.kv_len; ++key) index.push_back(static_cast<int32_t>(s));
  }
  indirect.places.indirection = index.data();
  indirect.places.sequence_stride = c.p.kv_len;
  indirect.places.rows = c.p.sequences;
  const Bits by_index(indirect, tokens);
  run(indirect);
  CHECK_EQ(by_index.difference(expected, 0, expected.lse.size()), "");
  for (int32_t& entry : index) entry = c.p.sequences % 2 == 0 ? -5 : 1 << 20;
  run(indirect);  // finds nothing, and reads nothing
}

}  // namespace lmdecode::attention::test
