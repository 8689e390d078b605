// The ops of a step of a Sampler and of its verification of drafts: what the bindings for CPU and
// CUDA tensors share.
#pragma once

#include <algorithm>

#include "bindings/tensor_checks.h"
#include "sampling/sampler_step.h"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling {

// Errors name what users call, where they do.
constexpr const char* kStepOp = "Sampler.sample";
constexpr const char* kVerifyOp = "verify_draft";

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;

// sizes: vocab, text_capacity, rules_capacity.
inline SamplerLayout layout_of(const char* op, int64_t vocab, int64_t text_capacity,
                               int64_t rules_capacity) {
  if (vocab < 1 || vocab > kMostTokens) {
    fail(op, "vocab is ", vocab, "; expected 1 to 2^31 - 1");
  }
  constexpr int64_t kMost = int64_t{1} << 28;
  if (text_capacity < 0 || text_capacity > kMost) {
    fail(op, "text_capacity is ", text_capacity, "; expected 0 to 2^28");
  }
  if (rules_capacity < 0 || rules_capacity > kMost) {
    fail(op, "rules_capacity is ", rules_capacity, "; expected 0 to 2^28");
  }
  return SamplerLayout::of(vocab, text_capacity, rules_capacity);
}

inline void check_state(const char* op, const char* name, const Tensor& state,
                        const SamplerLayout& layout) {
  check_rank(op, name, state, 2, "[batch, bytes]");
  check_dtype(op, name, state, ScalarType::Byte);
  if (state.size(1) != layout.size || !state.is_contiguous()) {
    fail(op, name, " has shape ", shape_text(state), "; expected [batch, ", layout.size,
         "], contiguous");
  }
  if (state.size(0) > 0 && reinterpret_cast<uintptr_t>(state.const_data_ptr()) % 8 != 0) {
    fail(op, name, " begins at no multiple of 8 bytes; expected memory of its own");
  }
  if (!state.is_cpu()) return;  // a kernel looks at each row
  char* data = static_cast<char*>(const_cast<void*>(state.const_data_ptr()));
  for (int64_t i = 0; i < state.size(0); ++i) {
    if (!SamplerRowView(data + i * layout.size, layout).fits(layout)) {
      fail(op, name, "[", i, "] is not a row of these sizes; expected one of a Sampler");
    }
  }
}

// ---- steps

constexpr int64_t kAccept = 1, kRawLogProbs = 2, kStageCounts = 4;

// Deals out the results' memory: the largest elements first.
class Results {
 public:
  explicit Results(char* data) : data_(data) {}

  template <class T>
  T* take(int64_t count) {
    T* const begin = data_ == nullptr ? nullptr : reinterpret_cast<T*>(data_ + used_);
    used_ += count * static_cast<int64_t>(sizeof(T));
    return begin;
  }
  int64_t used() const { return used_; }

 private:
  char* const data_;
  int64_t used_ = 0;
};

// Sets the pointers to results, or counts their bytes where data is null.
inline int64_t set_results(char* data, bool stage_counts, SamplerStepParams* p) {
  Results results(data);
  p->index = results.take<int64_t>(p->batch);
  const int64_t best = std::max<int64_t>(p->num_logprobs, 0);
  if (p->num_logprobs >= 0) {
    p->rank = results.take<int64_t>(p->batch);
    p->top_ids = results.take<int64_t>(p->batch * best);
    p->logprob = results.take<float>(p->batch);
    p->top_logprobs = results.take<float>(p->batch * best);
  }
  p->kept_count = results.take<int32_t>(p->batch);
  if (stage_counts) p->stage_counts = results.take<int32_t>(p->batch * kSamplerStages);
  p->status = results.take<uint8_t>(p->batch);
  return results.used();
}

// And on the device of the sampler's rows.
inline void check_contiguous(const char* op, const char* name, const Tensor& tensor,
                             const Tensor& state) {
  check_same_device(op, name, tensor, "state", state);
  if (!tensor.is_contiguous()) fail(op, name, " has strides; expected a contiguous tensor");
}

template <class T>
T* matrix_of(const char* op, const char* name, std::optional<Tensor>& tensor, ScalarType type,
             const Tensor& state, const SamplerStepParams& p) {
  if (!tensor) return nullptr;
  check_dtype(op, name, *tensor, type);
  check_shape(op, name, *tensor, p.batch, p.vocab);
  check_contiguous(op, name, *tensor, state);
  return static_cast<T*>(tensor->mutable_data_ptr());
}

// Everything but the logits.
inline SamplerStepParams step_params(const char* op, Tensor& state, int64_t vocab,
                                     int64_t text_capacity, int64_t rules_capacity, Tensor& results,
                                     int64_t num_logprobs, int64_t flags) {
  SamplerStepParams p;
  p.layout = layout_of(op, vocab, text_capacity, rules_capacity);
  check_state(op, "state", state, p.layout);
  p.state = static_cast<char*>(state.mutable_data_ptr());
  p.batch = state.size(0);
  p.vocab = vocab;
  p.accept = (flags & kAccept) != 0;
  p.raw_log_probs = (flags & kRawLogProbs) != 0;
  const int64_t most = state.is_cpu() || vocab < kMostCudaLogProbs ? vocab : kMostCudaLogProbs;
  if (num_logprobs < -1 || num_logprobs > most) {
    fail(op, "num_logprobs is ", num_logprobs, "; expected -1 to ", most);
  }
  p.num_logprobs = num_logprobs;
  check_rank(op, "results", results, 1, "[bytes]");
  check_dtype(op, "results", results, ScalarType::Byte);
  const bool counts = (flags & kStageCounts) != 0;
  SamplerStepParams sizes = p;
  check_shape(op, "results", results, set_results(nullptr, counts, &sizes));
  check_contiguous(op, "results", results, state);
  set_results(static_cast<char*>(results.mutable_data_ptr()), counts, &p);
  return p;
}

inline void check_vocab(const char* op, const Tensor& logits, int64_t size, int64_t vocab) {
  if (size != vocab) {
    fail(op, "logits has shape ", shape_text(logits), "; expected a vocabulary of ", vocab);
  }
}

inline void check_bitmask(const char* op, const Tensor& bitmask, const Tensor& state,
                          int64_t dimensions, int64_t words) {
  check_dtype(op, "bitmask", bitmask, ScalarType::Int);
  check_same_device(op, "bitmask", bitmask, "state", state);
  if (bitmask.dim() != dimensions) {
    fail(op, "bitmask has shape ", shape_text(bitmask), "; expected ", dimensions, " dimensions");
  }
  if (bitmask.stride(dimensions - 1) != 1 && words > 1) {
    fail(op, "bitmask has strides within a row; expected its words side by side");
  }
}

// On the CPU alone: on a GPU the kernel refuses a row without room.
inline void check_room(const char* op, const Tensor& state, const SamplerStepParams& p,
                       int64_t tokens) {
  if (!p.accept || !state.is_cpu()) return;
  for (int64_t i = 0; i < p.batch; ++i) {
    const auto* row = reinterpret_cast<const SamplerRow*>(p.state + i * p.layout.size);
    if (row->active == 0 || row->integers.keeps_text == 0) continue;
    if (row->length + tokens > p.layout.text_capacity) {
      fail(op, "state[", i, "] has ", row->length, " tokens of text; expected room for ", tokens,
           " more of ", p.layout.text_capacity);
    }
  }
}

template <void (*run)(const SamplerStepParams&, const Tensor& state), class Guard>
void step(Tensor state, const Tensor& logits, const std::optional<Tensor>& bitmask, Tensor results,
          std::optional<Tensor> kept_logits, std::optional<Tensor> kept_ids,
          std::optional<Tensor> kept_logprobs, int64_t vocab, int64_t text_capacity,
          int64_t rules_capacity, int64_t num_logprobs, int64_t flags) {
  check_rank(kStepOp, "logits", logits, 2, "[batch, vocab]");
  check_same_device(kStepOp, "logits", logits, "state", state);
  SamplerStepParams p = step_params(kStepOp, state, vocab, text_capacity, rules_capacity, results,
                                    num_logprobs, flags);
  p.dtype = float_dtype(kStepOp, "logits", logits);
  check_vocab(kStepOp, logits, logits.size(1), vocab);
  check_shape(kStepOp, "logits", logits, p.batch, vocab);
  p.logits = logits.const_data_ptr();
  p.logits_row_stride = logits.stride(0);
  p.logits_vocab_stride = logits.stride(1);
  if (bitmask) {
    const int64_t words = (vocab + 31) / 32;
    check_bitmask(kStepOp, *bitmask, state, 2, words);
    check_shape(kStepOp, "bitmask", *bitmask, p.batch, words);
    p.bitmask = static_cast<const int32_t*>(bitmask->const_data_ptr());
    p.bitmask_row_stride = bitmask->stride(0);
  }
  p.kept_logits =
      matrix_of<float>(kStepOp, "kept_logits", kept_logits, ScalarType::Float, state, p);
  p.kept_ids = matrix_of<int64_t>(kStepOp, "kept_ids", kept_ids, ScalarType::Long, state, p);
  p.kept_logprobs =
      matrix_of<float>(kStepOp, "kept_logprobs", kept_logprobs, ScalarType::Float, state, p);
  if ((p.kept_ids == nullptr) != (p.kept_logprobs == nullptr)) {
    fail(kStepOp, "kept_ids or kept_logprobs is None; expected both or none");
  }
  check_room(kStepOp, state, p, 1);
  const Guard guard(state);
  run(p, state);
}

template <void (*run)(const SamplerVerifyParams&, const Tensor& state), class Guard>
void verify(Tensor state, const Tensor& logits, const std::optional<Tensor>& bitmask,
            const Tensor& draft, const std::optional<Tensor>& parents,
            const std::optional<Tensor>& num_draft, const std::optional<Tensor>& draft_logits,
            Tensor results, Tensor tokens, Tensor path, Tensor num_accepted, int64_t vocab,
            int64_t text_capacity, int64_t rules_capacity, bool rejection) {
  SamplerVerifyParams v;
  check_rank(kVerifyOp, "logits", logits, 3, "[batch, drafts + 1, vocab]");
  check_same_device(kVerifyOp, "logits", logits, "state", state);
  v.step =
      step_params(kVerifyOp, state, vocab, text_capacity, rules_capacity, results, -1, kAccept);
  const int64_t batch = v.step.batch;
  check_rank(kVerifyOp, "draft", draft, 2, "[batch, drafts]");
  check_dtype(kVerifyOp, "draft", draft, ScalarType::Long);
  v.drafts = draft.size(1);
  check_shape(kVerifyOp, "draft", draft, batch, v.drafts);
  v.step.dtype = float_dtype(kVerifyOp, "logits", logits);
  check_vocab(kVerifyOp, logits, logits.size(2), vocab);
  if (logits.size(0) != batch || logits.size(1) != v.drafts + 1) {
    fail(kVerifyOp, "logits has shape ", shape_text(logits), "; expected [", batch, ", ",
         v.drafts + 1, ", ", vocab, "]");
  }
  v.step.logits = logits.const_data_ptr();
  v.step.logits_row_stride = logits.stride(0);
  v.logits_draft_stride = logits.stride(1);
  v.step.logits_vocab_stride = logits.stride(2);
  const auto contiguous = [&](const char* name, const Tensor& tensor) {
    check_contiguous(kVerifyOp, name, tensor, state);
  };
  contiguous("draft", draft);
  v.draft = static_cast<const int64_t*>(draft.const_data_ptr());
  const auto rows_of = [&](const char* name, const Tensor& tensor, int64_t columns) {
    check_dtype(kVerifyOp, name, tensor, ScalarType::Long);
    check_shape(kVerifyOp, name, tensor, batch, columns);
    contiguous(name, tensor);
  };
  if (parents) {
    rows_of("parents", *parents, v.drafts);
    v.parents = static_cast<const int64_t*>(parents->const_data_ptr());
    // On a GPU, one that is no draft before it is no parent.
    for (int64_t i = 0; state.is_cpu() && i < batch * v.drafts; ++i) {
      const int64_t most = i % v.drafts - 1;
      if (v.parents[i] >= -1 && v.parents[i] <= most) continue;
      fail(kVerifyOp, "parents[", i / v.drafts, ", ", i % v.drafts, "] is ", v.parents[i],
           "; expected -1 to ", most);
    }
    if (rejection) fail(kVerifyOp, "mode is rejection with parents; expected match, or no parents");
  }
  if (num_draft) {
    rows_of("num_draft", *num_draft, -1);
    v.num_draft = static_cast<const int64_t*>(num_draft->const_data_ptr());
    // On a GPU the kernel refuses the row.
    for (int64_t i = 0; state.is_cpu() && i < batch; ++i) {
      if (v.num_draft[i] >= 0 && v.num_draft[i] <= v.drafts) continue;
      fail(kVerifyOp, "num_draft[", i, "] is ", v.num_draft[i], "; expected 0 to ", v.drafts);
    }
  }
  v.rejection = rejection;
  if (draft_logits) {
    if (!rejection) fail(kVerifyOp, "draft_logits is given with mode match; expected None");
    check_rank(kVerifyOp, "draft_logits", *draft_logits, 3, "[batch, drafts, vocab]");
    check_dtype(kVerifyOp, "draft_logits", *draft_logits, ScalarType::Float);
    if (draft_logits->size(0) != batch || draft_logits->size(1) != v.drafts ||
        draft_logits->size(2) != vocab) {
      fail(kVerifyOp, "draft_logits has shape ", shape_text(*draft_logits), "; expected [", batch,
           ", ", v.drafts, ", ", vocab, "]");
    }
    contiguous("draft_logits", *draft_logits);
    v.draft_logits = static_cast<const float*>(draft_logits->const_data_ptr());
  }
  if (bitmask) {
    const int64_t words = (vocab + 31) / 32;
    check_bitmask(kVerifyOp, *bitmask, state, 3, words);
    if (bitmask->size(0) != batch || bitmask->size(1) != v.drafts + 1 ||
        bitmask->size(2) != words) {
      fail(kVerifyOp, "bitmask has shape ", shape_text(*bitmask), "; expected [", batch, ", ",
           v.drafts + 1, ", ", words, "]");
    }
    v.step.bitmask = static_cast<const int32_t*>(bitmask->const_data_ptr());
    v.step.bitmask_row_stride = bitmask->stride(0);
    v.bitmask_draft_stride = bitmask->stride(1);
  }
  rows_of("tokens", tokens, v.drafts + 1);
  rows_of("path", path, v.drafts);
  rows_of("num_accepted", num_accepted, -1);
  v.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  v.path = static_cast<int64_t*>(path.mutable_data_ptr());
  v.num_accepted = static_cast<int64_t*>(num_accepted.mutable_data_ptr());
  check_room(kVerifyOp, state, v.step, v.drafts + 1);
  const Guard guard(state);
  run(v, state);
}

}  // namespace lmdecode::sampling
