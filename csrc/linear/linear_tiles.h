// Sums of a block of rows and a panel: tiles of up to six rows, chain by chain along the depth.
#pragma once

#include "linear/linear_formats.h"
#include "linear/linear_group_products.h"
#include "linear/linear_tuning.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int64_t kLineBytes = 64;

// Lines of memory in one step along the depth of a panel that can be fetched.
template <class Dot>
constexpr int kStepLines =
    kCanFetch ? static_cast<int>(kPanelVectors * Dot::kWeightBytes / kLineBytes) : 0;

// sums [kRows, width] = the sums so far, if not the first chain, + one chain of `depth` steps, the
// weights of which begin at `weights`, and the inputs of the rows at `input`. Meanwhile kLines
// lines from `ahead` on are fetched in every step.
template <class Dot, int kRows, int kLines>
inline void add_chain(const char* input, int64_t row_bytes, const char* weights, int64_t depth,
                      const char* ahead, bool is_first, typename Dot::Scalar* sums) {
  constexpr int kStepBytes = kPanelVectors * Dot::kWeightBytes;
  typename Dot::Sum sum[kRows][kPanelVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) sum[r][j] = Dot::zero();
  }
  const auto step = [&](int64_t d) __attribute__((always_inline)) {
    const char* const p = weights + d * kStepBytes;
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i)
      __builtin_prefetch(ahead + d * kStepBytes + i * kLineBytes, 0, 2);
#pragma GCC unroll 2
    for (int phase = 0; phase < Dot::kPhases; ++phase) {
      typename Dot::Weight weight[kPanelVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) {
        weight[j] = Dot::weight(p + j * Dot::kWeightBytes, phase);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const auto* const x = reinterpret_cast<const typename Dot::Input*>(input + r * row_bytes) +
                              d * Dot::kPhases + phase;
        const typename Dot::Factor factor = Dot::factor(x);
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVectors; ++j) sum[r][j] = Dot::add(sum[r][j], factor, weight[j]);
      }
    }
  };
  constexpr int kUnroll = kRows > 2 ? 1 : 4;
  int64_t d = 0;
  for (; d + kUnroll <= depth; d += kUnroll) {
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) step(d + u);
  }
  if constexpr (kUnroll > 1) {
    for (; d < depth; ++d) step(d);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      typename Dot::Scalar* const to = sums + (r * kPanelVectors + j) * Dot::kLanes;
      Dot::store_sum(to, is_first ? sum[r][j] : Dot::plus(Dot::load_sum(to), sum[r][j]));
    }
  }
}

// How many lines of the step that follows a tile fetches. Several tiles share the lines: the first
// ones fetch one each, or the first two of too few tiles two. One tile reads in the order of the
// memory, as fast as memory is: fetching ahead would slow it down.
template <class Dot>
int fetched_lines(int64_t tile, int64_t tiles) {
  constexpr int kLines = kStepLines<Dot>;
  if (tiles == 1) return 0;
  if (tiles >= kLines) return tile < kLines ? 1 : 0;
  return kLines > 2 && tile < 2 ? 2 : 0;
}

// One chain for rows [0, rows) in tiles of about the same height, which fetch the weights that
// follow into the second cache.
template <class Dot>
void add_chain_to_rows(const LinearInput& input, int64_t input_at, const char* weights,
                       int64_t depth, bool is_first, typename Dot::Scalar* sums) {
  constexpr int64_t kWidth = tile_of<Dot>().width;
  constexpr int kStepBytes = kPanelVectors * Dot::kWeightBytes;
  const int64_t rows = input.count;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t row = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t height = rows / tiles + (t < rows % tiles ? 1 : 0);
    const char* const x = static_cast<const char*>(input.rows) + row * input.row_bytes + input_at;
    typename Dot::Scalar* const to = sums + row * kWidth;
    const auto run = [&]<int kLines>(const char* ahead) {
      const auto run_rows = [&]<int kRows>() {
        add_chain<Dot, kRows, kLines>(x, input.row_bytes, weights, depth, ahead, is_first, to);
      };
      switch (height) {
        case 1:
          return run_rows.template operator()<1>();
        case 2:
          return run_rows.template operator()<2>();
        case 3:
          return run_rows.template operator()<3>();
        case 4:
          return run_rows.template operator()<4>();
        case 5:
          return run_rows.template operator()<5>();
        default:
          return run_rows.template operator()<6>();
      }
    };
    const char* const next = weights + depth * kStepBytes;
    const int lines = fetched_lines<Dot>(t, tiles);
    if constexpr (kStepLines<Dot> > 2) {
      if (lines == 2) run.template operator()<2>(next + t * 2 * kLineBytes);
    }
    if constexpr (kStepLines<Dot> > 0) {
      if (lines == 1) run.template operator()<1>(next + t * kLineBytes);
    }
    if (lines == 0) run.template operator()<0>(next);
    row += height;
  }
}

// Sums of a block of rows and a panel with groups: tiles of rows, all groups of a chain one after
// another.

// Vectors of the panel that are multiplied side by side: as many as there are registers for.
template <int kRows>
constexpr int kVectorsTogether = kRows <= 2 ? kPanelVectors : kPanelVectors / 2;

// Whether a tile of rows that is alone reads the weights in the order of the memory, as fast as
// memory is: fetching ahead would slow it down.
template <int kRows>
constexpr bool kReadsInOrder = kCanFetch && kVectorsTogether<kRows> == kPanelVectors;

// sums [kRows, width] += `steps` steps, the weights of which begin at `weights`, and the inputs
// of the rows at `input`; from 0, if first. kFetches: meanwhile lines [first_line, last_line) of
// each step from `ahead` on are fetched.
template <class Dot, int kRows, bool kFetches>
inline void add_groups(const char* input, int64_t row_bytes, const char* weights, int64_t steps,
                       const char* ahead, int first_line, int last_line, bool is_first,
                       float* sums) {
  constexpr int kTogether = kVectorsTogether<kRows>;
  // Parts of a step, over which the fetching is spread.
  constexpr int kSlots = Dot::kStepGroups * Dot::kGroup / 8 * (kPanelVectors / kTogether);
  constexpr int kPartSize = Dot::kGroup < kGroupPart ? Dot::kGroup : kGroupPart;
  using Products = typename Dot::Products;
  typename Dot::Floats total[kRows][kPanelVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      total[r][j] = is_first ? Dot::same(0.0f)
                             : Dot::load_floats(sums + (r * kPanelVectors + j) * Dot::kLanes);
    }
  }
  const auto add_group = [&](const char* step, const char* group, const char* x, const char* next,
                             int group_slot) __attribute__((always_inline)) {
    GroupInput rows[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) __builtin_memcpy(&rows[r], x + r * row_bytes, sizeof(rows[r]));
#pragma GCC unroll 4
    for (int first = 0; first < kPanelVectors; first += kTogether) {
      typename Dot::Sum sum[kRows][kTogether];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int j = 0; j < kTogether; ++j) {
          sum[r][j] = Dot::offset_of(rows[r], group, first + j);
        }
      }
      for (int part = 0; part < Dot::kGroup; part += kPartSize) {
        typename Dot::Part c[kRows][kTogether];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int j = 0; j < kTogether; ++j) c[r][j] = Products::begin(sum[r][j]);
        }
#pragma GCC unroll 4
        for (int at = part; at < part + kPartSize; at += 8) {
          if constexpr (kFetches) {
            const int slot =
                (group_slot + at / 8) * (kPanelVectors / kTogether) + first / kTogether;
            for (int i = first_line + slot; i < last_line; i += kSlots) {
              __builtin_prefetch(next + i * 64, 0, 2);
            }
          }
          typename Dot::Bytes low[kTogether], high[kTogether];
#pragma GCC unroll 4
          for (int j = 0; j < kTogether; ++j) {
            Dot::load_codes(group, at, first + j, &low[j], &high[j]);
          }
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const char* const quad = x + r * row_bytes + sizeof(GroupInput) + at;
#pragma GCC unroll 4
            for (int j = 0; j < kTogether; ++j) c[r][j] = Products::add(c[r][j], low[j], quad);
#pragma GCC unroll 4
            for (int j = 0; j < kTogether; ++j) c[r][j] = Products::add(c[r][j], high[j], quad + 4);
          }
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int j = 0; j < kTogether; ++j) sum[r][j] = Products::end(c[r][j], sum[r][j]);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        const auto scales = Dot::load_scales(step, group, first + j);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
          const auto factors = Dot::times(scales, Dot::same(rows[r].scale));
          const auto values = Dot::to_floats(sum[r][j]);
          total[r][first + j] = Dot::add_product(values, factors, total[r][first + j]);
        }
        if constexpr (Dot::kHasMinimums) {
          const auto minimums = Dot::load_minimums(step, group, first + j);
#pragma GCC unroll 6
          for (int r = 0; r < kRows; ++r) {
            const auto scaled_sum = Dot::same(rows[r].scaled_sum);
            total[r][first + j] = Dot::add_product(minimums, scaled_sum, total[r][first + j]);
          }
        }
      }
    }
  };
  for (int64_t s = 0; s < steps; ++s) {
    const char* const step = weights + s * Dot::kStepBytes;
    const char* const x = input + s * Dot::kInputBytes;
    const char* const next = ahead + s * Dot::kStepBytes;
    for (int g = 0; g < Dot::kStepGroups; ++g) {
      add_group(step, step + Dot::kSuperBytes + g * Dot::kGroupBytes, x + g * Dot::kGroupInputBytes,
                next, g * (Dot::kGroup / 8));
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

// `steps` steps for all rows of the input, in tiles of about the same height, which share the
// fetching of the weights that follow.
template <class Dot>
void add_groups_to_rows(const LinearInput& input, int64_t input_at, const char* weights,
                        int64_t steps, bool is_first, float* sums) {
  constexpr int kTileRows = tuning::kGroupTileRows;
  constexpr int kLines = (Dot::kStepBytes + 63) / 64;
  const int64_t rows = input.count;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t row = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t height = rows / tiles + (t < rows % tiles ? 1 : 0);
    const char* const x = static_cast<const char*>(input.rows) + row * input.row_bytes + input_at;
    float* const to = sums + row * Dot::kWidth;
    const char* const ahead =
        weights + (tiles == 1 ? tuning::kGroupPrefetchBytes : steps * Dot::kStepBytes);
    const int first_line = static_cast<int>(kLines * t / tiles);
    const int last_line = static_cast<int>(kLines * (t + 1) / tiles);
    const auto run = [&]<int kRows>() {
      if constexpr (kReadsInOrder<kRows>) {
        if (tiles == 1) {
          return add_groups<Dot, kRows, false>(x, input.row_bytes, weights, steps, ahead,
                                               first_line, last_line, is_first, to);
        }
      }
      add_groups<Dot, kRows, kCanFetch>(x, input.row_bytes, weights, steps, ahead, first_line,
                                        last_line, is_first, to);
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
      default:
        run.template operator()<kTileRows>();
    }
    row += height;
  }
}

}  // namespace lmdecode::LMD_SIMD::linear
