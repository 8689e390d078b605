// The streaming passes over a row of logits. A kernel header: see simd/vec.h.
//
// Rows are contiguous: x[0 .. n) of float, BFloat16 or Half. NaN never passes a comparison nor a
// maximum, so it is treated as -inf without being looked for; the passes that come first also
// report it.
#pragma once

#include <type_traits>

#include "sampling/candidate_list.h"
#include "simd/vec.h"

// Which elements of a block of a row reach a bound. A kernel header: see simd/vec.h.

namespace lmdecode::LMD_SIMD::sampling {

constexpr int kBlock = 64;  // elements a step; one word of mask bits
constexpr int kBlockVectors = kBlock / kLanes;

template <class T>
class BlockBound {
 public:
  explicit BlockBound(float bound) : bound_(splat(bound)) {}

  // Bit i of word[b]: x[b * kBlock + i] >= bound. Whether there is NaN.
  bool scan(const T* x, int blocks, uint64_t* word) const {
    uint32_t nan = 0;
    for (int b = 0; b < blocks; ++b, x += kBlock) {
      F32 a[kBlockVectors];
      for (int j = 0; j < kBlockVectors; ++j) a[j] = load(x + j * kLanes);
      Mask unordered = is_nan(a[0], a[1]);
      for (int j = 2; j < kBlockVectors; j += 2)
        unordered = operator_or(unordered, is_nan(a[j], a[j + 1]));
      nan |= bits(unordered);
      uint64_t w = 0;
      for (int j = 0; j < kBlockVectors; ++j) {
        w |= static_cast<uint64_t>(bits(a[j] >= bound_)) << (j * kLanes);
      }
      word[b] = w;
    }
    return nan != 0;
  }

 private:
  F32 bound_;
};

#if defined(LMD_SIMD_AVX512)
// 16-bit integers, 32 a vector: bf16 numbers above zero are ordered as their bits are, those below
// zero the other way round.
template <>
class BlockBound<BFloat16> {
 public:
  explicit BlockBound(float bound) {
    // The least bf16 >= bound. -0 stands for both zeros.
    const uint32_t bits = bound == 0.0f ? 0x80000000u : bits_of(bound);
    const bool is_positive = bits < 0x80000000u;
    const uint32_t least = is_positive ? (bits + 0xffffu) >> 16 : bits >> 16;
    // x ^ flip >= least ^ flip, unsigned: where the bound is above zero, numbers below it come
    // first; else the most negative number comes first, and positive ones last.
    const uint32_t flip = is_positive ? 0x8000u : 0xffffu;
    flip_ = _mm512_set1_epi16(static_cast<short>(flip));
    least_ = _mm512_set1_epi16(static_cast<short>(least ^ flip));
  }

  bool scan(const BFloat16* x, int blocks, uint64_t* word) const {
    const __m512i infinity = _mm512_set1_epi16(0x7f80);
    __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int b = 0; b < blocks; ++b) {
      const __m512i half[2] = {_mm512_loadu_si512(x + b * kBlock),
                               _mm512_loadu_si512(x + b * kBlock + kBlock / 2)};
      for (int h = 0; h < 2; ++h) largest[h] = _mm512_max_epu16(largest[h], magnitude(half[h]));
      word[b] = reached(half[0]) | reached(half[1]) << 32;
    }
    const __m512i all = _mm512_max_epu16(largest[0], largest[1]);
    if (_mm512_cmpgt_epu16_mask(all, infinity) == 0) return false;
    for (int b = 0; b < blocks * 2; ++b) {  // NaN reaches nothing
      const __m512i half = magnitude(_mm512_loadu_si512(x + b * (kBlock / 2)));
      const uint64_t nan = _mm512_cmpgt_epu16_mask(half, infinity);
      word[b / 2] &= ~(nan << (b % 2 * 32));
    }
    return true;
  }

 private:
  static __m512i magnitude(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)); }
  uint64_t reached(__m512i x) const {
    return _mm512_cmpge_epu16_mask(_mm512_xor_si512(x, flip_), least_);
  }

  __m512i flip_, least_;
};
#endif

using namespace lmdecode::sampling;

// A row as it is. Edits replace the logits of some tokens: they tell which tokens are read from
// memory, and append the others: see RowEdits in sampler_stages.h.
struct NoEdits {
  static constexpr bool kAny = false;
  uint64_t word(int64_t) const { return ~uint64_t{0}; }  // of the tokens of a block: bit set, read
  void append(float, CandidateList*) const {}  // the edited tokens with a logit >= threshold
};

template <class T>
inline void prefetch_ahead(const T* p) {
  constexpr int kAhead = 1024;  // bytes
  const char* at = reinterpret_cast<const char*>(p) + kAhead;
  for (int line = 0; line < static_cast<int>(kBlock * sizeof(T)); line += 64)
    __builtin_prefetch(at + line);
}

// A row with strides, side by side, as f32: exact.
template <class T>
const float* gather_row(const T* x, int64_t n, int64_t stride, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i * stride]);
  return out;
}

struct RowMax {
  float max;
  bool has_nan;
};

// on_group(best) gets the largest logits, lane by lane, of each group of `group_blocks` blocks; the
// last group may be shorter, and tokens after the last whole block belong to none.
template <class T, class OnGroup>
RowMax scan_max_groups(const T* x, int64_t n, int64_t group_blocks, OnGroup on_group) {
  F32 top = splat(minus_infinity()), zero = splat(0.0f);
  uint32_t nan = 0;
  int64_t i = 0;
  const int64_t whole = n / kBlock * kBlock;
  while (i < whole) {
    const int64_t left = (whole - i) / kBlock;
    const int64_t end = i + (group_blocks < left ? group_blocks : left) * kBlock;
    F32 best[4];
    for (F32& b : best) b = splat(minus_infinity());
    for (; i < end; i += kBlock) {
      prefetch_ahead(x + i);
      for (int j = 0; j < kBlockVectors; j += 4) {
        F32 a[4];
        for (int l = 0; l < 4; ++l) a[l] = load(x + i + (j + l) * kLanes);
        nan |= bits(operator_or(is_nan(a[0], a[1]), is_nan(a[2], a[3])));
        for (int l = 0; l < 4; ++l) best[l] = max(a[l], best[l]);
      }
    }
    const F32 group = max(max(best[0], best[1]), max(best[2], best[3]));
    on_group(group);
    top = max(group, top);
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    nan |= bits(is_nan(a, zero));
    top = max(a, top);
  }
  return {reduce_max(top), nan != 0};
}

template <class T>
RowMax scan_max(const T* x, int64_t n) {
  return scan_max_groups(x, n, n, [](F32) {});
}

// Number of logits >= bound.
template <class T>
int64_t count_from(const T* x, int64_t n, float bound) {
  const F32 b = splat(bound);
  int64_t total = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) total += count(bits(load(x + i) >= b));
  for (; i < n; ++i) total += to_float(x[i]) >= bound;
  return total;
}

// The first (or last) token of the set with logit >= bound; n if there is none.
template <class T>
int64_t find_first(const T* x, int64_t n, float bound, const KeptSet& set) {
  const F32 b = splat(bound);
  for (int64_t i = 0; i < n; i += kLanes) {
    if (i + kLanes <= n && bits(load(x + i) >= b) == 0) continue;
    const int64_t end = i + kLanes < n ? i + kLanes : n;
    for (int64_t j = i; j < end; ++j) {
      const float value = to_float(x[j]);
      if (value >= bound && set.contains(value, static_cast<uint32_t>(j))) return j;
    }
  }
  return n;
}

template <class T>
int64_t find_last(const T* x, int64_t n, float bound) {
  for (int64_t i = n - 1; i >= 0; --i) {
    if (to_float(x[i]) >= bound) return i;
  }
  return n;
}

// `size` elements of a row of at least as many, in runs spread evenly over it; size is a multiple
// of 2 * kSampleRun. Edited ones count as -inf.
template <class T, class Edits>
void sample_row(const T* x, int64_t n, int size, const Edits& edits, float* sample) {
  constexpr int kRun = tuning::kSampleRun;
  const int runs = size / kRun;
  for (int s = 0; s < runs; ++s) {
    const int64_t from = (n - kRun) * s / (runs - 1);
    for (int j = 0; j < kRun; j += kLanes) store(sample + s * kRun + j, load(x + from + j));
    if constexpr (Edits::kAny) {
      for (int j = 0; j < kRun; ++j) {
        const int64_t at = from + j;
        if ((edits.word(at / kBlock) >> (at % kBlock) & 1) == 0) {
          sample[s * kRun + j] = minus_infinity();
        }
      }
    }
  }
}

// ---- candidates of a block, without branches on the data: which elements pass is unpredictable,
// and a mispredicted branch costs more than a vector store. Passes work in chunks that stay in the
// first-level cache: first a flag a block, then the blocks whose flag is set.

constexpr int kChunkBlocks = 128;

struct ChunkFlags {
  alignas(64) uint32_t flag[kChunkBlocks];
  alignas(64) uint32_t number[kChunkBlocks + kLanes];

  // Lists the numbers of the flagged blocks among the first `blocks`, in order. Returns their
  // count.
  int compact(int blocks) {
    for (int b = blocks; b % kLanes != 0; ++b) flag[b] = 0;
    const U32 zero = splat_u32(0);
    int n = 0;
    for (int b = 0; b < blocks; b += kLanes) {
      const uint32_t mask = ~bits(load(flag + b) == zero) & kAllLanes;
      compress_store(number + n, mask, iota_u32() + splat_u32(static_cast<uint32_t>(b)));
      n += count(mask);
    }
    return n;
  }
};

// Appends the elements of the block x[0 .. kBlock) whose bits are set: up to kFew one by one, more
// by whole vectors.
template <int kFew, class T>
inline void push_block(CandidateList* list, const T* x, int64_t first_token, uint64_t word) {
  const int n = __builtin_popcountll(word);
  if (!std::is_same_v<T, Half> && n <= kFew) {
    float* value = list->value + list->size;
    uint32_t* token = list->token + list->size;
    for (int j = 0; j < kFew; ++j) {  // beyond n: anything
      const int at = __builtin_ctzll(word | (uint64_t{1} << (kBlock - 1)));
      value[j] = to_float(x[at]);
      token[j] = static_cast<uint32_t>(first_token + at);
      word &= word - 1;
    }
    list->size += n;
    return;
  }
  const U32 iota = iota_u32();
  for (int j = 0; j < kBlockVectors; ++j) {
    const uint32_t mask = static_cast<uint32_t>(word >> (j * kLanes)) & kAllLanes;
    push(list, mask, load(x + j * kLanes),
         iota + splat_u32(static_cast<uint32_t>(first_token + j * kLanes)));
  }
}

// Appends the candidates with logit >= *threshold, in token order, but for edited ones. When the
// list holds *limit, on_full(list) may cut it and raise *threshold and *limit. Reports NaN.
template <class T, class Edits, class OnFull>
bool collect(const T* x, int64_t n, float* threshold, int64_t* limit, CandidateList* list,
             const Edits& edits, OnFull on_full) {
  const F32 zero = splat(0.0f);
  bool nan = false;
  int64_t i = 0;
  ChunkFlags chunk;
  alignas(64) uint64_t word[kChunkBlocks];
  while (i + kBlock <= n) {
    const BlockBound<T> bound(*threshold);
    const int blocks =
        static_cast<int>((n - i) / kBlock < kChunkBlocks ? (n - i) / kBlock : kChunkBlocks);
    nan |= bound.scan(x + i, blocks, word);
    for (int b = 0; b < blocks; ++b) {
      if constexpr (Edits::kAny) word[b] &= edits.word(i / kBlock + b);
      chunk.flag[b] = static_cast<uint32_t>(word[b]) | static_cast<uint32_t>(word[b] >> 32);
    }
    const int flagged = chunk.compact(blocks);
    for (int f = 0; f < flagged; ++f) {
      const int64_t first = i + static_cast<int64_t>(chunk.number[f]) * kBlock;
      push_block<4>(list, x + first, first, word[chunk.number[f]]);
    }
    if (list->size >= *limit) on_full(list);
    i += static_cast<int64_t>(blocks) * kBlock;
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    nan |= bits(is_nan(a, zero)) != 0;
    uint32_t mask = bits(a >= splat(*threshold));
    if constexpr (Edits::kAny) {
      mask &= static_cast<uint32_t>(edits.word(i / kBlock) >> (i % kBlock));
    }
    push(list, mask, a, iota_u32() + splat_u32(static_cast<uint32_t>(i)));
  }
  return nan;
}

// Appends the members of the set.
template <class T>
void collect_set(const T* x, int64_t n, const KeptSet& set, CandidateList* list) {
  float threshold = set.lowest;
  int64_t no_limit = INT64_MAX;
  collect(x, n, &threshold, &no_limit, list, NoEdits{}, [](CandidateList*) {});
  if (set.above_ties > set.lowest) keep_set(list, set);
}

struct MassScan {
  uint64_t total = 0;  // of all logits
  uint64_t above = 0;  // of those >= upper
  int64_t count_above = 0;
};

struct NothingAhead {
  void operator()(int64_t) const {}
};

// Sums the masses of a row whose largest logit is max_value, and appends the candidates in [lower,
// upper). ahead(i) is called once for each block that begins at x[i]: to prefetch what comes after
// the row, since this pass is slower than memory. Without kBounded, upper is not looked at: all
// from lower on are appended and `above` stays 0.
template <bool kBounded, class T, class Ahead = NothingAhead>
MassScan scan_masses(const T* x, int64_t n, float max_value, float factor, int fraction_bits,
                     float lower, float upper, CandidateList* list, Ahead ahead = {}) {
  const F32 m = splat(max_value), f = splat(factor), from = splat(lower), to = splat(upper);
  const float scale = static_cast<float>(fraction_bits);
  MassSum total, above;
  int64_t count_above = 0;
  const auto step = [&](F32 a) {
    const F32 weight = scaled_weight(a, m, f, scale);
    uint32_t mask = bits(a >= from);
    if constexpr (kBounded) {
      const Mask high = a >= to;
      total.add(weight, high, &above);
      const uint32_t high_bits = bits(high);
      count_above += count(high_bits);
      mask &= ~high_bits;
    } else {
      total.add(weight);
    }
    return mask;
  };
  int64_t i = 0;
  ChunkFlags chunk;
  alignas(64) uint64_t word[kChunkBlocks];
  while (i + kBlock <= n) {
    const int blocks =
        static_cast<int>((n - i) / kBlock < kChunkBlocks ? (n - i) / kBlock : kChunkBlocks);
    for (int b = 0; b < blocks; ++b) {
      const T* block = x + i + b * kBlock;
      prefetch_ahead(block);
      ahead(i + b * kBlock);
      uint64_t w = 0;
      for (int j = 0; j < kBlockVectors; ++j) {
        w |= static_cast<uint64_t>(step(load(block + j * kLanes))) << (j * kLanes);
      }
      word[b] = w;
      chunk.flag[b] = static_cast<uint32_t>(w) | static_cast<uint32_t>(w >> 32);
    }
    const int flagged = chunk.compact(blocks);
    for (int f = 0; f < flagged; ++f) {
      const int64_t first = i + static_cast<int64_t>(chunk.number[f]) * kBlock;
      push_block<12>(list, x + first, first, word[chunk.number[f]]);
    }
    i += static_cast<int64_t>(blocks) * kBlock;
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    push(list, step(a), a, iota_u32() + splat_u32(static_cast<uint32_t>(i)));
  }
  return {total.total(), above.total(), count_above};
}

inline void fill(float* out, int64_t n, float value) {
  const F32 v = splat(value);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, v);
  for (; i < n; ++i) out[i] = value;
}

// out[i] = logit / temperature where the set contains it, -inf elsewhere.
template <class T>
void write_kept(const T* x, int64_t n, const KeptSet& set, float temperature, float* out) {
  const F32 lowest = splat(set.lowest), t = splat(temperature), off = splat(minus_infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 a = load(x + i);
    const Mask kept = a >= lowest;
    store(out + i, bits(kept) == 0 ? off : select(kept, temperature == 1.0f ? a : a / t, off));
  }
  for (; i < n; ++i) {
    const float a = to_float(x[i]);
    out[i] = a >= set.lowest ? a / temperature : minus_infinity();
  }
  if (!(set.above_ties > set.lowest)) return;
  // Ties at the cut that lost.
  const F32 above = splat(set.above_ties);
  for (i = 0; i < n; i += kLanes) {
    if (i + kLanes <= n) {
      const F32 a = load(x + i);
      if ((bits(a >= lowest) & ~bits(a >= above)) == 0) continue;
    }
    const int64_t end = i + kLanes < n ? i + kLanes : n;
    for (int64_t j = i; j < end; ++j) {
      if (!set.contains(to_float(x[j]), static_cast<uint32_t>(j))) out[j] = minus_infinity();
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::sampling
