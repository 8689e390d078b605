// Which products a format has at the level of this build.
#pragma once

#include "linear/linear_group_products.h"
#include "linear/linear_products.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

template <class Dot>
constexpr bool kIsInt8 = requires { Dot::kInputOffset; };

template <class Dot>
constexpr bool kIsGrouped = requires { Dot::kHasZeros; };

template <class Dot>
constexpr LinearTile tile_of() {
  if constexpr (kIsGrouped<Dot>)
    return {Dot::kWidth, Dot::kGroup, Dot::kInputBytes};
  else
    return {kPanelVectors * Dot::kLanes, Dot::kValues,
            Dot::kPhases * static_cast<int32_t>(sizeof(typename Dot::Input))};
}

// Calls body(Dot{}) for the products of a format. The builds that have their own instructions for
// some formats hold these alone.
template <class Body>
inline void with_products([[maybe_unused]] LinearFormat format, const Body& body) {
#if defined(LMD_SIMD_AVX512_BF16)
  body(BFloat16Pairs{});
#else
  switch (format) {
#if defined(LMD_SIMD_AVX512_VNNI)
    case LinearFormat::kFloat32:
    case LinearFormat::kBFloat16:
      return;
    case LinearFormat::kInt8:
      return body(Int8Quads{});
#else
    case LinearFormat::kFloat32:
      return body(Floats{});
    case LinearFormat::kBFloat16:
      return body(WidenedPairs{});
    case LinearFormat::kInt8:
      return body(Int8Pairs{});
#endif
    case LinearFormat::kInt4:
      return body(GroupProducts<32, false>{});
    case LinearFormat::kInt4Zeros32:
      return body(GroupProducts<32, true>{});
    case LinearFormat::kInt4Zeros64:
      return body(GroupProducts<64, true>{});
    case LinearFormat::kInt4Zeros128:
      return body(GroupProducts<128, true>{});
  }
#endif
}

}  // namespace lmdecode::LMD_SIMD::linear
