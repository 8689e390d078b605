// Queries, keys and values in the order in which tile_product() reads them.
//
// Keys: panels of 64 keys, each [depth, 64]. Values: panels of 64 elements, each [keys, 64]. The
// depth counts elements of Dot: floats along the head or, of bfloat16, pairs along it; values are
// paired along the keys.
#pragma once

#include "attention/attention_tuning.h"
#include "attention/attention_vec.h"
#include "attention/sliding_window_attention.h"
#include "attention/tile_product.h"

// ---- the keys or values of one head of a sequence, as a list of pointers

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// One query, key or value.
template <class T>
struct HeadRow {
  const T* data;
  int64_t element_stride;
  int64_t size;
};

// The queries, keys or values of a step or block.
template <class T>
struct HeadRows {
  const T* const* rows;
  int64_t element_stride;
  int64_t size;

  HeadRow<T> row(int64_t token) const { return {rows[token], element_stride, size}; }
};

// Elements [at, at + kLanes) of a row as floats, 0 beyond its size.
template <class T>
inline F32 load_elements(const HeadRow<T>& row, int64_t at) {
  const T* p = row.data + at * row.element_stride;
  const int64_t left = row.size - at;
  if (row.element_stride == 1) {
    return left >= kLanes ? load(p) : load_part(p, static_cast<int>(left), 0.0f);
  }
  alignas(64) float lane[kLanes] = {};
  for (int64_t i = 0; i < kLanes && i < left; ++i) lane[i] = to_float(p[i * row.element_stride]);
  return load(lane);
}

inline F32 load_int8(const int8_t* p) {
#if defined(LMD_SIMD_AVX512)
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#elif defined(LMD_SIMD_AVX2)
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#else
  alignas(64) float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<float>(p[i]);
  return load(lane);
#endif
}

inline F32 load_elements(const HeadRow<Int8Cell>& row, int64_t at) {
  float scale;
  __builtin_memcpy(&scale, row.data, sizeof(scale));
  const int8_t* p = &row.data[kInt8ScaleBytes + at].byte;
  const int64_t left = row.size - at;
  if (left >= kLanes) return load_int8(p) * splat(scale);
  int8_t part[kLanes] = {};
  for (int64_t i = 0; i < left; ++i) part[i] = p[i];
  return load_int8(part) * splat(scale);
}

// rows[i] = where key keys.begin + i of a sequence begins in `data`, k or v.
template <class T>
inline void list_rows(const SlidingWindowAttentionParams& p, const void* data,
                      const AttentionStrides& s, int64_t sequence, int64_t kv_head, KeyRange keys,
                      const T** rows) {
  const T* base = static_cast<const T*>(data);
  for (int64_t key = keys.begin; key < keys.end;) {
    // Tokens of a block, or of a row of the cache, lie side by side.
    int64_t end = keys.end;
    if (p.places.block_table != nullptr) {
      end = min_of(end, (key / p.places.block_size + 1) * p.places.block_size);
    } else if (p.places.indirection != nullptr) {
      end = key + 1;
    }
    const T* first = base + p.key_offset(s, sequence, kv_head, key);
    for (int64_t i = 0; i < end - key; ++i) *rows++ = first + i * s.token;
    key = end;
  }
}

// Keys are padded with zeros to multiples of this.
constexpr int64_t kKeyGroup = 16;

#if defined(LMD_SIMD_AVX512_BF16)
// Pairs [at, at + kLanes) of a row, as the bits of floats.
inline F32 load_pairs(const HeadRow<BFloat16>& row, int64_t at) {
  const BFloat16* p = row.data + 2 * at * row.element_stride;
  const int64_t left = row.size - 2 * at;
  if (row.element_stride == 1 && left >= 2 * kLanes) {
    return {_mm512_castsi512_ps(_mm512_loadu_si512(p))};
  }
  alignas(64) uint16_t lane[2 * kLanes] = {};
  for (int64_t i = 0; i < 2 * kLanes && i < left; ++i) lane[i] = p[i * row.element_stride].bits;
  return {_mm512_castsi512_ps(_mm512_load_si512(lane))};
}

#if defined(LMD_SIMD_AVX512_AMX)
// From floats, rounded to bfloat16.
inline F32 load_pairs(const HeadRow<float>& row, int64_t at) {
  const F32 first = load_elements(row, 2 * at), second = load_elements(row, 2 * at + kLanes);
  return {reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(second.v, first.v))};
}
#endif

inline void store_vector(uint32_t* p, F32 a) { _mm512_storeu_si512(p, _mm512_castps_si512(a.v)); }
#endif
inline void store_vector(float* p, F32 a) { store(p, a); }

template <class Dot, class T>
inline F32 load_depth(const HeadRow<T>& row, int64_t at) {
#if defined(LMD_SIMD_AVX512_BF16)
  if constexpr (Dot::kPerElement == 2) {
    return load_pairs(row, at);
  } else {
    return load_elements(row, at);
  }
#else
  return load_elements(row, at);
#endif
}

// Elements of Dot that a head of `size` takes.
template <class Dot>
constexpr int64_t depth_of(int64_t size) {
  return (size + Dot::kPerElement - 1) / Dot::kPerElement;
}

// The elements of Dot that hold a range of a step's keys.
template <class Dot>
constexpr KeyRange elements_of(KeyRange keys) {
  return {keys.begin / Dot::kPerElement, depth_of<Dot>(keys.end)};
}

// The keys of a range of a step, to their places in its panels, with zeros to the ends of their
// groups. No other key is read.
template <class Dot, class T>
void pack_keys(const HeadRows<T>& keys, KeyRange range, typename Dot::Element* panels) {
  const int64_t depth = depth_of<Dot>(keys.size);
  const int64_t begin = range.begin / kKeyGroup * kKeyGroup;
  const int64_t end = (range.end + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
  for (int64_t key = begin; key < end; key += kLanes) {
    typename Dot::Element* panel =
        panels + key / kPanelWidth * kPanelWidth * depth + key % kPanelWidth;
    for (int64_t at = 0; at < depth; at += kLanes) {
      F32 square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const bool in_range = key + i >= range.begin && key + i < range.end;
        square[i] = in_range ? load_depth<Dot>(keys.row(key + i), at) : splat(0.0f);
      }
      transpose(square);
      for (int i = 0; i < kLanes && at + i < depth; ++i) {
        store_vector(panel + (at + i) * kPanelWidth, square[i]);
      }
    }
  }
}

// The values beside pack_keys(); pairs are padded with zeros.
template <class Dot, class T>
void pack_values(const HeadRows<T>& values, KeyRange range, typename Dot::Element* panels) {
  constexpr int64_t kPanelRows = tuning::kStepKeys / Dot::kPerElement;
  for (int64_t at = 0; at < values.size; at += kLanes) {
    typename Dot::Element* panel =
        panels + at / kPanelWidth * kPanelWidth * kPanelRows + at % kPanelWidth;
    const KeyRange rows = elements_of<Dot>(range);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      typename Dot::Element* to = panel + row * kPanelWidth;
#if defined(LMD_SIMD_AVX512_BF16)
      if constexpr (Dot::kPerElement == 2) {
        const auto half = [&](int64_t key) {
          const bool in_range = key >= range.begin && key < range.end;
          return in_range ? load_elements(values.row(key), at) : splat(0.0f);
        };
        // Floats that were bfloat16: the upper half of each lane.
        store_vector(to, {_mm512_castsi512_ps(_mm512_or_si512(
                             _mm512_srli_epi32(_mm512_castps_si512(half(2 * row).v), 16),
                             _mm512_castps_si512(half(2 * row + 1).v)))});
        continue;
      }
#endif
      store_vector(to, load_elements(values.row(row), at));
    }
  }
}

// One query as a row of A, times 1, 0 or -1.
template <class Dot, class T>
void pack_query(const HeadRow<T>& query, float sign, typename Dot::Element* row) {
  const int64_t depth = depth_of<Dot>(query.size);
  for (int64_t at = 0; at < depth; at += kLanes) {
    F32 value = load_depth<Dot>(query, at);
#if defined(LMD_SIMD_AVX512_BF16)
    if constexpr (Dot::kPerElement == 2) {
      const __m512i bits = _mm512_castps_si512(value.v);
      if (sign < 0.0f) {
        value.v = _mm512_castsi512_ps(_mm512_xor_si512(bits, _mm512_set1_epi16(-0x8000)));
      } else if (sign == 0.0f) {
        value = splat(0.0f);
      }
      store_vector(row + at, value);
      continue;
    }
#endif
    store_vector(row + at, value * splat(sign));
  }
}

}  // namespace lmdecode::LMD_SIMD::attention
