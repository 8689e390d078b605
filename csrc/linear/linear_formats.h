// The products of each format at the level of this build.
#pragma once

#include "linear/linear_group_products.h"
#include "linear/linear_products.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

template <class Dot>
constexpr bool kIsInt8 = requires { Dot::kInputOffset; };

template <class Dot>
constexpr bool kIsGrouped = requires { Dot::kGrouped; };

// Vectors of a panel without groups. Tiles take two, side by side: a step along the depth is then
// two lines of the first cache, and its sets are filled evenly.
#if defined(LMD_SIMD_AVX512_AMX)
constexpr int kRowPanelVectors = 2;
#else
constexpr int kRowPanelVectors = kPanelVectors;
#endif

template <class Dot>
constexpr LinearTile tile_of() {
  if constexpr (kIsGrouped<Dot>)
    return {Dot::kWidth, Dot::kGrouped.step(), Dot::kInputBytes};
  else
    return {kRowPanelVectors * Dot::kLanes, Dot::kValues,
            Dot::kPhases * static_cast<int32_t>(sizeof(typename Dot::Input))};
}

// Calls body(Dot{}) for the products of a format. Builds with special instructions for some formats
// hold these alone; the build with tiles holds all but float32.
template <class Body>
inline void with_products([[maybe_unused]] LinearFormat format, const Body& body) {
#if defined(LMD_SIMD_AVX512_BF16) && !defined(LMD_SIMD_AVX512_AMX)
  body(BFloat16Pairs{});
#else
  switch (format) {
#if defined(LMD_SIMD_AVX512_AMX)
    case LinearFormat::kFloat32:
      return;
    case LinearFormat::kBFloat16:
      return body(BFloat16Pairs{});
    case LinearFormat::kInt8:
    case LinearFormat::kInt8Rotated:
      return body(Int8Quads{});
#elif defined(LMD_SIMD_AVX512_VNNI)
    case LinearFormat::kFloat32:
    case LinearFormat::kBFloat16:
      return;
    case LinearFormat::kInt8:
    case LinearFormat::kInt8Rotated:
      return body(Int8Quads{});
#else
    case LinearFormat::kFloat32:
      return body(Floats{});
    case LinearFormat::kBFloat16:
      return body(WidenedPairs{});
    case LinearFormat::kInt8:
    case LinearFormat::kInt8Rotated:
      return body(Int8Pairs{});
#endif
    case LinearFormat::kInt4:
      return body(GroupProducts<LinearFormat::kInt4>{});
    case LinearFormat::kInt4Zeros32:
      return body(GroupProducts<LinearFormat::kInt4Zeros32>{});
    case LinearFormat::kInt4Zeros64:
      return body(GroupProducts<LinearFormat::kInt4Zeros64>{});
    case LinearFormat::kInt4Zeros128:
      return body(GroupProducts<LinearFormat::kInt4Zeros128>{});
    case LinearFormat::kInt4Minimums32:
    case LinearFormat::kInt4RotatedMinimums32:
      return body(GroupProducts<LinearFormat::kInt4Minimums32>{});
    case LinearFormat::kInt4Minimums64:
    case LinearFormat::kInt4RotatedMinimums64:
      return body(GroupProducts<LinearFormat::kInt4Minimums64>{});
    case LinearFormat::kInt4Minimums128:
    case LinearFormat::kInt4RotatedMinimums128:
      return body(GroupProducts<LinearFormat::kInt4Minimums128>{});
    case LinearFormat::kInt8Groups:
      return body(GroupProducts<LinearFormat::kInt8Groups>{});
    case LinearFormat::kInt8Minimums:
      return body(GroupProducts<LinearFormat::kInt8Minimums>{});
    case LinearFormat::kNonlinear:
      return body(GroupProducts<LinearFormat::kNonlinear>{});
    case LinearFormat::kMicroscaled:
      return body(GroupProducts<LinearFormat::kMicroscaled>{});
    case LinearFormat::kInt4SuperMinimums32:
      return body(GroupProducts<LinearFormat::kInt4SuperMinimums32>{});
    case LinearFormat::kInt8SuperMinimums32:
      return body(GroupProducts<LinearFormat::kInt8SuperMinimums32>{});
    case LinearFormat::kInt8Super16:
      return body(GroupProducts<LinearFormat::kInt8Super16>{});
    case LinearFormat::kInt4SuperMinimums16:
      return body(GroupProducts<LinearFormat::kInt4SuperMinimums16>{});
    case LinearFormat::kInt4Super16:
      return body(GroupProducts<LinearFormat::kInt4Super16>{});
    case LinearFormat::kNonlinearSuper:
      return body(GroupProducts<LinearFormat::kNonlinearSuper>{});
  }
#endif
}

}  // namespace lmdecode::LMD_SIMD::linear
