// The scratch memory of one thread of a sampler's step on the CPU: the lists', then this.
#pragma once

#include "common/split_memory.h"
#include "sampling/sampler_edits.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::sampling {

struct SamplerWorkspace {
  void* lists;  // sampling_workspace_bytes(vocab)
  float* row;   // sampling_workspace_capacity(vocab)
  TouchedLogits touched;
};

// Bytes, and where they are in memory unless that is null.
inline size_t split_sampler_workspace(void* memory, const SamplerLayout& layout,
                                      SamplerWorkspace* w) {
  SplitMemory split(memory);
  char* lists = nullptr;
  split.take(&lists, static_cast<int64_t>(sampling_workspace_bytes(layout.vocab)));
  w->lists = lists;
  split.take(&w->row, sampling_workspace_capacity(layout.vocab));
  split.take(&w->touched.raw, layout.touched_capacity + 16);
  split.take(&w->touched.edited, layout.touched_capacity + 16);
  split.take(&w->touched.repeats, layout.touched_capacity);
  split.take(&w->touched.suffix, layout.text_capacity);
  return split.used();
}

}  // namespace lmdecode::sampling
