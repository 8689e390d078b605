// Sums of a block of rows and a panel of int4: tiles of rows, all groups of a chain one after another.
#pragma once

#include "linear/linear_int4_products.h"
#include "linear/linear_tuning.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

// sums [kRows, width] += `groups` groups, the weights of which begin at `weights`, and the inputs
// of the rows at `input`; from 0, if first. Meanwhile lines [first_line, last_line) of each step
// from `ahead` on are fetched.
template <class Dot, int kRows, int kLocality>
inline void add_groups(const char* input, int64_t row_bytes, const char* weights, int64_t groups,
                       const char* ahead, int first_line, int last_line, bool is_first,
                       float* sums) {
  typename Dot::Floats total[kRows][kPanelVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      total[r][j] = is_first ? Dot::same(0.0f)
                             : Dot::load_floats(sums + (r * kPanelVectors + j) * Dot::kLanes);
    }
  }
  for (int64_t g = 0; g < groups; ++g) {
    const char* const group = weights + g * Dot::kStepBytes;
    const char* const x = input + g * Dot::kInputBytes;
    for (int i = first_line; i < last_line; ++i) {
      __builtin_prefetch(ahead + g * Dot::kStepBytes + i * 64, 0, kLocality);
    }
    Int4Input rows[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) __builtin_memcpy(&rows[r], x + r * row_bytes, sizeof(rows[r]));
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      typename Dot::Sum sum[kRows];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        if constexpr (Dot::kHasZeros) {
          sum[r] = Dot::offset(rows[r].offset, group + 2 * Dot::kWidth + j * Dot::kLanes);
        } else {
          sum[r] = Dot::offset(rows[r].offset);
        }
      }
      for (int part = 0; part < Dot::kGroup; part += kGroupPart) {
        typename Dot::Part c[kRows];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) c[r] = Dot::begin(sum[r]);
#pragma GCC unroll 4
        for (int at = part; at < part + kGroupPart; at += 8) {
          const auto bytes = Dot::load_bytes(group + Dot::kNibblesAt + Dot::kWidth * at / 2 +
                                             j * Dot::kLanes * 4);
          const auto low = Dot::low(bytes), high = Dot::high(bytes);
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            int32_t quads[2];
            __builtin_memcpy(quads, x + r * row_bytes + sizeof(Int4Input) + at, sizeof(quads));
            c[r] = Dot::add(Dot::add(c[r], low, quads[0]), high, quads[1]);
          }
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) sum[r] = Dot::end(c[r], sum[r]);
      }
      const auto scales = Dot::load_scales(group + j * Dot::kLanes * 2);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        total[r][j] = Dot::add_product(Dot::to_floats(sum[r]),
                                       Dot::times(scales, Dot::same(rows[r].scale)), total[r][j]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      Dot::store_floats(sums + (r * kPanelVectors + j) * Dot::kLanes, total[r][j]);
    }
  }
}

// `groups` groups for all rows of the input, in tiles of about the same height, which share the
// fetching of the weights that follow.
template <class Dot>
void add_groups_to_rows(const LinearInput& input, int64_t input_at, const char* weights,
                        int64_t groups, bool is_first, float* sums) {
  constexpr int kTileRows = tuning::kInt4TileRows;
  constexpr int kLines = (Dot::kStepBytes + 63) / 64;
  const int64_t rows = input.count;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t row = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t height = rows / tiles + (t < rows % tiles ? 1 : 0);
    const char* const x = static_cast<const char*>(input.rows) + row * input.row_bytes + input_at;
    float* const to = sums + row * Dot::kWidth;
    const auto run = [&]<int kRows>() {
      if (tiles == 1) {
        add_groups<Dot, kRows, 3>(x, input.row_bytes, weights, groups,
                                  weights + tuning::kPrefetchBytes, 0, kLines, is_first, to);
      } else {
        add_groups<Dot, kRows, 2>(x, input.row_bytes, weights, groups,
                                  weights + groups * Dot::kStepBytes,
                                  static_cast<int>(kLines * t / tiles),
                                  static_cast<int>(kLines * (t + 1) / tiles), is_first, to);
      }
    };
    switch (height) {
      case 1:
        run.template operator()<1>();
        break;
      case 2:
        run.template operator()<2>();
        break;
      case 3:
        run.template operator()<3>();
        break;
      case 4:
        run.template operator()<4>();
        break;
      default:
        run.template operator()<kTileRows>();
    }
    row += height;
  }
}

}  // namespace lmdecode::LMD_SIMD::linear
