// Arguments of the ops of decoder-only models to kernel parameters.
// python/lmdecode/decoder/causal_caches.py makes the tensors that come here.
#pragma once

#include <vector>

#include "bindings/decoder_checks.h"
#include "decoder/causal_forward.h"

namespace lmdecode::decoder {

// The weights, in one memory, with the layers that they refer to. Whether there is the cache that a
// layer names is checked in causal_forward_, which has the caches.
struct CausalWeightsModel {
  std::vector<CausalLayer> layers;
  std::vector<float> rotary_scales;
  CausalModel model;

  explicit CausalWeightsModel(ModelReader reader);
  CausalWeightsModel(const CausalWeightsModel&) = delete;
  CausalWeightsModel& operator=(const CausalWeightsModel&) = delete;
};

// Six tensors a cache: pool, blocks, lengths, ref_counts, free_blocks, counters. windows: of each.
// Then, if layers keep states: pool, positions, slots, ref_counts, free_slots, counters followed by
// the rows' prompt_ends.
constexpr size_t kCacheTensors = 6;
struct CausalCacheList {
  PagedCache caches[kMaxPagedCaches];
  int64_t count = 0;
  StateCache states;

  bool has_states() const { return states.state_size > 0; }
};
CausalCacheList causal_caches(const char* op, const Tensors& tensors, const Integers& windows);

}  // namespace lmdecode::decoder
