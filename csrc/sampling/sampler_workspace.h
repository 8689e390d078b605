// The scratch memory of a thread in a sampler's step on the CPU: first the lists', then this.
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

LMD_HOST_DEVICE void take_touched(const SamplerLayout& layout, SplitMemory* split,
                                  TouchedLogits* touched) {
  split->take(&touched->raw, layout.touched_capacity + 16);
  split->take(&touched->edited, layout.touched_capacity + 16);
  split->take(&touched->repeats, layout.touched_capacity);
  split->take(&touched->suffix, layout.text_capacity);
}

// Bytes, and where they are in memory unless that is null.
inline size_t split_sampler_workspace(void* memory, const SamplerLayout& layout,
                                      SamplerWorkspace* w) {
  SplitMemory split(memory);
  char* lists = nullptr;
  split.take(&lists, static_cast<int64_t>(sampling_workspace_bytes(layout.vocab)));
  w->lists = lists;
  split.take(&w->row, sampling_workspace_capacity(layout.vocab));
  take_touched(layout, &split, &w->touched);
  return split.used();
}

// The scratch memory of one block of threads on a GPU.
struct SamplerBlockWorkspace {
  float* row;  // [vocab]
  TouchedLogits touched;

  // Bytes, and where they are in memory unless that is null.
  LMD_HOST_DEVICE size_t split(void* memory, const SamplerLayout& layout) {
    SplitMemory split(memory);
    split.take(&row, layout.vocab);
    take_touched(layout, &split, &touched);
    return split.used();
  }
};

}  // namespace lmdecode::sampling
