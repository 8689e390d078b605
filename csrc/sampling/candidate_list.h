// Candidates of a row in ascending token order, and searches in them: bisections over order keys
// with counts or masses, never a sort. A kernel header: see simd/vec.h.
#pragma once

#include "common/mass_threshold.h"
#include "sampling/kept_set.h"
#include "sampling/sampling_tuning.h"
#include "sampling/sampling_workspace.h"
#include "simd/vec.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// Arrays have room for `capacity` elements, a multiple of kLanes that exceeds the vocabulary by at
// least 2 * kLanes.
struct CandidateList {
  float* value;     // [capacity] logits
  uint32_t* token;  // [capacity] ascending
  uint32_t*
      key;  // [capacity] order_key(tempered(value)), 0 from size to the next multiple of kLanes
  uint64_t* mass;        // [capacity] 0 likewise
  uint32_t* spare_key;   // [capacity] scratch
  uint64_t* spare_mass;  // [capacity] scratch
  int64_t size = 0;
};

// An empty one.
inline CandidateList list_in(const SamplingWorkspace& w) {
  return {w.value, w.token, w.key, w.mass, w.spare_key, w.spare_mass, 0};
}

inline int64_t round_up_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline void push(CandidateList* list, uint32_t mask, F32 value, U32 token) {
  compress_store(list->value + list->size, mask, value);
  compress_store(list->token + list->size, mask, token);
  list->size += count(mask);
}

// Fills the lanes beyond the list that whole vectors reach: their weights are computed too.
inline void pad(CandidateList* list) {
  const int64_t padded = round_up_to_lanes(list->size);
  for (int64_t i = list->size; i < padded; ++i) {
    list->value[i] = minus_infinity();
    list->token[i] = 0;
  }
}

inline void make_keys(CandidateList* list, float temperature) {
  const int64_t padded = round_up_to_lanes(list->size);
  pad(list);
  if (temperature == 1.0f) {
    for (int64_t i = 0; i < padded; i += kLanes)
      store(list->key + i, order_keys(load(list->value + i)));
  } else {
    const F32 t = splat(temperature), infinity = splat(plus_infinity());
    for (int64_t i = 0; i < padded; i += kLanes) {
      const F32 value = load(list->value + i);
      store(list->key + i, order_keys(select(abs(value) == infinity, value, value / t)));
    }
  }
  for (int64_t i = list->size; i < padded; ++i) list->key[i] = 0;
}

struct KeyRange {
  uint32_t low, high;
};

inline KeyRange key_range(const uint32_t* key, int64_t size) {
  uint32_t low = 0xffffffffu, high = 0;
  for (int64_t i = 0; i < size; ++i) {
    low = key[i] < low ? key[i] : low;
    high = key[i] > high ? key[i] : high;
  }
  return {low, high};
}

inline int64_t count_from(const uint32_t* key, int64_t size, uint32_t bound) {
  int64_t total = 0;
  const U32 b = splat_u32(bound);
  for (int64_t i = 0; i < size; i += kLanes) total += count(bits(load(key + i) >= b));
  return total;
}

inline uint64_t mass_from(const uint32_t* key, const uint64_t* mass, int64_t size, uint32_t bound) {
  MassSum sum;
  const U32 b = splat_u32(bound);
  for (int64_t i = 0; i < size; i += kLanes) sum.add(mass + i, load(key + i) >= b);
  return sum.total();
}

// Keeps the candidates whose key is >= bound; at the bound itself, only the first `ties`.
inline void keep_from(CandidateList* list, uint32_t bound, int64_t ties) {
  const U32 b = splat_u32(bound);
  int64_t out = 0;
  for (int64_t i = 0; i < list->size; i += kLanes) {
    const U32 key = load(list->key + i);
    uint32_t mask = bits(key >= b);
    if (const uint32_t equal = bits(key == b)) {
      int surplus = 0;
      if (ties < count(equal)) surplus = count(equal) - static_cast<int>(ties);
      ties -= count(equal) - surplus;
      for (uint32_t drop = equal; surplus > 0; --surplus) {  // drop the last ones
        const uint32_t last = 0x80000000u >> __builtin_clz(drop);
        drop ^= last;
        mask ^= last;
      }
    }
    const F32 value = load(list->value + i);
    const U32 token = load(list->token + i);
    compress_store(list->value + out, mask, value);
    compress_store(list->token + out, mask, token);
    compress_store(list->key + out, mask, key);
    out += count(mask);
  }
  list->size = out;
  const int64_t padded = round_up_to_lanes(out);
  for (int64_t i = out; i < padded; ++i) list->key[i] = 0;
}

// Cuts the list to its first k candidates in the order key descending, token ascending; keeps all
// that tie with the k-th where keep_ties. Returns the key of the k-th. Needs keys; 1 <= k <= size.
inline uint32_t select_top_k(CandidateList* list, int64_t k, bool keep_ties) {
  const KeyRange range = key_range(list->key, list->size);
  if (list->size == k) return range.low;
  // count(>= low) >= k, count(>= high) < k
  uint64_t low = range.low, high = static_cast<uint64_t>(range.high) + 1;
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    const int64_t n = count_from(list->key, list->size, static_cast<uint32_t>(middle));
    low = n >= k ? middle : low;
    high = n >= k ? high : middle;
    if (n == k) break;
  }
  const uint32_t bound = static_cast<uint32_t>(low);
  if (high - low > 1) {  // exactly k from here on, and the k-th key is somewhere above the bound
    keep_from(list, bound, k);
    return key_range(list->key, list->size).low;
  }
  const int64_t greater = bound == 0xffffffffu ? 0 : count_from(list->key, list->size, bound + 1);
  keep_from(list, bound, keep_ties ? list->size : k - greater);
  return bound;
}

struct MassCut {
  uint32_t key;             // of the last token of the prefix
  uint64_t mass_above = 0;  // of the candidates with a larger key
};

// The key at which the masses, added in descending order of keys, reach `target`: 1 <= target <=
// mass of all. Long lists are cut by histograms of 8 bits of the key at a time, in at most four
// passes, each over the rest; short ones by bisection. Narrows copies in the spare arrays; the list
// stays as it is.
inline MassCut find_mass_cut(const CandidateList& list, uint64_t target) {
  const uint32_t* key = list.key;
  const uint64_t* mass = list.mass;
  int64_t size = list.size;
  const KeyRange range = key_range(key, size);
  // mass(>= low) >= target, mass(>= high) < target; `above` is the mass of what narrowing dropped
  // at the top.
  uint64_t low = range.low, high = static_cast<uint64_t>(range.high) + 1, above = 0;
  while (size > tuning::kNarrowSize && high - low > 1) {
    const int width = 64 - leading_zeros(high - low - 1);  // bits of key - low
    const int shift = width > 8 ? width - 8 : 0;
    uint64_t bucket[4][256] = {};  // four copies: neighbours often share a bucket
    for (int64_t i = 0; i < size; ++i)
      bucket[i & 3][(key[i] - static_cast<uint32_t>(low)) >> shift] += mass[i];
    int b = static_cast<int>((high - low - 1) >> shift);
    for (; b > 0; --b) {
      const uint64_t m = bucket[0][b] + bucket[1][b] + bucket[2][b] + bucket[3][b];
      if (above + m >= target) break;
      above += m;
    }
    const uint64_t bottom = low + (static_cast<uint64_t>(b) << shift);
    const uint64_t top = bottom + (uint64_t{1} << shift);
    low = bottom;
    high = top < high ? top : high;
    if (high - low == 1) return {static_cast<uint32_t>(low), above};
    const U32 from = splat_u32(static_cast<uint32_t>(low)),
              to = splat_u32(static_cast<uint32_t>(high - 1));
    int64_t out = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      const U32 k = load(key + i);
      const uint32_t mask = bits(k >= from) & bits(to >= k);
      compress_store(list.spare_mass + out, mask, mass + i);
      compress_store(list.spare_key + out, mask, k);
      out += count(mask);
    }
    const int64_t padded = round_up_to_lanes(out);
    for (int64_t i = out; i < padded; ++i) {
      list.spare_key[i] = 0;
      list.spare_mass[i] = 0;
    }
    key = list.spare_key;
    mass = list.spare_mass;
    size = out;
  }
  uint64_t mass_high = above;  // mass(>= high)
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    const uint64_t m = above + mass_from(key, mass, size, static_cast<uint32_t>(middle));
    const bool reached = m >= target;
    low = reached ? middle : low;
    high = reached ? high : middle;
    mass_high = reached ? mass_high : m;
  }
  return {static_cast<uint32_t>(low), mass_high};
}

struct TieCut {
  int64_t kept = 0;
  uint32_t first_token = 0;
  uint32_t last_token = 0xffffffffu;
  uint64_t mass = 0;
};

// Among the candidates with this key, the first in token order (the last ones where
// high_index_first) whose masses reach `target`.
inline TieCut cut_ties(const CandidateList& list, uint32_t key, uint64_t target,
                       bool high_index_first) {
  constexpr int64_t kChunk = 16 * kLanes;
  TieCut cut;
  const U32 k = splat_u32(key);
  const int64_t padded = round_up_to_lanes(list.size);
  const int64_t chunks = (padded + kChunk - 1) / kChunk;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = (high_index_first ? chunks - 1 - c : c) * kChunk;
    const int64_t end = begin + kChunk < padded ? begin + kChunk : padded;
    MassSum sum;
    int64_t ties = 0;
    for (int64_t i = begin; i < end; i += kLanes) {
      const Mask equal = load(list.key + i) == k;
      sum.add(list.mass + i, equal);
      ties += count(bits(equal));
    }
    const uint64_t mass = sum.total();
    if (ties == 0) continue;
    if (cut.mass + mass < target) {  // all of the chunk, and more
      cut.mass += mass;
      cut.kept += ties;
      continue;
    }
    for (int64_t j = 0; j < end - begin; ++j) {
      const int64_t i = high_index_first ? end - 1 - j : begin + j;
      if (list.key[i] != key) continue;
      cut.mass += list.mass[i];
      ++cut.kept;
      (high_index_first ? cut.first_token : cut.last_token) = list.token[i];
      if (cut.mass >= target) return cut;
    }
  }
  return cut;
}

// Keeps the members of the set.
inline void keep_set(CandidateList* list, const KeptSet& set) {
  const F32 lowest = splat(set.lowest), above = splat(set.above_ties);
  const U32 first = splat_u32(set.first_tie), last = splat_u32(set.last_tie);
  int64_t out = 0;
  const int64_t size = list->size;
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 value = load(list->value + i);
    const U32 token = load(list->token + i);
    uint32_t mask = bits(value >= lowest) &
                    (bits(value >= above) | (bits(token >= first) & bits(last >= token)));
    if (i + kLanes > size) mask &= (1u << (size - i)) - 1;
    compress_store(list->value + out, mask, value);
    compress_store(list->token + out, mask, token);
    out += count(mask);
  }
  list->size = out;
}

// Stable sort by key, descending: candidates of equal keys stay in token order. Needs keys.
inline void sort_by_key(CandidateList* list) {
  uint32_t* key = list->key;
  uint32_t* token = list->token;
  float* value = list->value;
  uint32_t* other_key = list->spare_key;
  // The mass arrays serve as scratch for tokens and values: 8 bytes an element each.
  uint32_t* other_token = reinterpret_cast<uint32_t*>(list->mass);
  float* other_value = reinterpret_cast<float*>(list->spare_mass);
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t start[257] = {};
    for (int64_t i = 0; i < list->size; ++i) ++start[256 - (key[i] >> shift & 255)];
    for (int d = 1; d < 257; ++d) start[d] += start[d - 1];
    for (int64_t i = 0; i < list->size; ++i) {
      const int64_t to = start[255 - (key[i] >> shift & 255)]++;
      other_key[to] = key[i];
      other_token[to] = token[i];
      other_value[to] = value[i];
    }
    uint32_t* k = key;
    key = other_key;
    other_key = k;
    uint32_t* t = token;
    token = other_token;
    other_token = t;
    float* v = value;
    value = other_value;
    other_value = v;
  }
}  // four passes: the result is back in the list's own arrays

}  // namespace lmdecode::LMD_SIMD::sampling
