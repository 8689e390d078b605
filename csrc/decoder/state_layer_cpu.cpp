#include <algorithm>
#include <cmath>

#include "common/parallel_rows.h"
#include "decoder/decoder_tuning.h"
#include "decoder/state_layer.h"
#include "decoder/state_layer_kernels.h"

namespace lmdecode::decoder {
namespace {

void convolve(const StateLayerParams& p) {
  const MixerConfig& m = p.config;
  ShortConvolutionParams c;
  c.state = p.state;
  c.channels = m.channels();
  c.taps = m.taps;
  c.kernel = p.weights.convolution;
  c.bias = p.weights.convolution_bias;
  c.rows = p.rows + (m.is_mamba2() ? m.mixed() : 0);
  c.row_stride = p.row_stride;
  c.out = m.has_heads() ? nullptr : p.out;
  const int64_t parts = (c.channels + kConvolutionChannels - 1) / kConvolutionChannels;
  const double part_nanoseconds =
      tuning::kNanosecondsPerConvolved * static_cast<double>(p.num_rows * kConvolutionChannels);
  const auto run = LMD_SELECT_KERNEL(decoder, short_convolution);
  parallel_rows(parts, part_nanoseconds, [&](int64_t begin, int64_t end) {
    run(c, begin * kConvolutionChannels, std::min(end * kConvolutionChannels, c.channels));
  });
}

double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

// How much of the state is kept, and how much of the token's value is written, of each value head.
void compute_gates(const DeltaRuleParams& d, const MixerWeights& w, int64_t row) {
  const MixerConfig& m = d.config;
  const float* const b = d.output_gates(row) + m.mixed();
  const float* const a = b + m.value_heads;
  float* const gates = d.gates + row * d.gate_stride();
  for (int64_t head = 0; head < m.value_heads; ++head) {
    const double step = softplus(static_cast<double>(a[head] + w.decay_bias[head]));
    gates[head] = static_cast<float>(std::exp(static_cast<double>(w.decay[head]) * step));
    gates[m.value_heads + head] =
        static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(b[head]))));
  }
}

template <class Params>
Params params_of(const StateLayerParams& p) {
  Params s;
  s.config = p.config;
  s.state = p.state;
  s.state.states += p.config.convolution_state();
  s.rows = p.rows;
  s.row_stride = p.row_stride;
  s.gates = p.gates;
  s.out = p.out;
  s.out_stride = p.out_stride;
  s.gamma = p.weights.norm;
  s.norm_epsilon = p.norm_epsilon;
  return s;
}

// run: of tasks of [begin, end), which are (head, kStateColumns columns).
template <class Params>
void run_columns(const StateLayerParams& p, const Params& s,
                 void (*run)(const Params&, int64_t, int64_t)) {
  const MixerConfig& m = p.config;
  const int64_t parts = (m.value_size + kStateColumns - 1) / kStateColumns;
  const double task_nanoseconds =
      tuning::kNanosecondsPerDelta *
      static_cast<double>((p.num_rows + p.state.count) * m.key_size * kStateColumns);
  parallel_rows(m.value_heads * parts, task_nanoseconds,
                [&](int64_t begin, int64_t end) { run(s, begin, end); });
}

void delta_rules(const StateLayerParams& p) {
  const DeltaRuleParams d = params_of<DeltaRuleParams>(p);
  const double row_nanoseconds =
      tuning::kNanosecondsPerConvolved * static_cast<double>(p.config.channels());
  const auto keys = LMD_SELECT_KERNEL(decoder, delta_rule_keys);
  parallel_rows(p.num_rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
    keys(d, begin, end);
    for (int64_t row = begin; row < end; ++row) compute_gates(d, p.weights, row);
  });
  run_columns(p, d, LMD_SELECT_KERNEL(decoder, delta_rule));
  const auto norm = LMD_SELECT_KERNEL(decoder, delta_rule_norm);
  parallel_rows(p.num_rows, row_nanoseconds,
                [&](int64_t begin, int64_t end) { norm(d, begin, end); });
}

// How much of the state is kept, and by how much a token's value is multiplied, of each head.
void compute_steps(const Mamba2Params& s, const MixerWeights& w, int64_t row) {
  const MixerConfig& m = s.config;
  float* const gates = s.gates + row * s.gate_stride();
  for (int64_t head = 0; head < m.value_heads; ++head) {
    const double x = static_cast<double>(s.steps(row)[head] + w.decay_bias[head]);
    const double least = static_cast<double>(m.least_step);
    const double step = std::min(std::max(softplus(x), least), static_cast<double>(m.most_step));
    gates[head] = static_cast<float>(std::exp(static_cast<double>(w.decay[head]) * step));
    gates[m.value_heads + head] = static_cast<float>(step);
  }
}

void state_spaces(const StateLayerParams& p) {
  const MixerConfig& m = p.config;
  Mamba2Params s = params_of<Mamba2Params>(p);
  s.skip = p.weights.skip;
  parallel_rows(p.num_rows, tuning::kNanosecondsPerStep * static_cast<double>(m.value_heads),
                [&](int64_t begin, int64_t end) {
                  for (int64_t row = begin; row < end; ++row) compute_steps(s, p.weights, row);
                });
  run_columns(p, s, LMD_SELECT_KERNEL(decoder, mamba2_scan));
  const auto norm = LMD_SELECT_KERNEL(decoder, mamba2_norm);
  parallel_rows(p.num_rows, tuning::kNanosecondsPerConvolved * static_cast<double>(m.mixed()),
                [&](int64_t begin, int64_t end) { norm(s, begin, end); });
}

}  // namespace

void state_layer_cpu(const StateLayerParams& p) {
  convolve(p);
  if (p.config.is_delta_rule()) delta_rules(p);
  if (p.config.is_mamba2()) state_spaces(p);
}

}  // namespace lmdecode::decoder
