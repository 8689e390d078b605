// Which keys a query sees: the arithmetic of windows, shared by the CPU and the CUDA kernels.
//
// A key's position is its index within its sequence. The query at position m sees the keys n with
//   m - window < n <= m + window_right,  0 <= n < kv_len;
// without a window every n from 0 on, without a window_right every n below kv_len.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::attention {

// No bound, for window and window_right.
constexpr int64_t kUnlimited = -1;
// Larger windows and positions (their magnitude) are not needed, and sums of these do not overflow.
constexpr int64_t kMaxPosition = int64_t{1} << 40;

// Keys [begin, end); empty where begin == end.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

LMD_HOST_DEVICE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
LMD_HOST_DEVICE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// window: 1 to kMaxPosition or kUnlimited; window_right: 0 to kMaxPosition or kUnlimited.
LMD_HOST_DEVICE KeyRange visible_keys(int64_t position, int64_t window, int64_t window_right,
                                      int64_t kv_len) {
  int64_t begin = 0, end = kv_len;
  if (window != kUnlimited) begin = max_of(begin, position - window + 1);
  if (window_right != kUnlimited) end = min_of(end, position + window_right + 1);
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

// The part of `keys` that lies in [begin, end), counted from begin.
LMD_HOST_DEVICE KeyRange part_of_range(KeyRange keys, int64_t begin, int64_t end) {
  const int64_t from = max_of(keys.begin, begin), to = min_of(keys.end, end);
  return from < to ? KeyRange{from - begin, to - begin} : KeyRange{0, 0};
}

// The smallest range that holds both; an empty one holds nothing.
LMD_HOST_DEVICE KeyRange hull(KeyRange a, KeyRange b) {
  if (a.begin == a.end) return b;
  if (b.begin == b.end) return a;
  return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
}

// The position of query `token` where no positions are given: the last query is aligned with the
// last key.
LMD_HOST_DEVICE int64_t aligned_position(int64_t token, int64_t q_len, int64_t kv_len) {
  return kv_len - q_len + token;
}

}  // namespace lmdecode::attention
