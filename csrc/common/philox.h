// Philox 4x32-10 (Salmon et al., SC 2011): a counter-based generator, the same bits wherever it
// runs.
#pragma once

#include <cstdint>

#include "common/host_device.h"

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

}  // namespace lmdecode
