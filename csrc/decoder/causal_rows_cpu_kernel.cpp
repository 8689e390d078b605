// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include <type_traits>

#include "attention/sliding_window_attention.h"
#include "decoder/causal_rows.h"
#include "linear/int8_scale.h"
#include "simd/vec_math.h"
#include "simd/vec_round.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;
using linear::Int8Scale;
using linear::largest_magnitude_bits;
using linear::to_int8;
using lmdecode::attention::Int8Cell;

namespace {

// to [size] = from.
template <class T>
inline void store_row(const float* from, int64_t size, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_all(to + i, load(from + i));
  for (; i < size; ++i) store_one(to + i, from[i]);
}

// To a scale and whole multiples of it, the largest magnitude being 127 of them.
inline void store_row(const float* from, int64_t size, Int8Cell* to) {
  const Int8Scale scale = Int8Scale::of(largest_magnitude_bits(from, size, 1));
  __builtin_memcpy(to, &scale.scale, sizeof(scale.scale));
  int8_t* const bytes = &to[attention::kInt8ScaleBytes].byte;
  for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<int8_t>(to_int8(from[i], scale.factor));
}

inline void turn(float* head, const float* cosines, const float* sines, int64_t half) {
  float* const other = head + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load(head + i), b = load(other + i);
    const F32 cosine = load(cosines + i), sine = load(sines + i);
    store(head + i, a * cosine - b * sine);
    store(other + i, b * cosine + a * sine);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = other[i];
    head[i] = a * cosines[i] - b * sines[i];
    other[i] = b * cosines[i] + a * sines[i];
  }
}

template <class T>
void run_rows(const CausalRowsParams& p, int64_t begin, int64_t end) {
  const int64_t query_size = p.heads * p.head_size, key_size = p.kv_heads * p.head_size;
  for (int64_t row = begin; row < end; ++row) {
    float* const queries = p.qkv + row * p.row_stride;
    float* const keys = queries + query_size;
    if (p.half > 0) {
      for (int64_t head = 0; head < p.heads + p.kv_heads; ++head) {
        turn(queries + head * p.head_size, p.cosines + row * p.angle_stride,
             p.sines + row * p.angle_stride, p.half);
      }
    }
    if constexpr (!std::is_same_v<T, Int8Cell>) {
      if (p.queries != nullptr) {
        store_row(queries, query_size, static_cast<T*>(p.queries) + row * query_size);
      }
    }
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      const int64_t at = p.places[row] + head * p.head_stride;
      const float* const key = keys + head * p.head_size;
      store_row(key, p.head_size, reinterpret_cast<T*>(p.keys) + at);
      store_row(key + key_size, p.head_size, reinterpret_cast<T*>(p.values) + at);
    }
  }
}

}  // namespace

void causal_rows(const CausalRowsParams& params, int64_t begin, int64_t end) {
  if (params.is_int8) return run_rows<Int8Cell>(params, begin, end);
  if (params.dtype == DType::kBFloat16) return run_rows<BFloat16>(params, begin, end);
  run_rows<float>(params, begin, end);
}

void convert_rows(const ConvertRowsParams& params, int64_t begin, int64_t end) {
  const BFloat16* const from = static_cast<const BFloat16*>(params.from);
  for (int64_t row = begin; row < end; ++row) {
    const BFloat16* const x = from + row * params.size;
    float* const to = params.to + row * params.to_stride;
    int64_t i = 0;
    for (; i + kLanes <= params.size; i += kLanes) store(to + i, load(x + i));
    for (; i < params.size; ++i) to[i] = to_float(x[i]);
  }
}

void gate_rows(const GateRowsParams& p, int64_t begin, int64_t end) {
  const auto gated = [](F32 x, F32 gate) { return x / (splat(1.0f) + exp_of(splat(0.0f) - gate)); };
  for (int64_t row = begin; row < end; ++row) {
    const float* const gates = p.gates + row * p.gate_stride;
    float* const out = p.out + row * p.size;
    int64_t i = 0;
    for (; i + kLanes <= p.size; i += kLanes) store(out + i, gated(load(out + i), load(gates + i)));
    if (i < p.size) {
      const int rest = static_cast<int>(p.size - i);
      store_part(out + i, gated(load_part(out + i, rest, 0.0f), load_part(gates + i, rest, 0.0f)),
                 rest);
    }
  }
}

void soft_cap(float* values, int64_t size, float scale, float cap) {
  const auto capped = [&](F32 x) {
    x = x * splat(scale);
    return cap == 0.0f ? x : splat(cap) * tanh_of(x / splat(cap));
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(values + i, capped(load(values + i)));
  if (i < size) {
    store_part(values + i, capped(load_part(values + i, static_cast<int>(size - i), 0.0f)),
               static_cast<int>(size - i));
  }
}

}  // namespace lmdecode::LMD_SIMD::decoder
