// The parameters of the plain stages of a row of a Sampler, and which stages are on.
#pragma once

#include "sampling/row_parameters.h"
#include "sampling/sampler_dialect.h"

namespace lmdecode::sampling {

// As of a call of top_k_top_p_sample with this row alone.
LMD_HOST_DEVICE TopKTopPSampleParams plain_params(const SamplerRow& row,
                                                  const SamplerDialectRules& rules, int64_t vocab) {
  TopKTopPSampleParams p;
  p.batch = 1;
  p.vocab = vocab;
  p.top_k.value = row.integers.top_k;
  p.top_p.value = static_cast<float>(row.numbers.top_p);
  p.min_p.value = static_cast<float>(row.numbers.min_p);
  p.temperature.value = static_cast<float>(row.numbers.temperature);
  p.has_seed = true;
  p.seed.value = row.integers.seed;
  p.position.value = row.position;
  p.dialect = rules.plain_dialect;
  return p;
}

// counted: the count after each stage is an output.
LMD_HOST_DEVICE void stages_of_row(const SamplerRow& row, const RowParameters& parameters,
                                   bool counted, bool (&on)[kSamplerStages]) {
  using S = SamplerStage;
  const SamplerNumbers& numbers = row.numbers;
  const auto set = [&](S stage, bool is_on) { on[static_cast<int>(stage)] = is_on; };
  set(S::kTemperature, parameters.temperature != 1.0f || numbers.dynamic_temperature_range > 0.0);
  // One that keeps all has a count.
  set(S::kTopK, parameters.top_k > 0 || (counted && row.integers.top_k > 0));
  set(S::kTopP, parameters.top_p_mode != TopPMode::kOff);
  set(S::kMinP, parameters.min_p_mode != MinPMode::kOff);
  set(S::kTopNSigma, numbers.top_n_sigma > 0.0);
  set(S::kEpsilon, numbers.epsilon_cutoff > 0.0 && numbers.epsilon_cutoff < 1.0);
  set(S::kEta, numbers.eta_cutoff > 0.0 && numbers.eta_cutoff < 1.0);
  set(S::kTopH, numbers.top_h > 0.0);
  set(S::kTypical, numbers.typical_p < 1.0);
  set(S::kXtc, numbers.xtc_probability > 0.0);
  set(S::kMirostat, numbers.mirostat_tau > 0.0);
}

}  // namespace lmdecode::sampling
