// The products of weights with a scale for each group. grouped_format.h has the layouts of both
// factors.
//
// The sum of the products of a group, and of its offset, is exact; float(sum) * (scale of the
// weights * scale of x) is added to the sum of the groups before it by a fused operation, followed
// by minimum * (scale of x * sum of x), fused too. So the bits are the same at every level.
#pragma once

#include <type_traits>

#include "linear/grouped_format.h"
#include "linear/linear_products.h"

namespace lmdecode::LMD_SIMD::linear {

using namespace lmdecode::linear;

constexpr int kGroupPart = 32;  // elements whose products fit 16 bits: 16 * 15 * 127 in each lane

// The numbers of codes without sign.
template <Codes kCodes>
inline constexpr auto kCodeNumbers = [] {
  struct Numbers {
    alignas(16) uint8_t of[16];
  } numbers = {};
  const GroupedFormat format = {32, kCodes, Scales::kHalf, Offsets::kNone};
  for (int code = 0; code < 16; ++code) {
    numbers.of[code] = static_cast<uint8_t>(format.number(static_cast<uint8_t>(code)));
  }
  return numbers;
}();

inline int32_t load_quad(const char* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return quad;
}

// Floats of GroupVectors, where these are wide.
#if defined(LMD_SIMD_AVX512) || defined(LMD_SIMD_AVX2)
struct GroupFloats {
  using Floats = F32;
  static constexpr int kLanes = LMD_SIMD::kLanes;
  static Floats load_halves(const char* p) { return load(reinterpret_cast<const Half*>(p)); }
  static Floats load_bfloats(const char* p) { return load(reinterpret_cast<const BFloat16*>(p)); }
  static Floats load_floats(const float* p) { return load(p); }
  static void store_floats(float* p, Floats a) { store(p, a); }
  static Floats same(float a) { return splat(a); }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats minus(Floats a) { return splat(-0.0f) - a; }
  static Floats add_product(Floats a, Floats b, Floats c) { return multiply_add(a, b, c); }
};
#endif

// Vectors of kLanes outputs. Bytes: four weights of each. Narrow and Wide: products of numbers up
// to 15, or of any bytes; Part: sums of up to kGroupPart elements, which begin() makes of the sum
// so far and end() adds to it.
#if defined(LMD_SIMD_AVX512)
struct GroupVectors : GroupFloats {
  using Bytes = __m512i;
  using Sum = __m512i;
  static Bytes load_bytes(const char* p) {
    Bytes v = _mm512_loadu_si512(p);
    asm("" : "+v"(v));  // loaded once: the compiler would load it for each half
    return v;
  }
  static Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Bytes high(Bytes v) { return low(_mm512_srli_epi16(v, 4)); }
  static Bytes look_up(const uint8_t* table, Bytes v) {
    const __m128i numbers = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), v);
  }
  static Sum offset(int32_t x) { return _mm512_set1_epi32(x); }
  static Sum offset(int32_t x, const char* zeros) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(x));
  }
  static Floats load_signed(const char* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
  }
  static Floats load_unsigned(const char* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
  }
#if defined(LMD_SIMD_AVX512_VNNI)
  struct Wide {
    using Part = __m512i;
    static Part begin(Sum sum) { return sum; }
    static Part add(Part c, Bytes w, const char* x) {
      return _mm512_dpbusd_epi32(c, w, _mm512_set1_epi32(load_quad(x)));
    }
    static Sum end(Part c, Sum) { return c; }
  };
  using Narrow = Wide;
#else
  struct Narrow {
    using Part = __m512i;
    static Part begin(Sum) { return _mm512_setzero_si512(); }
    static Part add(Part c, Bytes w, const char* x) {
      return _mm512_add_epi16(c, _mm512_maddubs_epi16(w, _mm512_set1_epi32(load_quad(x))));
    }
    static Sum end(Part c, Sum sum) {
      return _mm512_add_epi32(sum, _mm512_madd_epi16(c, _mm512_set1_epi16(1)));
    }
  };
  struct Wide {  // as 16 bits, those at even places and those at odd ones
    using Part = __m512i;
    static Part begin(Sum sum) { return sum; }
    static Part add(Part c, Bytes w, const char* x) {
      const __m512i quad = _mm512_set1_epi32(load_quad(x));
      const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(quad, 8), 8);
      const __m512i odd = _mm512_srai_epi16(quad, 8);
      const __m512i low = _mm512_and_si512(w, _mm512_set1_epi16(255));
      const __m512i high = _mm512_srli_epi16(w, 8);
      return _mm512_add_epi32(
          c, _mm512_add_epi32(_mm512_madd_epi16(low, even), _mm512_madd_epi16(high, odd)));
    }
    static Sum end(Part c, Sum) { return c; }
  };
#endif
  static Floats to_floats(Sum sum) { return {_mm512_cvtepi32_ps(sum)}; }
};
#elif defined(LMD_SIMD_AVX2)
struct GroupVectors : GroupFloats {
  using Bytes = __m256i;
  using Sum = __m256i;
  static Bytes load_bytes(const char* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Bytes low(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Bytes high(Bytes v) { return low(_mm256_srli_epi16(v, 4)); }
  static Bytes look_up(const uint8_t* table, Bytes v) {
    const __m128i numbers = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), v);
  }
  static Sum offset(int32_t x) { return _mm256_set1_epi32(x); }
  static Sum offset(int32_t x, const char* zeros) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros));
    return _mm256_mullo_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(x));
  }
  static Floats load_signed(const char* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
  }
  static Floats load_unsigned(const char* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))};
  }
  struct Narrow {
    using Part = __m256i;
    static Part begin(Sum) { return _mm256_setzero_si256(); }
    static Part add(Part c, Bytes w, const char* x) {
      return _mm256_add_epi16(c, _mm256_maddubs_epi16(w, _mm256_set1_epi32(load_quad(x))));
    }
    static Sum end(Part c, Sum sum) {
      return _mm256_add_epi32(sum, _mm256_madd_epi16(c, _mm256_set1_epi16(1)));
    }
  };
  struct Wide {  // as 16 bits, those at even places and those at odd ones
    using Part = __m256i;
    static Part begin(Sum sum) { return sum; }
    static Part add(Part c, Bytes w, const char* x) {
      const __m256i quad = _mm256_set1_epi32(load_quad(x));
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8);
      const __m256i odd = _mm256_srai_epi16(quad, 8);
      const __m256i low = _mm256_and_si256(w, _mm256_set1_epi16(255));
      const __m256i high = _mm256_srli_epi16(w, 8);
      return _mm256_add_epi32(
          c, _mm256_add_epi32(_mm256_madd_epi16(low, even), _mm256_madd_epi16(high, odd)));
    }
    static Sum end(Part c, Sum) { return c; }
  };
  static Floats to_floats(Sum sum) { return {_mm256_cvtepi32_ps(sum)}; }
};
#else
typedef uint32_t Uint4 __attribute__((vector_size(16)));
typedef int16_t Short8 __attribute__((vector_size(16)));

struct GroupVectors {
  using Bytes = Uint4;
  using Sum = Int4;
  using Floats = Float4;
  static constexpr int kLanes = 4;
  static Bytes load_bytes(const char* p) {
    Bytes v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static Bytes low(Bytes v) { return v & 0x0f0f0f0fu; }
  static Bytes high(Bytes v) { return v >> 4 & 0x0f0f0f0fu; }
  static Bytes look_up(const uint8_t* table, Bytes v) {
    uint8_t bytes[16];
    __builtin_memcpy(bytes, &v, sizeof(bytes));
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_bytes(reinterpret_cast<const char*>(bytes));
  }
  static Sum offset(int32_t x) { return Sum{x, x, x, x}; }
  static Sum offset(int32_t x, const char* zeros) {
    uint8_t z[4];
    __builtin_memcpy(z, zeros, sizeof(z));
    return Sum{z[0] * x, z[1] * x, z[2] * x, z[3] * x};
  }
  struct Narrow {
    using Part = Short8;
    static Part begin(Sum) { return Part{}; }
    static Part add(Part c, Bytes w, const char* x) {
      // Elements 0 and 2 of each output lie in halves of 16 bits, so do 1 and 3.
      int8_t e[4];
      __builtin_memcpy(e, x, sizeof(e));
      const int16_t x0 = e[0], x1 = e[1], x2 = e[2], x3 = e[3];
      const Bytes even = w & 0x00ff00ffu, odd = w >> 8 & 0x00ff00ffu;
      return c + reinterpret_cast<Part>(even) * Part{x0, x2, x0, x2, x0, x2, x0, x2} +
             reinterpret_cast<Part>(odd) * Part{x1, x3, x1, x3, x1, x3, x1, x3};
    }
    static Sum end(Part c, Sum sum) {
      const Sum pairs = reinterpret_cast<Sum>(c);
      return sum + (pairs << 16 >> 16) + (pairs >> 16);
    }
  };
  struct Wide {
    using Part = Sum;
    static Part begin(Sum sum) { return sum; }
    static Part add(Part c, Bytes w, const char* x) {
      int8_t e[4];
      __builtin_memcpy(e, x, sizeof(e));
      for (int b = 0; b < 4; ++b) {
        c += reinterpret_cast<Sum>(w >> (8 * b) & 255u) * Sum{e[b], e[b], e[b], e[b]};
      }
      return c;
    }
    static Sum end(Part c, Sum) { return c; }
  };
  static Floats to_floats(Sum sum) { return __builtin_convertvector(sum, Floats); }
  static Floats load_halves(const char* p) { return load_narrow<Half>(p); }
  static Floats load_bfloats(const char* p) { return load_narrow<BFloat16>(p); }
  static Floats load_signed(const char* p) { return load_narrow<int8_t>(p); }
  static Floats load_unsigned(const char* p) { return load_narrow<uint8_t>(p); }
  static Floats load_floats(const float* p) { return FloatSums::load_sum(p); }
  static void store_floats(float* p, Floats a) { FloatSums::store_sum(p, a); }
  static Floats same(float a) { return Floats{a, a, a, a}; }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats minus(Floats a) { return -a; }
  static Floats add_product(Floats a, Floats b, Floats c) {
    for (int i = 0; i < kLanes; ++i) c[i] = fused_multiply_add(a[i], b[i], c[i]);
    return c;
  }

 private:
  static float wide(Half value) { return to_float(value); }
  static float wide(BFloat16 value) { return to_float(value); }
  static float wide(int value) { return static_cast<float>(value); }
  template <class T>
  static Floats load_narrow(const char* p) {
    T v[4];
    __builtin_memcpy(v, p, sizeof(v));
    return Floats{wide(v[0]), wide(v[1]), wide(v[2]), wide(v[3])};
  }
};
#endif

// The fields in front of the elements of a group of x.
struct GroupInput {
  float scale;
  union {
    int32_t offset;
    float scaled_sum;  // with minimums
  };
};

template <LinearFormat kFormat>
struct GroupProducts : GroupVectors {
  using Scalar = float;
  static constexpr GroupedFormat kGrouped = grouped_format(kFormat);
  static constexpr bool kIsNarrow = kGrouped.codes == Codes::kNibbles;
  using Products = std::conditional_t<kIsNarrow, Narrow, Wide>;
  using Part = typename Products::Part;
  static constexpr bool kHasZeros = kGrouped.has_zeros();
  static constexpr bool kHasMinimums = kGrouped.has_minimums();
  static constexpr int kGroup = kGrouped.group;
  static constexpr int kWidth = kPanelVectors * kLanes;
  static constexpr int kStepGroups = kGrouped.step_groups();
  static constexpr int kSuperBytes = kWidth * kGrouped.super_bytes();
  static constexpr int kGroupBytes = kWidth * kGrouped.group_bytes();
  static constexpr int kStepBytes = kWidth * kGrouped.step_bytes();
  static constexpr int kOffsetsAt = kWidth * kGrouped.scale_bytes();
  static constexpr int kCodesAt = kOffsetsAt + kWidth * kGrouped.offset_bytes();
  static constexpr int kGroupInputBytes = 8 + kGroup;
  static constexpr int kInputBytes = kStepGroups * kGroupInputBytes;

  // Elements [at, at + 4) and [at + 4, at + 8) of a group, of vector j of a panel.
  static void load_codes(const char* group, int at, int j, Bytes* first, Bytes* second) {
    const char* const codes = group + kCodesAt;
    if constexpr (kGrouped.codes == Codes::kBytes) {
      *first = load_bytes(codes + (kWidth * at + j * kLanes * 4));
      *second = load_bytes(codes + (kWidth * (at + 4) + j * kLanes * 4));
    } else {
      const Bytes bytes = load_bytes(codes + (kWidth * at / 2 + j * kLanes * 4));
      *first = low(bytes);
      *second = high(bytes);
      if constexpr (!kIsNarrow) {
        *first = look_up(kCodeNumbers<kGrouped.codes>.of, *first);
        *second = look_up(kCodeNumbers<kGrouped.codes>.of, *second);
      }
    }
  }

  static Floats load_scales(const char* step, const char* group, int j) {
    if constexpr (kGrouped.is_super()) {
      return times(load_halves(step + j * kLanes * 2), load_signed(group + j * kLanes));
    } else if constexpr (kGrouped.scales == Scales::kBFloat16) {
      return load_bfloats(group + j * kLanes * 2);
    } else {
      return load_halves(group + j * kLanes * 2);
    }
  }

  static Floats load_minimums(const char* step, const char* group, int j) {
    const char* const offsets = group + kOffsetsAt;
    if constexpr (kGrouped.is_super()) {
      return minus(times(load_halves(step + 2 * kWidth + j * kLanes * 2),
                         load_unsigned(offsets + j * kLanes)));
    } else {
      return load_halves(offsets + j * kLanes * 2);
    }
  }

  // The initial value of the sum of a group.
  static Sum offset_of([[maybe_unused]] const GroupInput& x, [[maybe_unused]] const char* group,
                       [[maybe_unused]] int j) {
    if constexpr (kHasMinimums) {
      return offset(0);
    } else if constexpr (kHasZeros) {
      return offset(x.offset, group + kOffsetsAt + j * kLanes);
    } else {
      return offset(x.offset);
    }
  }
};

}  // namespace lmdecode::LMD_SIMD::linear
