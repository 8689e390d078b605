// The ops of lmdecode.Sampler, on CPU tensors alone.
#include <algorithm>

#include "bindings/tensor_checks.h"
#include "common/bits.h"
#include "sampling/sampler_step.h"
#include "sampling/sampler_verify.h"

namespace lmdecode::sampling {
namespace {

// Errors name what users call, where they do.
constexpr const char* kStepOp = "Sampler.sample";
constexpr const char* kVerifyOp = "verify_draft";
constexpr const char* kInsertOp = "Sampler.insert";
constexpr const char* kAcceptOp = "Sampler.accept";
constexpr const char* kRewindOp = "Sampler.rewind";
constexpr const char* kCopyOp = "sampler_copy_";

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1;

// sizes: vocab, text_capacity, rules_capacity.
SamplerLayout layout_of(const char* op, int64_t vocab, int64_t text_capacity,
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

void check_state(const char* op, const char* name, const Tensor& state,
                 const SamplerLayout& layout) {
  check_rank(op, name, state, 2, "[batch, bytes]");
  check_dtype(op, name, state, ScalarType::Byte);
  if (state.size(1) != layout.size || !state.is_contiguous()) {
    fail(op, name, " has shape ", shape_text(state), "; expected [batch, ", layout.size,
         "], contiguous");
  }
  const char* data = static_cast<const char*>(state.const_data_ptr());
  if (state.size(0) > 0 && reinterpret_cast<uintptr_t>(data) % 8 != 0) {
    fail(op, name, " begins at no multiple of 8 bytes; expected memory of its own");
  }
  for (int64_t i = 0; i < state.size(0); ++i) {
    const auto* row = reinterpret_cast<const SamplerRow*>(data + i * layout.size);
    const bool fits = row->active == 0 ||
                      (row->vocab == layout.vocab && row->text_capacity == layout.text_capacity &&
                       row->rules_capacity == layout.rules_capacity && row->length >= 0 &&
                       row->length <= layout.text_capacity && row->touched >= 0 &&
                       row->touched <= layout.touched_capacity && row->rules_size >= 0 &&
                       row->rules_size <= layout.rules_capacity && row->integers.order >= 0 &&
                       row->integers.order < kSamplerOrderCount);
    if (!fits)
      fail(op, name, "[", i, "] is not a row of these sizes; expected one of sampler_insert_");
  }
}

char* row_of(const char* op, Tensor& state, const SamplerLayout& layout, int64_t row) {
  if (row < 0 || row >= state.size(0)) {
    fail(op, "row is ", row, "; expected 0 to ", state.size(0) - 1);
  }
  return static_cast<char*>(state.mutable_data_ptr()) + row * layout.size;
}

SamplerRow& active_row(const char* op, char* memory, int64_t row) {
  auto* data = reinterpret_cast<SamplerRow*>(memory);
  if (data->active == 0) fail(op, "row ", row, " has no sequence; expected one of sampler_insert_");
  return *data;
}

template <class T>
const T* vector_of(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                   int64_t size) {
  check_rank(op, name, tensor, 1, "[n]");
  check_dtype(op, name, tensor, type);
  if (size >= 0) check_shape(op, name, tensor, size);
  if (!tensor.is_contiguous()) fail(op, name, " has strides; expected a contiguous tensor");
  if (!tensor.is_cpu()) fail(op, name, " is on ", device_name(tensor), "; expected the cpu");
  return static_cast<const T*>(tensor.const_data_ptr());
}

int64_t row_bytes(int64_t vocab, int64_t text_capacity, int64_t rules_capacity) {
  return layout_of("sampler_row_bytes", vocab, text_capacity, rules_capacity).size;
}

void insert(Tensor state, int64_t vocab, int64_t text_capacity, int64_t rules_capacity, int64_t row,
            const Tensor& integers, const Tensor& numbers, const Tensor& rules,
            const Tensor& prompt) {
  SamplerInsertParams p;
  p.layout = layout_of(kInsertOp, vocab, text_capacity, rules_capacity);
  check_state(kInsertOp, "state", state, p.layout);
  p.row = row_of(kInsertOp, state, p.layout, row);
  const auto* ints =
      vector_of<int64_t>(kInsertOp, "integers", integers, ScalarType::Long, kSamplerIntegers);
  std::copy_n(ints, kSamplerIntegers, reinterpret_cast<int64_t*>(&p.integers));
  const auto* doubles =
      vector_of<double>(kInsertOp, "numbers", numbers, ScalarType::Double, kSamplerNumbers);
  std::copy_n(doubles, kSamplerNumbers, reinterpret_cast<double*>(&p.numbers));
  p.rules = vector_of<int32_t>(kInsertOp, "rules", rules, ScalarType::Int, -1);
  p.rules_size = rules.size(0);
  p.prompt = vector_of<int64_t>(kInsertOp, "prompt", prompt, ScalarType::Long, -1);
  p.prompt_length = prompt.size(0);
  if (p.integers.order < 0 || p.integers.order >= kSamplerOrderCount) {
    fail(kInsertOp, "integers[0], the order, is ", p.integers.order, "; expected 0 to ",
         kSamplerOrderCount - 1);
  }
  if (p.rules_size > rules_capacity) {
    fail(kInsertOp, "rules has ", p.rules_size, " numbers; expected at most ", rules_capacity);
  }
  if (const char* wrong = wrong_rules(p.rules, p.rules_size, vocab)) {
    fail(kInsertOp, "rules is not what it should be: ", wrong);
  }
  if (p.integers.keeps_text != 0) {
    if (p.prompt_length > text_capacity) {
      fail(kInsertOp, "prompt has ", p.prompt_length, " tokens; expected at most ", text_capacity);
    }
    for (int64_t i = 0; i < p.prompt_length; ++i) {
      if (p.prompt[i] < INT32_MIN || p.prompt[i] > INT32_MAX) {
        fail(kInsertOp, "prompt[", i, "] is ", p.prompt[i], "; expected a number of 32 bits");
      }
    }
  }
  sampler_insert_cpu(p);
}

void accept(Tensor state, int64_t vocab, int64_t text_capacity, int64_t rules_capacity, int64_t row,
            const Tensor& tokens) {
  const SamplerLayout layout = layout_of(kAcceptOp, vocab, text_capacity, rules_capacity);
  check_state(kAcceptOp, "state", state, layout);
  char* memory = row_of(kAcceptOp, state, layout, row);
  const SamplerRow& data = active_row(kAcceptOp, memory, row);
  const auto* ids = vector_of<int64_t>(kAcceptOp, "tokens", tokens, ScalarType::Long, -1);
  const int64_t count = tokens.size(0);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      fail(kAcceptOp, "tokens[", i, "] is ", ids[i], "; expected 0 to ", vocab - 1);
    }
  }
  if (data.integers.keeps_text != 0 && data.length + count > text_capacity) {
    fail(kAcceptOp, "tokens are ", count, " behind ", data.length, "; expected at most ",
         text_capacity, " in all");
  }
  SamplerRowView view(memory, layout);
  for (int64_t i = 0; i < count; ++i) view.accept(ids[i]);
}

void rewind(Tensor state, int64_t vocab, int64_t text_capacity, int64_t rules_capacity, int64_t row,
            int64_t count) {
  const SamplerLayout layout = layout_of(kRewindOp, vocab, text_capacity, rules_capacity);
  check_state(kRewindOp, "state", state, layout);
  char* memory = row_of(kRewindOp, state, layout, row);
  const SamplerRow& data = active_row(kRewindOp, memory, row);
  if (count < 0 || count > data.output_length) {
    fail(kRewindOp, "n is ", count, "; expected 0 to ", data.output_length,
         ", the tokens that were accepted");
  }
  SamplerRowView(memory, layout).rewind(count);
}

void copy(Tensor to, int64_t text_capacity, int64_t rules_capacity, const Tensor& from,
          int64_t from_text_capacity, int64_t from_rules_capacity, int64_t vocab) {
  const SamplerLayout target = layout_of(kCopyOp, vocab, text_capacity, rules_capacity);
  const SamplerLayout source = layout_of(kCopyOp, vocab, from_text_capacity, from_rules_capacity);
  check_state(kCopyOp, "from", from, source);
  check_rank(kCopyOp, "to", to, 2, "[batch, bytes]");
  check_dtype(kCopyOp, "to", to, ScalarType::Byte);
  check_shape(kCopyOp, "to", to, from.size(0), target.size);
  if (!to.is_contiguous()) fail(kCopyOp, "to has strides; expected a contiguous tensor");
  if (target.text_capacity < source.text_capacity ||
      target.rules_capacity < source.rules_capacity) {
    fail(kCopyOp, "text_capacity and rules_capacity are ", text_capacity, " and ", rules_capacity,
         "; expected at least those of from, ", from_text_capacity, " and ", from_rules_capacity);
  }
  char* out = static_cast<char*>(to.mutable_data_ptr());
  const char* in = static_cast<const char*>(from.const_data_ptr());
  for (int64_t row = 0; row < from.size(0); ++row) {
    if (const char* wrong = wrong_row(in + row * source.size, source)) {
      fail(kCopyOp, "from[", row, "] is no row of a sampler: ", wrong);
    }
  }
  for (int64_t row = 0; row < from.size(0); ++row, out += target.size, in += source.size) {
    if (reinterpret_cast<const SamplerRow*>(in)->active == 0) {
      reinterpret_cast<SamplerRow*>(out)->active = 0;
    } else {
      sampler_copy_row_cpu(in, source, out, target);
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
int64_t set_results(char* data, bool stage_counts, SamplerStepParams* p) {
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

template <class T>
T* matrix_of(const char* op, const char* name, std::optional<Tensor>& tensor, ScalarType type,
             const SamplerStepParams& p) {
  if (!tensor) return nullptr;
  check_dtype(op, name, *tensor, type);
  check_shape(op, name, *tensor, p.batch, p.vocab);
  if (!tensor->is_contiguous() || !tensor->is_cpu()) {
    fail(op, name, " has strides or is on a device; expected a contiguous tensor on the cpu");
  }
  return static_cast<T*>(tensor->mutable_data_ptr());
}

// Everything but the logits.
SamplerStepParams step_params(const char* op, Tensor& state, int64_t vocab, int64_t text_capacity,
                              int64_t rules_capacity, Tensor& results, int64_t num_logprobs,
                              int64_t flags) {
  SamplerStepParams p;
  p.layout = layout_of(op, vocab, text_capacity, rules_capacity);
  check_state(op, "state", state, p.layout);
  p.state = static_cast<char*>(state.mutable_data_ptr());
  p.batch = state.size(0);
  p.vocab = vocab;
  p.accept = (flags & kAccept) != 0;
  p.raw_log_probs = (flags & kRawLogProbs) != 0;
  if (num_logprobs < -1 || num_logprobs > vocab) {
    fail(op, "num_logprobs is ", num_logprobs, "; expected -1 to ", vocab);
  }
  p.num_logprobs = num_logprobs;
  check_rank(op, "results", results, 1, "[bytes]");
  check_dtype(op, "results", results, ScalarType::Byte);
  const bool counts = (flags & kStageCounts) != 0;
  SamplerStepParams sizes = p;
  check_shape(op, "results", results, set_results(nullptr, counts, &sizes));
  if (!results.is_contiguous() || !results.is_cpu()) {
    fail(op, "results has strides or is on a device; expected a contiguous tensor on the cpu");
  }
  set_results(static_cast<char*>(results.mutable_data_ptr()), counts, &p);
  return p;
}

void check_vocab(const char* op, const Tensor& logits, int64_t size, int64_t vocab) {
  if (size != vocab) {
    fail(op, "logits has shape ", shape_text(logits), "; expected a vocabulary of ", vocab);
  }
}

void check_bitmask(const char* op, const Tensor& bitmask, int64_t dimensions, int64_t words) {
  check_dtype(op, "bitmask", bitmask, ScalarType::Int);
  if (!bitmask.is_cpu()) fail(op, "bitmask is on ", device_name(bitmask), "; expected the cpu");
  if (bitmask.dim() != dimensions) {
    fail(op, "bitmask has shape ", shape_text(bitmask), "; expected ", dimensions, " dimensions");
  }
  if (bitmask.stride(dimensions - 1) != 1 && words > 1) {
    fail(op, "bitmask has strides within a row; expected its words side by side");
  }
}

void check_room(const char* op, const SamplerStepParams& p, int64_t tokens) {
  if (!p.accept) return;
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
  check_rank(kStepOp, "logits", logits, 2, "[batch, vocab]");
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
    check_bitmask(kStepOp, *bitmask, 2, words);
    check_shape(kStepOp, "bitmask", *bitmask, p.batch, words);
    p.bitmask = static_cast<const int32_t*>(bitmask->const_data_ptr());
    p.bitmask_row_stride = bitmask->stride(0);
  }
  p.kept_logits = matrix_of<float>(kStepOp, "kept_logits", kept_logits, ScalarType::Float, p);
  p.kept_ids = matrix_of<int64_t>(kStepOp, "kept_ids", kept_ids, ScalarType::Long, p);
  p.kept_logprobs = matrix_of<float>(kStepOp, "kept_logprobs", kept_logprobs, ScalarType::Float, p);
  if ((p.kept_ids == nullptr) != (p.kept_logprobs == nullptr)) {
    fail(kStepOp, "kept_ids or kept_logprobs is None; expected both or none");
  }
  check_room(kStepOp, p, 1);
  sampler_step_cpu(p);
}

void verify(Tensor state, const Tensor& logits, const std::optional<Tensor>& bitmask,
            const Tensor& draft, const std::optional<Tensor>& parents,
            const std::optional<Tensor>& num_draft, const std::optional<Tensor>& draft_logits,
            Tensor results, Tensor tokens, Tensor path, Tensor num_accepted, int64_t vocab,
            int64_t text_capacity, int64_t rules_capacity, bool rejection) {
  SamplerVerifyParams v;
  check_rank(kVerifyOp, "logits", logits, 3, "[batch, drafts + 1, vocab]");
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
    if (!tensor.is_contiguous() || !tensor.is_cpu()) {
      fail(kVerifyOp, name, " has strides or is on a device; expected a contiguous cpu tensor");
    }
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
    for (int64_t i = 0; i < batch * v.drafts; ++i) {
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
    for (int64_t i = 0; i < batch; ++i) {
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
    check_bitmask(kVerifyOp, *bitmask, 3, words);
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
  check_room(kVerifyOp, v.step, v.drafts + 1);
  sampler_verify_cpu(v);
}

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("sampler_insert_", TORCH_BOX(&lmdecode::sampling::insert));
  m.impl("sampler_accept_", TORCH_BOX(&lmdecode::sampling::accept));
  m.impl("sampler_rewind_", TORCH_BOX(&lmdecode::sampling::rewind));
  m.impl("sampler_copy_", TORCH_BOX(&lmdecode::sampling::copy));
  m.impl("sampler_step_", TORCH_BOX(&lmdecode::sampling::step));
  m.impl("sampler_verify_", TORCH_BOX(&lmdecode::sampling::verify));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("sampler_row_bytes", TORCH_BOX(&lmdecode::sampling::row_bytes));
}
