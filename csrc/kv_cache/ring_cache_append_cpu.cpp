// Heads of rows to threads.
#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "kv_cache/kv_cache_tuning.h"
#include "kv_cache/ring_cache_append.h"

namespace lmdecode::kv_cache {
namespace {

// Tokens [token, token + count), which go to slots that follow each other.
void copy_run(const RingStates& s, int64_t row, int64_t head, int64_t slot, int64_t token,
              int64_t count) {
  unsigned char* const to = s.to(row, head, slot);
  const unsigned char* const from = s.from(row, head, token);
  const size_t bytes = static_cast<size_t>(s.vector_bytes);
  if (s.slot_stride == s.vector_bytes && s.token_stride == s.vector_bytes) {
    std::memcpy(to, from, bytes * static_cast<size_t>(count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * s.slot_stride, from + i * s.token_stride, bytes);
  }
}

void append_head(const RingCacheAppendParams& params, const RingStates& states, int64_t row,
                 int64_t head) {
  const RingSlots slots = params.slots;
  const int64_t begin = params.positions.at(row), end = begin + params.tokens;
  for (int64_t position = begin; position < end;) {
    if (!slots.holds(position, end)) {
      position = end - slots.capacity;
      continue;
    }
    const int64_t count = slots.run_length(position, end);
    copy_run(states, row, head, slots.slot(position), position - begin, count);
    position += count;
  }
}

}  // namespace

void ring_cache_append_cpu(const RingCacheAppendParams& params) {
  const int64_t heads = params.rows * params.heads;
  const int64_t written = std::min(params.tokens, params.slots.num_sinks + params.slots.capacity);
  const int64_t bytes = written * (params.states[0].vector_bytes + params.states[1].vector_bytes);
  const int64_t grain = 1 + tuning::kMinTaskBytes / (1 + bytes);
  parallel_for(heads, grain, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      for (const RingStates& states : params.states) {
        append_head(params, states, item / params.heads, item % params.heads);
      }
    }
  });
}

}  // namespace lmdecode::kv_cache
