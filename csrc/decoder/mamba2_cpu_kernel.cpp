// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "decoder/part_vectors.h"
#include "decoder/state_layer_kernels.h"
#include "simd/vec_math.h"

namespace lmdecode::LMD_SIMD::decoder {

using namespace lmdecode::decoder;

namespace {

constexpr int kVectors = 2;  // of columns that are in registers together
constexpr int64_t kWide = kVectors * kLanes;
constexpr int kMostTokens = static_cast<int>(kMambaTokens);

// Some columns of H, row by row.
struct Columns {
  float* data;
  int64_t stride;
};

// Columns of a head that are taken together.
struct Place {
  int64_t head, group;
  int64_t first;  // of the columns
  int64_t count;  // 1 to kWide
};

// Advances the state from `from` to `to` by kTokens tokens from a row on, and writes their outputs.
// A whole vector is read where kIsWhole, or else as many lanes as there are columns.
template <int kTokens, bool kIsWhole>
inline void take_tokens(const Mamba2Params& p, const Place& place, int64_t row, Columns from,
                        Columns to) {
  const MixerConfig& m = p.config;
  const int64_t value = place.head * m.value_size + place.first;
  const int64_t key = place.group * m.key_size, size = m.key_size;
  const float *keys[kTokens], *queries[kTokens];
  F32 decay[kTokens], input[kTokens][kVectors], sum[kTokens][kVectors];
  const auto lanes = [&](int v) { return kIsWhole ? kLanes : place.count - v * kLanes; };
  for (int t = 0; t < kTokens; ++t) {
    const float* const gates = p.gates + (row + t) * p.gate_stride() + place.head;
    keys[t] = p.keys(row + t) + key;
    queries[t] = p.queries(row + t) + key;
    decay[t] = splat(gates[0]);
    const F32 step = splat(gates[m.value_heads]);
    for (int v = 0; v < kVectors; ++v) {
      sum[t][v] = splat(0.0f);
      input[t][v] = lanes(v) > 0 ? read(p.values(row + t) + value + v * kLanes, lanes(v)) * step
                                 : splat(0.0f);
    }
  }
  for (int64_t i = 0; i < size; ++i) {
    F32 h[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      h[v] = lanes(v) > 0 ? read(from.data + i * from.stride + v * kLanes, lanes(v)) : splat(0.0f);
    }
    for (int t = 0; t < kTokens; ++t) {
      const F32 b = splat(keys[t][i]), c = splat(queries[t][i]);
      for (int v = 0; v < kVectors; ++v) {
        h[v] = multiply_add(decay[t], h[v], b * input[t][v]);
        sum[t][v] = multiply_add(c, h[v], sum[t][v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      if (lanes(v) > 0) write(to.data + i * to.stride + v * kLanes, h[v], lanes(v));
    }
  }
  const F32 skip = splat(p.skip[place.head]);
  for (int t = 0; t < kTokens; ++t) {
    float* const out = p.out + (row + t) * p.out_stride + value;
    for (int v = 0; v < kVectors; ++v) {
      if (lanes(v) <= 0) continue;
      const F32 x = read(p.values(row + t) + value + v * kLanes, lanes(v));
      write(out + v * kLanes, multiply_add(skip, x, sum[t][v]), lanes(v));
    }
  }
}

template <bool kIsWhole>
void take_tokens(const Mamba2Params& p, const Place& place, int64_t row, int64_t count,
                 Columns from, Columns to) {
  switch (count) {
    case 1:
      return take_tokens<1, kIsWhole>(p, place, row, from, to);
    case 2:
      return take_tokens<2, kIsWhole>(p, place, row, from, to);
    case 3:
      return take_tokens<3, kIsWhole>(p, place, row, from, to);
    default:
      return take_tokens<kMostTokens, kIsWhole>(p, place, row, from, to);
  }
}

// scratch: [key_size, kWide].
void run_columns(const Mamba2Params& p, const StateSegment& segment, const Place& place,
                 float* scratch) {
  const MixerConfig& m = p.config;
  const int64_t at = place.head * m.key_size * m.value_size + place.first;
  const auto slot = [&](int64_t number) -> Columns {
    return {p.state.states + number * p.state.slot_stride + at, m.value_size};
  };
  Columns from = {scratch, kWide};
  if (segment.source >= 0) {
    from = slot(segment.source);
  } else {
    for (int64_t i = 0; i < m.key_size * kWide; ++i) scratch[i] = 0.0f;
  }
  const StateTarget* target = segment.targets;
  const StateTarget* const last_target = target + segment.num_targets;
  for (int64_t t = 0; t < segment.count;) {
    const bool has_target = target != last_target;
    const int64_t left = (has_target ? target->token + 1 : segment.count) - t;
    const int64_t count = left < kMambaTokens ? left : kMambaTokens;
    Columns to = {scratch, kWide};
    if (has_target && count == left) to = slot((target++)->slot);
    place.count == kWide ? take_tokens<true>(p, place, segment.row + t, count, from, to)
                         : take_tokens<false>(p, place, segment.row + t, count, from, to);
    from = to;
    t += count;
  }
}

inline float mean_square(const float* a, int64_t size) {
  F32 sum = splat(0.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 x = read(a + i, size - i);
    sum = multiply_add(x, x, sum);
  }
  return reduce_add(sum) / static_cast<float>(size);
}

}  // namespace

void mamba2_scan(const Mamba2Params& p, int64_t begin, int64_t end) {
  const MixerConfig& m = p.config;
  const int64_t parts = (m.value_size + kStateColumns - 1) / kStateColumns;
  alignas(64) float scratch[kMostHeadSize * kWide];
  for (int64_t task = begin; task < end; ++task) {
    Place place{};
    place.head = task / parts;
    place.group = place.head / (m.value_heads / m.key_heads);
    const int64_t first = task % parts * kStateColumns;
    const int64_t last =
        m.value_size - first < kStateColumns ? m.value_size : first + kStateColumns;
    for (place.first = first; place.first < last; place.first += kWide) {
      place.count = last - place.first < kWide ? last - place.first : kWide;
      for (int64_t i = 0; i < p.state.count; ++i) {
        run_columns(p, p.state.segments[i], place, scratch);
      }
    }
  }
}

void mamba2_norm(const Mamba2Params& p, int64_t begin, int64_t end) {
  const MixerConfig& m = p.config;
  const int64_t size = p.gamma == nullptr ? m.mixed() : m.mixed() / m.key_heads;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t first = 0; first < m.mixed(); first += size) {
      float* const out = p.out + row * p.out_stride + first;
      const float* const gate = p.output_gates(row) + first;
      const auto open = [&] {
        for (int64_t i = 0; i < size; i += kLanes) {
          write(out + i, read(out + i, size - i) * silu(read(gate + i, size - i)), size - i);
        }
      };
      if (p.gamma == nullptr || !m.norm_first) open();
      if (p.gamma == nullptr) continue;
      const F32 factor = splat(1.0f / __builtin_sqrtf(mean_square(out, size) + p.norm_epsilon));
      for (int64_t i = 0; i < size; i += kLanes) {
        const F32 gamma = read(p.gamma + first + i, size - i);
        write(out + i, read(out + i, size - i) * factor * gamma, size - i);
      }
      if (m.norm_first) open();
    }
  }
}

}  // namespace lmdecode::LMD_SIMD::decoder
