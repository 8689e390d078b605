// The formats whose weights have a scale for each group of elements along in_features.
//
// Functions are inlined wherever they are called: kernel files of a level share none with others.
//
// A weight is scale * (number of its code - zero) + minimum, of which a format has a zero of each
// group, or a minimum, or neither: then codes without sign are numbers above a middle. One step
// along the depth of a panel is a group, or, where groups share a super-block, 256 elements:
//
//   super scales    [width] f16, where scales of groups are numbers that it multiplies
//   super minimums  [width] f16, what numbers of groups multiply and is subtracted
//   then, group by group,
//   scales          [width] f16; or bf16; or int8 with super-blocks
//   offsets         [width] zeros, bytes; or minimums, f16, or bytes with super-blocks
//   codes           nibbles [group / 8, width, 4]: byte b of step s holds element 8 s + b in its
//                   low half, element 8 s + 4 + b in its high half; or bytes [group / 4, width, 4]
//
// of a row of x, for each group of the same size:
//
//   scale           f32
//   offset          int32, -middle or -1 times the sum of its elements; with minimums f32, scale
//                   times that sum
//   elements        int8 [group]
#pragma once

#include "linear/packed_linear.h"

namespace lmdecode::linear {

enum class Codes : uint8_t {
  kNibbles,      // 0 to 15
  kNonlinear,    // the places of a table: IQ4_NL's, IQ4_XS's
  kMicroscaled,  // likewise: twice the numbers of FP4 (E2M1)
  kBytes,        // 0 to 255
};
enum class Scales : uint8_t { kHalf, kBFloat16, kSuper };
enum class Offsets : uint8_t { kNone, kZeros, kMinimums };

constexpr int32_t kSuperBlock = 256;
constexpr int32_t kMaxStepGroups = kSuperBlock / 16;

constexpr int8_t kNonlinearNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t kMicroscaledNumbers[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

// group 0: the format has no groups. Sizes are in bytes of one output.
struct GroupedFormat {
  int32_t group = 0;
  Codes codes = Codes::kNibbles;
  Scales scales = Scales::kHalf;
  Offsets offsets = Offsets::kNone;

  [[gnu::always_inline]] constexpr bool is_super() const { return scales == Scales::kSuper; }
  [[gnu::always_inline]] constexpr bool has_zeros() const { return offsets == Offsets::kZeros; }
  [[gnu::always_inline]] constexpr bool has_minimums() const {
    return offsets == Offsets::kMinimums;
  }
  [[gnu::always_inline]] constexpr int32_t step() const { return is_super() ? kSuperBlock : group; }
  [[gnu::always_inline]] constexpr int32_t step_groups() const { return step() / group; }
  [[gnu::always_inline]] constexpr int32_t super_bytes() const {
    return !is_super() ? 0 : has_minimums() ? 4 : 2;
  }
  [[gnu::always_inline]] constexpr int32_t scale_bytes() const { return is_super() ? 1 : 2; }
  [[gnu::always_inline]] constexpr int32_t offset_bytes() const {
    return offsets == Offsets::kNone ? 0 : has_minimums() && !is_super() ? 2 : 1;
  }
  [[gnu::always_inline]] constexpr int32_t codes_bytes() const {
    return codes == Codes::kBytes ? group : group / 2;
  }
  [[gnu::always_inline]] constexpr int32_t group_bytes() const {
    return scale_bytes() + offset_bytes() + codes_bytes();
  }
  [[gnu::always_inline]] constexpr int32_t step_bytes() const {
    return super_bytes() + step_groups() * group_bytes();
  }
  // Offset subtracted from a code to get its signed value.
  [[gnu::always_inline]] constexpr int32_t middle() const {
    return offsets != Offsets::kNone ? 0 : codes == Codes::kNibbles ? 8 : 128;
  }
  // The number of a code, before any middle or zero is subtracted.
  [[gnu::always_inline]] constexpr int32_t number(uint8_t code) const {
    return codes == Codes::kNonlinear     ? kNonlinearNumbers[code] + 128
           : codes == Codes::kMicroscaled ? kMicroscaledNumbers[code] + 128
                                          : code;
  }
};

[[gnu::always_inline]] constexpr GroupedFormat grouped_format(LinearFormat format) {
  switch (format) {
    case LinearFormat::kFloat32:
    case LinearFormat::kBFloat16:
    case LinearFormat::kInt8:
    case LinearFormat::kInt8Rotated:
      return {};
    case LinearFormat::kInt4:
      return {32, Codes::kNibbles, Scales::kHalf, Offsets::kNone};
    case LinearFormat::kInt4Zeros32:
      return {32, Codes::kNibbles, Scales::kHalf, Offsets::kZeros};
    case LinearFormat::kInt4Zeros64:
      return {64, Codes::kNibbles, Scales::kHalf, Offsets::kZeros};
    case LinearFormat::kInt4Zeros128:
      return {128, Codes::kNibbles, Scales::kHalf, Offsets::kZeros};
    case LinearFormat::kInt4Minimums32:
    case LinearFormat::kInt4RotatedMinimums32:
      return {32, Codes::kNibbles, Scales::kHalf, Offsets::kMinimums};
    case LinearFormat::kInt4Minimums64:
    case LinearFormat::kInt4RotatedMinimums64:
      return {64, Codes::kNibbles, Scales::kHalf, Offsets::kMinimums};
    case LinearFormat::kInt4Minimums128:
    case LinearFormat::kInt4RotatedMinimums128:
      return {128, Codes::kNibbles, Scales::kHalf, Offsets::kMinimums};
    case LinearFormat::kInt8Groups:
      return {32, Codes::kBytes, Scales::kHalf, Offsets::kNone};
    case LinearFormat::kInt8Minimums:
      return {32, Codes::kBytes, Scales::kHalf, Offsets::kMinimums};
    case LinearFormat::kNonlinear:
      return {32, Codes::kNonlinear, Scales::kHalf, Offsets::kNone};
    case LinearFormat::kMicroscaled:
      return {32, Codes::kMicroscaled, Scales::kBFloat16, Offsets::kNone};
    case LinearFormat::kInt4SuperMinimums32:
      return {32, Codes::kNibbles, Scales::kSuper, Offsets::kMinimums};
    case LinearFormat::kInt8SuperMinimums32:
      return {32, Codes::kBytes, Scales::kSuper, Offsets::kMinimums};
    case LinearFormat::kInt8Super16:
      return {16, Codes::kBytes, Scales::kSuper, Offsets::kNone};
    case LinearFormat::kInt4SuperMinimums16:
      return {16, Codes::kNibbles, Scales::kSuper, Offsets::kMinimums};
    case LinearFormat::kInt4Super16:
      return {16, Codes::kNibbles, Scales::kSuper, Offsets::kNone};
    case LinearFormat::kNonlinearSuper:
      return {32, Codes::kNonlinear, Scales::kSuper, Offsets::kNone};
  }
  return {};
}

// Whether floats are rounded to the format when they are packed; others are packed as they are.
[[gnu::always_inline]] constexpr bool rounds_floats(const GroupedFormat& format) {
  return format.group == 0 ||
         (format.has_minimums() && format.codes == Codes::kNibbles && !format.is_super());
}

[[gnu::always_inline]] constexpr bool is_grouped(LinearFormat format) {
  return grouped_format(format).group > 0;
}

// A step of one output: scales and minimums as stored, elements as codes.
struct GroupedStep {
  struct Group {
    uint16_t scale = 0;   // bits of a float, or an int8
    uint16_t offset = 0;  // a zero, bits of a float, or a byte
  };
  uint16_t super_scale = 0;
  uint16_t super_minimum = 0;
  Group groups[kMaxStepGroups];
  uint8_t codes[kSuperBlock] = {};
};

// The scale of a group, and its minimum, 0 where the format has none: exact.
struct GroupNumbers {
  float scale;
  float minimum;
};

inline GroupNumbers group_numbers(const GroupedFormat& format, const GroupedStep& step, int group) {
  const GroupedStep::Group& g = step.groups[group];
  if (format.is_super()) {
    const float minimum = to_float(Half{step.super_minimum}) * static_cast<float>(g.offset);
    return {to_float(Half{step.super_scale}) * static_cast<float>(static_cast<int8_t>(g.scale)),
            format.has_minimums() ? -minimum : 0.0f};
  }
  return {
      format.scales == Scales::kBFloat16 ? to_float(BFloat16{g.scale}) : to_float(Half{g.scale}),
      format.has_minimums() ? to_float(Half{g.offset}) : 0.0f};
}

// Element i of a step, in float32: two roundings where there is a minimum, else one.
inline float grouped_value(const GroupedFormat& format, const GroupedStep& step, int i) {
  const int group = i / format.group;
  const GroupNumbers numbers = group_numbers(format, step, group);
  const int32_t zero = format.has_zeros() ? step.groups[group].offset : format.middle();
  const float product = numbers.scale * static_cast<float>(format.number(step.codes[i]) - zero);
  return format.has_minimums() ? product + numbers.minimum : product;
}

// The places of an output's fields in a step of a panel, one after the other.
template <class Byte>  // char or const char
class StepCursor {
 public:
  [[gnu::always_inline]] StepCursor(Byte* step, int64_t width, int64_t column)
      : step_(step), width_(width), column_(column) {}

  // Returns the next field, of this many bytes.
  [[gnu::always_inline]] Byte* next(int64_t bytes) {
    Byte* const place = step_ + width_ * before_ + column_ * bytes;
    before_ += bytes;
    return place;
  }

 private:
  Byte* step_;
  int64_t width_, column_, before_ = 0;
};

// Calls field(value, bytes) for the numbers of a step and quad(codes) for four bytes of codes each,
// in their order in memory: value is a uint16_t& of the step, codes point to 8 or 4 elements.
template <class Step, class Field, class Quad>
[[gnu::always_inline]] inline void for_fields(const GroupedFormat& format, Step* step,
                                              const Field& field, const Quad& quad) {
  if (format.is_super()) {
    field(step->super_scale, 2);
    if (format.has_minimums()) field(step->super_minimum, 2);
  }
  const int elements = format.codes == Codes::kBytes ? 4 : 8;
  for (int g = 0; g < format.step_groups(); ++g) {
    field(step->groups[g].scale, format.scale_bytes());
    if (format.offset_bytes() > 0) field(step->groups[g].offset, format.offset_bytes());
    for (int i = 0; i < format.group; i += elements) quad(step->codes + g * format.group + i);
  }
}

[[gnu::always_inline]] inline void write_step(const GroupedFormat& format, const GroupedStep& step,
                                              StepCursor<char> cursor) {
  for_fields(
      format, &step,
      [&](const uint16_t& value, int64_t bytes) __attribute__((always_inline)) {
        __builtin_memcpy(cursor.next(bytes), &value, static_cast<size_t>(bytes));
      },
      [&](const uint8_t* codes) __attribute__((always_inline)) {
        char* const to = cursor.next(4);
        const bool are_bytes = format.codes == Codes::kBytes;
        for (int b = 0; b < 4; ++b) {
          to[b] = static_cast<char>(are_bytes ? codes[b] : codes[b] | codes[4 + b] << 4);
        }
      });
}

inline void read_step(const GroupedFormat& format, StepCursor<const char> cursor,
                      GroupedStep* step) {
  for_fields(
      format, step,
      [&](uint16_t& value, int64_t bytes) {
        value = 0;
        __builtin_memcpy(&value, cursor.next(bytes), static_cast<size_t>(bytes));
      },
      [&](uint8_t* codes) {
        const char* const from = cursor.next(4);
        for (int b = 0; b < 4; ++b) {
          const uint8_t byte = static_cast<uint8_t>(from[b]);
          codes[b] = format.codes == Codes::kBytes ? byte : byte & 15;
          if (format.codes != Codes::kBytes) codes[4 + b] = byte >> 4;
        }
      });
}

}  // namespace lmdecode::linear
