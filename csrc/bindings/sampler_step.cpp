// A step of a Sampler, and its verification of drafts, on either device. Errors name what users
// call.
#include "sampling/sampler_step.h"

#include <algorithm>

#include "bindings/device.h"
#include "bindings/sampler_checks.h"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling {
namespace {

// Deals out the results' memory, the largest elements first; returns its bytes. Null data: no more.
int64_t set_results(char* data, bool stage_counts, SamplerStepParams* p) {
  int64_t used = 0;
  const auto take = [&]<class T>(T** results, int64_t count) {
    if (data != nullptr) *results = reinterpret_cast<T*>(data + used);
    used += count * static_cast<int64_t>(sizeof(T));
  };
  const int64_t best = std::max<int64_t>(p->num_logprobs, 0);
  take(&p->index, p->batch);
  if (p->num_logprobs >= 0) {
    take(&p->rank, p->batch);
    take(&p->top_ids, p->batch * best);
    take(&p->logprob, p->batch);
    take(&p->top_logprobs, p->batch * best);
  }
  take(&p->kept_count, p->batch);
  if (stage_counts) take(&p->stage_counts, p->batch * kSamplerStages);
  take(&p->status, p->batch);
  return used;
}

// Everything but the logits.
SamplerStepParams step_params(const Arguments& arguments, Tensor& state, int64_t vocab,
                              int64_t text_capacity, int64_t rules_capacity, Tensor& results,
                              int64_t num_logprobs, int64_t flags) {
  const char* const op = arguments.op();
  SamplerStepParams p;
  p.layout = layout_of(op, vocab, text_capacity, rules_capacity);
  check_state(op, "state", state, p.layout);
  p.state = static_cast<char*>(state.mutable_data_ptr());
  p.batch = state.size(0);
  p.vocab = vocab;
  p.accept = (flags & kAccept) != 0;
  p.raw_log_probs = (flags & kRawLogProbs) != 0;
  const int64_t most = !kIsCuda || vocab < kMostCudaLogProbs ? vocab : kMostCudaLogProbs;
  if (num_logprobs < -1 || num_logprobs > most) {
    fail(op, "num_logprobs is ", num_logprobs, "; expected -1 to ", most);
  }
  p.num_logprobs = num_logprobs;
  const bool counts = (flags & kStageCounts) != 0;
  auto* const data =
      arguments.contiguous<uint8_t>("results", results, {set_results(nullptr, counts, &p)});
  set_results(reinterpret_cast<char*>(data), counts, &p);
  return p;
}

void check_vocab(const char* op, const Tensor& logits, int64_t size, int64_t vocab) {
  if (size != vocab) {
    fail(op, "logits has shape ", shape_text(logits), "; expected a vocabulary of ", vocab);
  }
}

// sizes: the last are the words of a row.
const int32_t* bitmask_of(const Arguments& arguments, const Tensor& bitmask,
                          Arguments::Sizes sizes) {
  if (bitmask.dim() != static_cast<int64_t>(sizes.size())) {
    fail(arguments.op(), "bitmask has shape ", shape_text(bitmask), "; expected ", sizes.size(),
         " dimensions");
  }
  const auto* const words = arguments.strided<const int32_t>("bitmask", bitmask, sizes);
  const int64_t last = bitmask.dim() - 1;
  if (bitmask.stride(last) != 1 && bitmask.size(last) > 1) {
    fail(arguments.op(), "bitmask has strides within a row; expected its words side by side");
  }
  return words;
}

// On the CPU alone: on a GPU the kernel refuses a row without room.
void check_room(const char* op, const SamplerStepParams& p, int64_t tokens) {
  if (!p.accept || kIsCuda) return;
  for (int64_t i = 0; i < p.batch; ++i) {
    const auto* row = reinterpret_cast<const SamplerRow*>(p.state + i * p.layout.size);
    if (row->active == 0 || row->integers.keeps_text == 0) continue;
    if (row->length + tokens > p.layout.text_capacity) {
      fail(op, "state[", i, "] has ", row->length, " tokens of text; expected room for ", tokens,
           " more of ", p.layout.text_capacity);
    }
  }
}

void step(Tensor state, const Tensor& logits, const std::optional<Tensor>& bitmask, Tensor results,
          std::optional<Tensor> kept_logits, std::optional<Tensor> kept_ids,
          std::optional<Tensor> kept_logprobs, int64_t vocab, int64_t text_capacity,
          int64_t rules_capacity, int64_t num_logprobs, int64_t flags) {
  const Arguments arguments("Sampler.sample", "state", state);
  const char* const op = arguments.op();
  check_rank(op, "logits", logits, 2, "[batch, vocab]");
  arguments.check_device("logits", logits);
  SamplerStepParams p = step_params(arguments, state, vocab, text_capacity, rules_capacity, results,
                                    num_logprobs, flags);
  p.dtype = float_dtype(op, "logits", logits);
  check_vocab(op, logits, logits.size(1), vocab);
  arguments.check_sizes("logits", logits, {p.batch, vocab});
  p.logits = logits.const_data_ptr();
  p.logits_row_stride = logits.stride(0);
  p.logits_vocab_stride = logits.stride(1);
  if (bitmask) {
    p.bitmask = bitmask_of(arguments, *bitmask, {p.batch, (vocab + 31) / 32});
    p.bitmask_row_stride = bitmask->stride(0);
  }
  p.kept_logits = arguments.contiguous<float>("kept_logits", kept_logits, {p.batch, vocab});
  p.kept_ids = arguments.contiguous<int64_t>("kept_ids", kept_ids, {p.batch, vocab});
  p.kept_logprobs = arguments.contiguous<float>("kept_logprobs", kept_logprobs, {p.batch, vocab});
  if ((p.kept_ids == nullptr) != (p.kept_logprobs == nullptr)) {
    fail(op, "kept_ids or kept_logprobs is None; expected both or none");
  }
  check_room(op, p, 1);
  const OnDevice device(state);
  if constexpr (kIsCuda) {
    // Memory of torch's: a CUDA graph captures it.
    Tensor scratch = new_tensor(state, {sampler_cuda_scratch_bytes(p)}, ScalarType::Byte);
    sampler_step_cuda(p, scratch.mutable_data_ptr(), device.stream());
  } else {
    sampler_step_cpu(p);
  }
}

void verify(Tensor state, const Tensor& logits, const std::optional<Tensor>& bitmask,
            const Tensor& draft, const std::optional<Tensor>& parents,
            const std::optional<Tensor>& num_draft, const std::optional<Tensor>& draft_logits,
            Tensor results, Tensor tokens, Tensor path, Tensor num_accepted, int64_t vocab,
            int64_t text_capacity, int64_t rules_capacity, bool rejection) {
  const Arguments arguments("verify_draft", "state", state);
  const char* const op = arguments.op();
  SamplerVerifyParams v;
  check_rank(op, "logits", logits, 3, "[batch, drafts + 1, vocab]");
  arguments.check_device("logits", logits);
  v.step =
      step_params(arguments, state, vocab, text_capacity, rules_capacity, results, -1, kAccept);
  const int64_t batch = v.step.batch;
  check_rank(op, "draft", draft, 2, "[batch, drafts]");
  v.drafts = draft.size(1);
  v.draft = arguments.contiguous<const int64_t>("draft", draft, {batch, v.drafts});
  v.step.dtype = float_dtype(op, "logits", logits);
  check_vocab(op, logits, logits.size(2), vocab);
  arguments.check_sizes("logits", logits, {batch, v.drafts + 1, vocab});
  v.step.logits = logits.const_data_ptr();
  v.step.logits_row_stride = logits.stride(0);
  v.logits_draft_stride = logits.stride(1);
  v.step.logits_vocab_stride = logits.stride(2);
  v.parents = arguments.contiguous<const int64_t>("parents", parents, {batch, v.drafts});
  if (parents) {
    // On a GPU, one that is no draft before it is no parent.
    for (int64_t i = 0; !kIsCuda && i < batch * v.drafts; ++i) {
      const int64_t most = i % v.drafts - 1;
      if (v.parents[i] >= -1 && v.parents[i] <= most) continue;
      fail(op, "parents[", i / v.drafts, ", ", i % v.drafts, "] is ", v.parents[i],
           "; expected -1 to ", most);
    }
    if (rejection) fail(op, "mode is rejection with parents; expected match, or no parents");
  }
  v.num_draft = arguments.contiguous<const int64_t>("num_draft", num_draft, {batch});
  // On a GPU the kernel refuses the row.
  for (int64_t i = 0; num_draft && !kIsCuda && i < batch; ++i) {
    if (v.num_draft[i] >= 0 && v.num_draft[i] <= v.drafts) continue;
    fail(op, "num_draft[", i, "] is ", v.num_draft[i], "; expected 0 to ", v.drafts);
  }
  v.rejection = rejection;
  if (draft_logits && !rejection) {
    fail(op, "draft_logits is given with mode match; expected None");
  }
  v.draft_logits =
      arguments.contiguous<const float>("draft_logits", draft_logits, {batch, v.drafts, vocab});
  if (bitmask) {
    v.step.bitmask = bitmask_of(arguments, *bitmask, {batch, v.drafts + 1, (vocab + 31) / 32});
    v.step.bitmask_row_stride = bitmask->stride(0);
    v.bitmask_draft_stride = bitmask->stride(1);
  }
  v.tokens = arguments.contiguous<int64_t>("tokens", tokens, {batch, v.drafts + 1});
  v.path = arguments.contiguous<int64_t>("path", path, {batch, v.drafts});
  v.num_accepted = arguments.contiguous<int64_t>("num_accepted", num_accepted, {batch});
  check_room(op, v.step, v.drafts + 1);
  const OnDevice device(state);
  if constexpr (kIsCuda) {
    Tensor scratch = new_tensor(state, {sampler_cuda_scratch_bytes(v.step)}, ScalarType::Byte);
    sampler_verify_cuda(v, scratch.mutable_data_ptr(), device.stream());
  } else {
    sampler_verify_cpu(v);
  }
}

}  // namespace

#if !defined(USE_CUDA)  // for causal_steps_, of the CPU
SamplerStepParams drawing_rows(const Arguments& arguments, Tensor state, int64_t vocab,
                               int64_t text_capacity, int64_t rules_capacity, Tensor results,
                               int64_t steps) {
  SamplerStepParams p =
      step_params(arguments, state, vocab, text_capacity, rules_capacity, results, -1, kAccept);
  check_room(arguments.op(), p, steps);
  p.dtype = DType::kFloat32;
  p.logits_row_stride = vocab;
  p.logits_vocab_stride = 1;
  return p;
}
#endif

}  // namespace lmdecode::sampling

LMD_OPS(m) {
  m.impl("sampler_step_", TORCH_BOX(&lmdecode::sampling::step));
  m.impl("sampler_verify_", TORCH_BOX(&lmdecode::sampling::verify));
}
