// The blocks of GGUF files: their fields, and how they become steps of a format with groups.
// docs/reference/formats.md is the user's page.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>

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

// A type: its name in files' tools, the format that holds it, and the bytes of a block, one step of
// that format. 0: no such type.
struct GgufBlock {
  GgufType type = {};
  const char* name = "";
  LinearFormat format = LinearFormat::kFloat32;
  int64_t bytes = 0;
};

// The one table: the op gguf_type gives it to Python. Names have at most eight letters.
inline constexpr GgufBlock kGgufBlocks[] = {
    {GgufType::kQ4_0, "Q4_0", LinearFormat::kInt4, 18},
    {GgufType::kQ4_1, "Q4_1", LinearFormat::kInt4Minimums32, 20},
    {GgufType::kQ5_0, "Q5_0", LinearFormat::kInt8Groups, 22},
    {GgufType::kQ5_1, "Q5_1", LinearFormat::kInt8Minimums, 24},
    {GgufType::kQ8_0, "Q8_0", LinearFormat::kInt8Groups, 34},
    {GgufType::kQ2_K, "Q2_K", LinearFormat::kInt4SuperMinimums16, 84},
    {GgufType::kQ3_K, "Q3_K", LinearFormat::kInt4Super16, 110},
    {GgufType::kQ4_K, "Q4_K", LinearFormat::kInt4SuperMinimums32, 144},
    {GgufType::kQ5_K, "Q5_K", LinearFormat::kInt8SuperMinimums32, 176},
    {GgufType::kQ6_K, "Q6_K", LinearFormat::kInt8Super16, 210},
    {GgufType::kIQ4_NL, "IQ4_NL", LinearFormat::kNonlinear, 18},
    {GgufType::kIQ4_XS, "IQ4_XS", LinearFormat::kNonlinearSuper, 136},
    {GgufType::kMXFP4, "MXFP4", LinearFormat::kMicroscaled, 17},
};

static_assert(std::all_of(std::begin(kGgufBlocks), std::end(kGgufBlocks), [](const auto& block) {
  return std::string_view(block.name).size() <= 8;
}));

constexpr GgufBlock gguf_block(GgufType type) {
  for (const GgufBlock& block : kGgufBlocks) {
    if (block.type == type) return block;
  }
  return {};
}

void read_gguf_block(GgufType type, const uint8_t* block, GroupedStep* step);

}  // namespace lmdecode::linear
