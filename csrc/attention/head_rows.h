// The keys or values of one head of a sequence, wherever they lie, as a list of where each begins.
#pragma once

#include "attention/attention_vec.h"
#include "attention/sliding_window_attention.h"

namespace lmdecode::LMD_SIMD::attention {

using namespace lmdecode::attention;

// One query, key or value.
template <class T>
struct HeadRow {
  const T* data;
  int64_t element_stride;
  int64_t size;
};

// Those of a step or block.
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

}  // namespace lmdecode::LMD_SIMD::attention
