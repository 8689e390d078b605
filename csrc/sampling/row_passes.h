// The streaming passes over a row of logits. A kernel header: see simd/vec.h.
//
// Rows are contiguous: x[0 .. n) of float, BFloat16 or Half. NaN never passes a comparison nor a
// maximum, so it is treated as -inf without being looked for; the passes that come first also
// report it.
#pragma once

#include "sampling/candidate_list.h"

namespace lmdecode::LMD_SIMD {

constexpr int kBlock = 64;  // elements a step; one word of mask bits
constexpr int kBlockVectors = kBlock / kLanes;

template <class T>
inline void prefetch_ahead(const T* p) {
  constexpr int kAhead = 1024;  // bytes
  const char* at = reinterpret_cast<const char*>(p) + kAhead;
  for (int line = 0; line < static_cast<int>(kBlock * sizeof(T)); line += 64)
    __builtin_prefetch(at + line);
}

struct RowMax {
  float max;
  bool has_nan;
};

template <class T>
RowMax scan_max(const T* x, int64_t n) {
  F32 best[4], zero = splat(0.0f);
  for (F32& b : best) b = splat(minus_infinity());
  uint32_t nan = 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_ahead(x + i);
    for (int j = 0; j < kBlockVectors; j += 4) {
      F32 a[4];
      for (int l = 0; l < 4; ++l) a[l] = load(x + i + (j + l) * kLanes);
      nan |= bits(operator_or(is_nan(a[0], a[1]), is_nan(a[2], a[3])));
      for (int l = 0; l < 4; ++l) best[l] = max(a[l], best[l]);
    }
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    nan |= bits(is_nan(a, zero));
    best[0] = max(a, best[0]);
  }
  return {reduce_max(max(max(best[0], best[1]), max(best[2], best[3]))), nan != 0};
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

// The first (or last) token with logit >= bound that the set contains; n where there is none.
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
// of 2 * kSampleRun.
template <class T>
void sample_row(const T* x, int64_t n, int size, float* sample) {
  constexpr int kRun = sampling_tuning::kSampleRun;
  const int runs = size / kRun;
  for (int s = 0; s < runs; ++s) {
    const T* from = x + (n - kRun) * s / (runs - 1);
    for (int j = 0; j < kRun; j += kLanes) store(sample + s * kRun + j, load(from + j));
  }
}

// Appends the candidates with logit >= *threshold, in token order. When the list holds *limit,
// on_full(list) may cut it and raise *threshold and *limit. Reports NaN.
template <class T, class OnFull>
bool collect(const T* x, int64_t n, float* threshold, int64_t* limit, CandidateList* list,
             OnFull on_full) {
  F32 bound = splat(*threshold);
  const F32 zero = splat(0.0f);
  const U32 iota = iota_u32();
  uint32_t nan = 0;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_ahead(x + i);
    F32 a[kBlockVectors];
    for (int j = 0; j < kBlockVectors; ++j) a[j] = load(x + i + j * kLanes);
    F32 best = a[0];
    Mask unordered = is_nan(a[0], a[1]);
    for (int j = 2; j < kBlockVectors; j += 2)
      unordered = operator_or(unordered, is_nan(a[j], a[j + 1]));
    // A NaN in a[0] hides its lane of the maximum, so a block with NaN is always looked at.
    for (int j = 1; j < kBlockVectors; ++j) best = max(a[j], best);
    const uint32_t block_nan = bits(unordered);
    nan |= block_nan;
    if ((bits(best >= bound) | block_nan) == 0) continue;
    for (int j = 0; j < kBlockVectors; ++j) {
      const uint32_t mask = bits(a[j] >= bound);
      if (mask != 0)
        push(list, mask, a[j], iota + splat_u32(static_cast<uint32_t>(i + j * kLanes)));
    }
    if (list->size >= *limit) {
      on_full(list);
      bound = splat(*threshold);
    }
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    nan |= bits(is_nan(a, zero));
    push(list, bits(a >= bound), a, iota + splat_u32(static_cast<uint32_t>(i)));
  }
  return nan != 0;
}

// Appends the members of the set.
template <class T>
void collect_set(const T* x, int64_t n, const KeptSet& set, CandidateList* list) {
  float threshold = set.lowest;
  int64_t no_limit = INT64_MAX;
  collect(x, n, &threshold, &no_limit, list, [](CandidateList*) {});
  if (set.above_ties > set.lowest) keep_set(list, set);
}

struct MassScan {
  uint64_t total = 0;  // of all logits
  uint64_t above = 0;  // of those >= upper
  int64_t count_above = 0;
};

// Sums the masses of a row whose largest logit is max_value, and appends the candidates in [lower,
// upper). Without kBounded, upper is not looked at: all from lower on are appended and `above`
// stays 0.
template <bool kBounded, class T>
MassScan scan_masses(const T* x, int64_t n, float max_value, float factor, int fraction_bits,
                     float lower, float upper, CandidateList* list) {
  const F32 m = splat(max_value), f = splat(factor), from = splat(lower), to = splat(upper);
  const float scale = static_cast<float>(fraction_bits);
  const U32 iota = iota_u32();
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
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_ahead(x + i);
    uint64_t word = 0;
    for (int j = 0; j < kBlockVectors; ++j) {
      word |= static_cast<uint64_t>(step(load(x + i + j * kLanes))) << (j * kLanes);
    }
    if (word == 0) continue;
    for (int j = 0; j < kBlockVectors; ++j) {
      const uint32_t mask = static_cast<uint32_t>(word >> (j * kLanes)) & ((1u << kLanes) - 1);
      if (mask == 0) continue;
      push(list, mask, load(x + i + j * kLanes),
           iota + splat_u32(static_cast<uint32_t>(i + j * kLanes)));
    }
  }
  for (; i < n; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    push(list, step(a), a, iota + splat_u32(static_cast<uint32_t>(i)));
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

}  // namespace lmdecode::LMD_SIMD
