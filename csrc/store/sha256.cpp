#include "store/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace lmdecode::store {

namespace {

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

#if defined(__x86_64__)

__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(uint32_t* state,
                                                                 const uint8_t* data,
                                                                 size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions want the state as (a, b, e, f) and (c, d, g, h).
  __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  low = _mm_shuffle_epi32(low, 0xb1);
  high = _mm_shuffle_epi32(high, 0x1b);
  __m128i abef = _mm_alignr_epi8(low, high, 8);
  __m128i cdgh = _mm_blend_epi16(high, low, 0xf0);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (int group = 0; group < 16; ++group) {
      __m128i& current = words[group & 3];
      if (group < 4) {
        current = _mm_shuffle_epi8(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * group)), swap);
      } else {
        const __m128i last = words[(group + 3) & 3], third = words[(group + 2) & 3];
        const __m128i second = words[(group + 1) & 3];
        current =
            _mm_add_epi32(_mm_sha256msg1_epu32(current, second), _mm_alignr_epi8(last, third, 4));
        current = _mm_sha256msg2_epu32(current, last);
      }
      const __m128i sum = _mm_add_epi32(
          current, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1b);
  high = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(low, high, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(high, low, 8));
}

#endif

}  // namespace

void sha256_compress_portable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) + w[i - 7] +
             (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
    }
    uint32_t s[8];
    std::memcpy(s, state, sizeof(s));
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = s[4], a = s[0];
      const uint32_t first = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & s[5]) ^ (~e & s[6])) + kRound[i] + w[i];
      const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                              ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      std::memmove(s + 1, s, 7 * sizeof(uint32_t));
      s[4] += first;
      s[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

Sha256Compress sha256_compress_accelerated() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) != 0;
  if (sha && __builtin_cpu_supports("sse4.1")) return compress_sha_ni;
#endif
  return nullptr;
}

Sha256::Sha256()
    : Sha256([] {
        static const Sha256Compress accelerated = sha256_compress_accelerated();
        return accelerated != nullptr ? accelerated : sha256_compress_portable;
      }()) {}

Sha256::Sha256(Sha256Compress compress) : compress_(compress) {
  std::memcpy(state_, kInitial, sizeof(state_));
}

Sha256& Sha256::update(const void* data, size_t size) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  total_ += size;
  if (buffered_ > 0) {
    const size_t taken = std::min(size, sizeof(buffer_) - buffered_);
    std::memcpy(buffer_ + buffered_, bytes, taken);
    buffered_ += taken, bytes += taken, size -= taken;
    if (buffered_ < sizeof(buffer_)) return *this;
    compress_(state_, buffer_, 1);
    buffered_ = 0;
  }
  if (const size_t blocks = size / 64; blocks > 0) {
    compress_(state_, bytes, blocks);
    bytes += 64 * blocks, size -= 64 * blocks;
  }
  if (size > 0) std::memcpy(buffer_, bytes, size);
  buffered_ = size;
  return *this;
}

Digest Sha256::finish() {
  const uint64_t bits = total_ * 8;
  const uint8_t end = 0x80;
  update(&end, 1);
  const uint8_t zeros[64] = {};
  update(zeros, (64 + 56 - buffered_) % 64);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, 8);
  Digest digest;
  for (int i = 0; i < 32; ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

}  // namespace lmdecode::store
