// The dialect of a row of a Sampler: the order of its stages, and the rules at their boundaries.
// docs/reference/sampler.md has the tables.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "sampling/dialect.h"
#include "sampling/sampler_state.h"

namespace lmdecode::sampling {

// A column of the stage counts each.
enum class SamplerStage : uint8_t {
  kTemperature = 0,
  kTopK,
  kTopP,
  kMinP,
  kTopNSigma,
  kEpsilon,
  kEta,
  kTopH,
  kTypical,
  kXtc,
  kMirostat,
};
constexpr int kSamplerStages = 11;

struct SamplerDialectRules {
  SamplerStage stages[kSamplerStages];
  DialectRules dialect;  // of top-k, top-p and min-p
  Dialect plain_dialect = Dialect::kLmdecode;
  bool is_plain = false;           // these three alone: as top_k_top_p_sample of plain_dialect
  bool counts_see_prompt = false;  // frequency and presence
  bool keep_max_ties = false;      // where nothing reaches a bound, all that equal the maximum stay
  bool keep_typical_ties = false;
  int64_t top_h_tokens = 0;        // top-h considers only this many first tokens; 0: all
  double least_temperature = 0.0;  // below it a row is greedy
  bool rank_after_ties = false;    // equal logits rank before the chosen one, at any index
};

LMD_HOST_DEVICE SamplerDialectRules sampler_dialect_rules(SamplerDialect dialect) {
  using S = SamplerStage;
  SamplerDialectRules rules{{S::kTemperature, S::kTopK, S::kTopP, S::kMinP, S::kTopNSigma,
                             S::kEpsilon, S::kEta, S::kTopH, S::kTypical, S::kXtc, S::kMirostat},
                            dialect_rules(Dialect::kLmdecode)};
  const auto set = [&](const SamplerStage(&stages)[kSamplerStages]) {
    for (int i = 0; i < kSamplerStages; ++i) rules.stages[i] = stages[i];
  };
  switch (dialect) {
    case SamplerDialect::kLmdecode:
      rules.is_plain = true;
      break;
    case SamplerDialect::kTransformers:
      set({S::kTemperature, S::kTopH, S::kTopK, S::kTopP, S::kMinP, S::kTypical, S::kEpsilon,
           S::kEta, S::kTopNSigma, S::kXtc, S::kMirostat});
      rules.plain_dialect = Dialect::kTransformers;
      rules.is_plain = true;
      rules.keep_max_ties = rules.keep_typical_ties = true;
      rules.top_h_tokens = 100;
      break;
    case SamplerDialect::kVllm:
      set({S::kTemperature, S::kMinP, S::kTopK, S::kTopP, S::kTopNSigma, S::kEpsilon, S::kEta,
           S::kTopH, S::kTypical, S::kXtc, S::kMirostat});
      rules.plain_dialect = Dialect::kVllm;
      rules.is_plain = true;
      rules.rank_after_ties = true;
      rules.least_temperature = 1e-5;
      break;
    case SamplerDialect::kLlamaCpp:
      set({S::kTopNSigma, S::kTopK, S::kTypical, S::kTopP, S::kMinP, S::kXtc, S::kEpsilon, S::kEta,
           S::kTopH, S::kTemperature, S::kMirostat});
      rules.counts_see_prompt = true;
      break;
    case SamplerDialect::kSglang:
      set({S::kTemperature, S::kTopP, S::kTopK, S::kMinP, S::kTopNSigma, S::kEpsilon, S::kEta,
           S::kTopH, S::kTypical, S::kXtc, S::kMirostat});
      break;
  }
  rules.dialect = dialect_rules(rules.plain_dialect);
  if (dialect == SamplerDialect::kSglang) {
    rules.dialect.strict_top_p = true;
    rules.dialect.min_p_one_keeps_ties = true;
  }
  return rules;
}

}  // namespace lmdecode::sampling
