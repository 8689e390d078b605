#include <algorithm>
#include <cmath>

#include "common/parallel_rows.h"
#include "decoder/decoder_tuning.h"
#include "decoder/delta_rule.h"
#include "decoder/mamba2.h"
#include "decoder/short_convolution.h"
#include "decoder/state_layer.h"

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

void delta_rules(const StateLayerParams& p) {
  const MixerConfig& m = p.config;
  DeltaRuleParams d;
  d.config = m;
  d.state = p.state;
  d.state.states += m.convolution_state();
  d.rows = p.rows;
  d.gates = p.gates;
  d.out = p.out;
  d.gamma = p.weights.norm;
  d.norm_epsilon = p.norm_epsilon;
  const double row_nanoseconds =
      tuning::kNanosecondsPerConvolved * static_cast<double>(m.channels());
  const auto keys = LMD_SELECT_KERNEL(decoder, delta_rule_keys);
  parallel_rows(p.num_rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
    keys(d, begin, end);
    for (int64_t row = begin; row < end; ++row) compute_gates(d, p.weights, row);
  });
  const int64_t parts = (m.value_size + kDeltaColumns - 1) / kDeltaColumns;
  const double part_nanoseconds =
      tuning::kNanosecondsPerDelta *
      static_cast<double>((p.num_rows + p.state.count) * m.key_size * kDeltaColumns);
  const auto rule = LMD_SELECT_KERNEL(decoder, delta_rule);
  parallel_rows(m.value_heads * parts, part_nanoseconds,
                [&](int64_t begin, int64_t end) { rule(d, begin, end); });
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
  Mamba2Params s;
  s.config = m;
  s.state = p.state;
  s.state.states += m.convolution_state();
  s.rows = p.rows;
  s.row_stride = p.row_stride;
  s.gates = p.gates;
  s.out = p.out;
  s.out_stride = p.out_stride;
  s.skip = p.weights.skip;
  s.gamma = p.weights.norm;
  s.norm_epsilon = p.norm_epsilon;
  parallel_rows(p.num_rows, tuning::kNanosecondsPerStep * static_cast<double>(m.value_heads),
                [&](int64_t begin, int64_t end) {
                  for (int64_t row = begin; row < end; ++row) compute_steps(s, p.weights, row);
                });
  const int64_t parts = (m.value_size + kMambaColumns - 1) / kMambaColumns;
  const double task_nanoseconds =
      tuning::kNanosecondsPerDelta *
      static_cast<double>((p.num_rows + p.state.count) * m.key_size * kMambaColumns);
  const auto scan = LMD_SELECT_KERNEL(decoder, mamba2_scan);
  parallel_rows(m.value_heads * parts, task_nanoseconds,
                [&](int64_t begin, int64_t end) { scan(s, begin, end); });
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
