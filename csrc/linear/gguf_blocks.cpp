#include "linear/gguf_blocks.h"

namespace lmdecode::linear {
namespace {

constexpr uint8_t kInt8Middle = 128;

uint16_t read_16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// 2^(exponent - 128) as a bfloat16: the numbers of MXFP4 are held doubled.
uint16_t power_of_two(uint8_t exponent) {
  return static_cast<uint16_t>(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

// Element i of 32: low halves of 16 bytes, then their high halves.
uint8_t nibble(const uint8_t* bytes, int i) {
  return static_cast<uint8_t>(i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4);
}

void read_32(GgufType type, const uint8_t* p, GroupedStep* step) {
  GroupedStep::Group& group = step->groups[0];
  group.scale = type == GgufType::kMXFP4 ? power_of_two(*p) : read_16(p);
  p += type == GgufType::kMXFP4 ? 1 : 2;
  if (type == GgufType::kQ4_1 || type == GgufType::kQ5_1) {
    group.offset = read_16(p);
    p += 2;
  }
  if (type == GgufType::kQ8_0) {
    for (int i = 0; i < 32; ++i) step->codes[i] = static_cast<uint8_t>(p[i] + kInt8Middle);
    return;
  }
  if (type != GgufType::kQ5_0 && type != GgufType::kQ5_1) {
    for (int i = 0; i < 32; ++i) step->codes[i] = nibble(p, i);
    return;
  }
  const int raised = type == GgufType::kQ5_0 ? kInt8Middle - 16 : 0;
  for (int i = 0; i < 32; ++i) {
    const int fifth = p[i / 8] >> i % 8 & 1;
    step->codes[i] = static_cast<uint8_t>((nibble(p + 4, i) | fifth << 4) + raised);
  }
}

// Scale and minimum of group j of 8, six bits each, in 12 bytes.
GroupedStep::Group six_bits(const uint8_t* s, int j) {
  if (j < 4) return {static_cast<uint16_t>(s[j] & 63), static_cast<uint16_t>(s[j + 4] & 63)};
  return {static_cast<uint16_t>((s[j + 4] & 15) | s[j - 4] >> 6 << 4),
          static_cast<uint16_t>(s[j + 4] >> 4 | s[j] >> 6 << 4)};
}

// An int8, as it is stored.
uint16_t signed_byte(int value) { return static_cast<uint8_t>(value); }

void read_q4_k_or_q5_k(const uint8_t* p, bool has_fifth_bits, GroupedStep* step) {
  step->super_scale = read_16(p);
  step->super_minimum = read_16(p + 2);
  const uint8_t* const fifths = p + 16;
  const uint8_t* const nibbles = has_fifth_bits ? fifths + 32 : fifths;
  for (int g = 0; g < 8; ++g) {
    step->groups[g] = six_bits(p + 4, g);
    for (int i = 0; i < 32; ++i) {
      const int byte = nibbles[g / 2 * 32 + i];
      const int low = g % 2 == 0 ? byte & 15 : byte >> 4;
      const int fifth = has_fifth_bits ? fifths[i] >> g & 1 : 0;
      step->codes[32 * g + i] = static_cast<uint8_t>(low | fifth << 4);
    }
  }
}

void read_q6_k(const uint8_t* p, GroupedStep* step) {
  const uint8_t *const nibbles = p, *const pairs = p + 128, *const scales = p + 192;
  step->super_scale = read_16(p + 208);
  for (int g = 0; g < 16; ++g) step->groups[g].scale = scales[g];
  for (int e = 0; e < kSuperBlock; ++e) {
    const int half = e / 128, quarter = e % 128 / 32, i = e % 32;
    const int byte = nibbles[half * 64 + quarter % 2 * 32 + i];
    const int low = quarter < 2 ? byte & 15 : byte >> 4;
    const int high = pairs[half * 32 + i] >> 2 * quarter & 3;
    step->codes[e] = static_cast<uint8_t>((low | high << 4) - 32 + kInt8Middle);
  }
}

// Two bits of element e of 256, in 64 bytes.
int two_bits(const uint8_t* bytes, int e) {
  return bytes[e / 128 * 32 + e % 32] >> e % 128 / 32 * 2 & 3;
}

void read_q2_k(const uint8_t* p, GroupedStep* step) {
  step->super_scale = read_16(p + 80);
  step->super_minimum = read_16(p + 82);
  for (int g = 0; g < 16; ++g) {
    step->groups[g] = {static_cast<uint16_t>(p[g] & 15), static_cast<uint16_t>(p[g] >> 4)};
  }
  for (int e = 0; e < kSuperBlock; ++e) {
    step->codes[e] = static_cast<uint8_t>(two_bits(p + 16, e));
  }
}

void read_q3_k(const uint8_t* p, GroupedStep* step) {
  const uint8_t *const thirds = p, *const scales = p + 96;
  step->super_scale = read_16(p + 108);
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    const int high = scales[8 + g % 4] >> g / 4 * 2 & 3;
    step->groups[g].scale = signed_byte((low | high << 4) - 32);
  }
  for (int e = 0; e < kSuperBlock; ++e) {
    const int third = thirds[e % 32] >> e / 32 & 1;
    step->codes[e] = static_cast<uint8_t>((two_bits(p + 32, e) | third << 2) - 4 + 8);
  }
}

void read_iq4_xs(const uint8_t* p, GroupedStep* step) {
  step->super_scale = read_16(p);
  const int high = read_16(p + 2);
  for (int g = 0; g < 8; ++g) {
    const int low = p[4 + g / 2] >> g % 2 * 4 & 15;
    step->groups[g].scale = signed_byte((low | (high >> 2 * g & 3) << 4) - 32);
    for (int i = 0; i < 32; ++i) step->codes[32 * g + i] = nibble(p + 8 + 16 * g, i);
  }
}

}  // namespace

void read_gguf_block(GgufType type, const uint8_t* block, GroupedStep* step) {
  switch (type) {
    case GgufType::kQ4_K:
      return read_q4_k_or_q5_k(block, /*has_fifth_bits=*/false, step);
    case GgufType::kQ5_K:
      return read_q4_k_or_q5_k(block, /*has_fifth_bits=*/true, step);
    case GgufType::kQ6_K:
      return read_q6_k(block, step);
    case GgufType::kQ2_K:
      return read_q2_k(block, step);
    case GgufType::kQ3_K:
      return read_q3_k(block, step);
    case GgufType::kIQ4_XS:
      return read_iq4_xs(block, step);
    default:
      return read_32(type, block, step);
  }
}

}  // namespace lmdecode::linear
