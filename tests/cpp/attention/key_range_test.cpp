// The arithmetic of windows against loops over every key.
#include "attention/key_range.h"

#include "check.h"

namespace lmdecode::attention {
namespace {

bool sees(int64_t position, int64_t key, int64_t window, int64_t window_right) {
  return (window == kUnlimited || key > position - window) &&
         (window_right == kUnlimited || key <= position + window_right);
}

TEST(visible_keys_are_those_of_the_definition) {
  for (int64_t kv_len = 0; kv_len <= 7; ++kv_len) {
    for (int64_t position = -9; position <= 16; ++position) {
      for (const int64_t window : {kUnlimited, int64_t{1}, int64_t{2}, int64_t{5}, int64_t{9}}) {
        for (const int64_t right : {kUnlimited, int64_t{0}, int64_t{1}, int64_t{4}}) {
          const KeyRange range = visible_keys(position, window, right, kv_len);
          CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= kv_len);
          for (int64_t key = 0; key < kv_len; ++key) {
            CHECK_EQ(key >= range.begin && key < range.end, sees(position, key, window, right));
          }
        }
      }
    }
  }
}

TEST(the_largest_numbers_do_not_overflow) {
  const int64_t far = 4 * kMaxPosition;
  for (const int64_t position : {-kMaxPosition, int64_t{0}, kMaxPosition}) {
    const KeyRange range = visible_keys(position, far, far, 10);
    CHECK_EQ(range.begin, 0);
    CHECK_EQ(range.end, 10);
  }
  CHECK_EQ(visible_keys(kMaxPosition, 1, 0, 10).end, 0);
  CHECK_EQ(visible_keys(-kMaxPosition, far, 0, 10).end, 0);
}

TEST(parts_and_hulls) {
  for (int64_t begin = 0; begin < 6; ++begin) {
    for (int64_t end = begin; end < 7; ++end) {
      for (int64_t from = 0; from < 6; ++from) {
        const KeyRange part = part_of_range({begin, end}, from, from + 3);
        for (int64_t key = from; key < from + 3; ++key) {
          CHECK_EQ(key - from >= part.begin && key - from < part.end, key >= begin && key < end);
        }
        const KeyRange both = hull({begin, end}, {from, from + 2});
        CHECK_EQ(both.begin, begin == end ? from : min_of(begin, from));
        CHECK_EQ(both.end, begin == end ? from + 2 : max_of(end, from + 2));
      }
    }
  }
  CHECK_EQ(hull({2, 4}, {0, 0}).begin, 2);
}

TEST(the_last_query_stands_beside_the_last_key) {
  CHECK_EQ(aligned_position(0, 1, 8), 7);
  CHECK_EQ(aligned_position(2, 3, 3), 2);
  CHECK_EQ(aligned_position(0, 5, 2), -3);
}

}  // namespace
}  // namespace lmdecode::attention

CHECK_MAIN()
