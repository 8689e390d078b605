#include "sampling/sampler_text_rules.h"

namespace lmdecode::sampling {

int64_t forced_token(const SamplerRowView& view) { return text_rules::forced_token(view); }

void apply_text_rules(const SamplerRowView& view, const SamplerPenalties& penalties,
                      const TouchedLogits& logits) {
  text_rules::apply_text_rules(view, penalties, logits);
}

}  // namespace lmdecode::sampling
