// Arguments of the ops of decoder-only models to kernel parameters.
// python/lmdecode/decoder/causal_weights.py and causal_caches.py make the tensors that come here.
#pragma once

#include <vector>

#include "bindings/decoder_checks.h"
#include "decoder/causal_forward.h"

namespace lmdecode::decoder {

// Columns of `layout`, a row for the model and one for each layer: where in the weights' memory
// each part lies, in bytes, -1 where there is none; and for layers four numbers before these.
constexpr int64_t kLayoutColumns = 22;

// The weights, in one memory, with the layers that they refer to. Whether there is the cache that a
// layer names is checked in causal_forward_, which has the caches.
//
// They are checked once, and not at every step: where all that the checks look at is as it was, so
// is what they found. That is the place and the size of the memory, the layout, config and numbers,
// and in the memory the header of each packed weight. The last results of a thread are kept.
// Valid until the thread's next call.
const CausalModel& checked_causal_model(const char* op, const Tensor& memory, const Tensor& layout,
                                        const Integers& config, const Numbers& numbers);

// config and numbers alone.
CausalModel causal_model_sizes(const char* op, const Integers& config, const Numbers& numbers,
                               std::vector<float>* rotary_scales);

// Six tensors a cache: pool, blocks, lengths, ref_counts, free_blocks, counters. windows: of each.
constexpr size_t kCacheTensors = 6;
int64_t paged_caches(const char* op, const Tensors& tensors, const Integers& windows,
                     PagedCache* caches);

}  // namespace lmdecode::decoder
