// Which tokens of a row are kept: one position in the order "value descending, then index".
#pragma once

#include "common/bits.h"

namespace lmdecode::sampling {

// logit / temperature; infinite logits stay infinite at every temperature.
LMD_HOST_DEVICE float tempered(float logit, float temperature) {
  const uint32_t magnitude = bits_of(logit) & 0x7fffffffu;
  return magnitude == 0x7f800000u ? logit : logit / temperature;
}

// The smallest logit, finite or infinite, with order_key(tempered(logit)) >= key. Division is
// monotone, so { logit >= result } is exactly the set of logits that come to `key` or above it:
// thresholds are compared with raw logits and rows need no division.
LMD_HOST_DEVICE float lowest_logit(uint32_t key, float temperature) {
  if (temperature == 1.0f) return value_of_key(key);
  uint32_t low = kMinusInfinityKey;  // below, or the result
  uint32_t high = kPlusInfinityKey;  // its key is >= any key asked for
  if (order_key(tempered(value_of_key(low), temperature)) >= key) return value_of_key(low);
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (order_key(tempered(value_of_key(middle), temperature)) >= key) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return value_of_key(high);
}

// The lowest logit that the temperature maps to the same value: thresholds never part such a class.
LMD_HOST_DEVICE float class_bottom(float logit, float temperature) {
  if (temperature == 1.0f) return logit;
  return lowest_logit(order_key(tempered(logit, temperature)), temperature);
}

// kept(logit, token) = logit >= lowest && (logit >= above_ties || first_tie <= token <= last_tie)
struct KeptSet {
  float lowest;
  float above_ties;
  uint32_t first_tie = 0;
  uint32_t last_tie = 0xffffffffu;

  LMD_HOST_DEVICE bool contains(float logit, uint32_t token) const {
    // Without a branch: one costs a warp more than the comparisons.
    return (logit >= lowest) &
           ((logit >= above_ties) | ((token >= first_tie) & (token <= last_tie)));
  }
};

// Everything at `lowest` and above.
LMD_HOST_DEVICE KeptSet kept_from(float lowest) { return {lowest, lowest, 0, 0xffffffffu}; }

}  // namespace lmdecode::sampling
