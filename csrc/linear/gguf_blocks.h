// The blocks of GGUF files: their fields, and how they become steps of a format with groups.
// docs/reference/formats.md is the user's page.
#pragma once

#include "linear/grouped_format.h"

namespace lmdecode::linear {

// By the files' own numbers.
enum class GgufType : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kMXFP4 = 39,
};

// The format that holds a type, and the bytes of a block, one step of that format. 0: no such type.
struct GgufBlock {
  LinearFormat format = LinearFormat::kFloat32;
  int64_t bytes = 0;
};

constexpr GgufBlock gguf_block(GgufType type) {
  switch (type) {
    case GgufType::kQ4_0:
      return {LinearFormat::kInt4, 18};
    case GgufType::kQ4_1:
      return {LinearFormat::kInt4Minimums32, 20};
    case GgufType::kQ5_0:
      return {LinearFormat::kInt8Groups, 22};
    case GgufType::kQ5_1:
      return {LinearFormat::kInt8Minimums, 24};
    case GgufType::kQ8_0:
      return {LinearFormat::kInt8Groups, 34};
    case GgufType::kQ2_K:
      return {LinearFormat::kInt4SuperMinimums16, 84};
    case GgufType::kQ3_K:
      return {LinearFormat::kInt4Super16, 110};
    case GgufType::kQ4_K:
      return {LinearFormat::kInt4SuperMinimums32, 144};
    case GgufType::kQ5_K:
      return {LinearFormat::kInt8SuperMinimums32, 176};
    case GgufType::kQ6_K:
      return {LinearFormat::kInt8Super16, 210};
    case GgufType::kIQ4_NL:
      return {LinearFormat::kNonlinear, 18};
    case GgufType::kIQ4_XS:
      return {LinearFormat::kNonlinearSuper, 136};
    case GgufType::kMXFP4:
      return {LinearFormat::kMicroscaled, 17};
  }
  return {};
}

void read_gguf_block(GgufType type, const uint8_t* block, GroupedStep* step);

}  // namespace lmdecode::linear
