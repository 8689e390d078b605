// The internal noise of sampling: one standard exponential variable a token, a function of (seed,
// position, token id) alone. The token with the largest weight / noise is a draw from the
// distribution of the weights.
//
// The 64 random bits of a token are r = high * 2^32 + low, high = word[token % 4] of Philox block
// (token / 4, position, 0) and low the same word of block (token / 4, position, 1); the key is the
// seed. The uniform is u = 1 - (r + 1/2) / 2^64 and the noise -log(u): it is resolved to 2^-65 near
// zero, where rare tokens win.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/log.h"

// Philox 4x32-10 (Salmon et al., SC 2011): a counter-based generator, the same bits wherever it
// runs.

namespace lmdecode {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u;
constexpr uint32_t kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t word[4];

  // Word i % 4, by selection: an index would put the words into a GPU thread's local memory.
  LMD_HOST_DEVICE uint32_t at(uint32_t i) const {
    const uint32_t even = i & 2 ? word[2] : word[0], odd = i & 2 ? word[3] : word[1];
    return i & 1 ? odd : even;
  }
};

LMD_HOST_DEVICE PhiloxBlock philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                   uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The noise words of tokens 4 * quad to 4 * quad + 3.
LMD_HOST_DEVICE PhiloxBlock noise_words(int64_t seed, int64_t position, uint32_t quad,
                                        uint32_t half) {
  return philox(quad, static_cast<uint32_t>(position),
                static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32), half,
                static_cast<uint64_t>(seed));
}

LMD_HOST_DEVICE uint32_t noise_word(int64_t seed, int64_t position, uint32_t token, uint32_t half) {
  return noise_words(seed, position, token >> 2, half).at(token);
}

// (high * 2^32 + low + 1/2) / 2^64 in f64.
LMD_HOST_DEVICE double unit_fraction(uint32_t high, uint32_t low) {
  return ((static_cast<double>(high) * 4294967296.0 + static_cast<double>(low)) + 0.5) * 0x1p-64;
}

// -log(1 - v), v = unit_fraction(high, low); always > 0 and >= v.
LMD_HOST_DEVICE double exponential_noise(uint32_t high, uint32_t low) {
  if (high < 0x40000000u) {
    const double v = unit_fraction(high, low);
    return two_atanh(v / (2.0 - v));
  }
  return -log_f64(unit_fraction(~high, ~low));
}

LMD_HOST_DEVICE double token_noise(int64_t seed, int64_t position, uint32_t token) {
  return exponential_noise(noise_word(seed, position, token, 0),
                           noise_word(seed, position, token, 1));
}

// A random number of 64 bits of a row, no token's: words 0 (high) and 1 of Philox block (block,
// position, 2), which no token has. One block for each use.
constexpr uint32_t kXtcBlock = 0xffffffffu;
constexpr uint32_t kRejectionBlock = 0xfffffffeu;

LMD_HOST_DEVICE uint64_t row_word(int64_t seed, int64_t position, uint32_t block) {
  const PhiloxBlock random = philox(block, static_cast<uint32_t>(position),
                                    static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32), 2,
                                    static_cast<uint64_t>(seed));
  return static_cast<uint64_t>(random.word[0]) << 32 | random.word[1];
}

LMD_HOST_DEVICE double row_fraction(int64_t seed, int64_t position, uint32_t block) {
  const uint64_t word = row_word(seed, position, block);
  return unit_fraction(static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word));
}

}  // namespace lmdecode
