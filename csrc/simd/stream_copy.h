// Copies by streaming stores, for destinations that are not read soon: they skip the read of each
// line before its write.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmdecode::LMD_SIMD {

constexpr int64_t kCacheLine = 64;

#if defined(__x86_64__)

// 64 bytes, the destination aligned to 64.
inline void stream_line(unsigned char* to, const unsigned char* from) {
#if defined(LMD_SIMD_AVX512)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(LMD_SIMD_AVX2)
  for (int i = 0; i < 2; ++i) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i,
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
  }
#else
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i,
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
  }
#endif
}

// No overlap. Other threads see the bytes after stream_fence.
inline void stream_copy(unsigned char* to, const unsigned char* from, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kCacheLine - 1);
  if (bytes < head + kCacheLine) {
    memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  if (head != 0) memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + 4 * kCacheLine <= bytes; at += 4 * kCacheLine) {
    for (int i = 0; i < 4; ++i) stream_line(to + at + i * kCacheLine, from + at + i * kCacheLine);
  }
  for (; at + kCacheLine <= bytes; at += kCacheLine) stream_line(to + at, from + at);
  if (at < bytes) memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}

inline void stream_fence() { _mm_sfence(); }

#else

inline void stream_copy(unsigned char* to, const unsigned char* from, int64_t bytes) {
  memcpy(to, from, static_cast<size_t>(bytes));
}

inline void stream_fence() {}

#endif

}  // namespace lmdecode::LMD_SIMD
