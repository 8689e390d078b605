// The ops of lmdecode.Sampler that make and change rows, on CPU tensors alone. Errors name what
// users call.
#include <algorithm>
#include <tuple>

#include "bindings/sampler_checks.h"
#include "sampling/sampler_step.h"

namespace lmdecode::sampling {
namespace {

constexpr const char* kInsertOp = "Sampler.insert";
constexpr const char* kAcceptOp = "Sampler.accept";
constexpr const char* kRewindOp = "Sampler.rewind";
constexpr const char* kCopyOp = "Sampler.load_state_dict";

char* row_of(const char* op, Tensor& state, const SamplerLayout& layout, int64_t row) {
  if (row < 0 || row >= state.size(0)) {
    fail(op, "row is ", row, "; expected 0 to ", state.size(0) - 1);
  }
  return static_cast<char*>(state.mutable_data_ptr()) + row * layout.size;
}

SamplerRow& active_row(const char* op, char* memory, int64_t row) {
  auto* data = reinterpret_cast<SamplerRow*>(memory);
  if (data->active == 0)
    fail(op, "row ", row, " has no sequence; expected one that insert() began");
  return *data;
}

int64_t row_bytes(int64_t vocab, int64_t text_capacity, int64_t rules_capacity) {
  return layout_of("sampler_row_bytes", vocab, text_capacity, rules_capacity).size;
}

// What the schema names: places among the 64-bit numbers of a row, and the flags of a step.
auto places_and_flags() {
  const SamplerRow row{};
  const auto* const first = reinterpret_cast<const int64_t*>(&row);
  const auto place = [&](auto& field) { return reinterpret_cast<const int64_t*>(&field) - first; };
  return std::make_tuple(place(row.active), place(row.length), place(row.output_length),
                         place(row.mu), place(row.integers), place(row.integers.seed),
                         place(row.integers.keeps_text), place(row.numbers), kAccept, kRawLogProbs,
                         kStageCounts);
}

void insert(Tensor state, int64_t vocab, int64_t text_capacity, int64_t rules_capacity, int64_t row,
            const Tensor& integers, const Tensor& numbers, const Tensor& rules,
            const Tensor& prompt) {
  SamplerInsertParams p;
  p.layout = layout_of(kInsertOp, vocab, text_capacity, rules_capacity);
  check_state(kInsertOp, "state", state, p.layout);
  p.row = row_of(kInsertOp, state, p.layout, row);
  const Arguments arguments(kInsertOp);
  const auto* ints = arguments.contiguous<const int64_t>("integers", integers, {kSamplerIntegers});
  std::copy_n(ints, kSamplerIntegers, reinterpret_cast<int64_t*>(&p.integers));
  const auto* doubles = arguments.contiguous<const double>("numbers", numbers, {kSamplerNumbers});
  std::copy_n(doubles, kSamplerNumbers, reinterpret_cast<double*>(&p.numbers));
  p.rules = arguments.contiguous<const int32_t>("rules", rules, {-1});
  p.rules_size = rules.size(0);
  p.prompt = arguments.contiguous<const int64_t>("prompt", prompt, {-1});
  p.prompt_length = prompt.size(0);
  if (p.integers.dialect < 0 || p.integers.dialect >= kSamplerDialectCount) {
    fail(kInsertOp, "integers[0], the order, is ", p.integers.dialect, "; expected 0 to ",
         kSamplerDialectCount - 1);
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
  const auto* ids = Arguments(kAcceptOp).contiguous<const int64_t>("tokens", tokens, {-1});
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
  const Arguments arguments(kCopyOp);
  char* out = reinterpret_cast<char*>(
      arguments.contiguous<uint8_t>("to", to, {from.size(0), target.size}, "[batch, bytes]"));
  if (target.text_capacity < source.text_capacity ||
      target.rules_capacity < source.rules_capacity) {
    fail(kCopyOp, "text_capacity and rules_capacity are ", text_capacity, " and ", rules_capacity,
         "; expected at least those of from, ", from_text_capacity, " and ", from_rules_capacity);
  }
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

}  // namespace
}  // namespace lmdecode::sampling

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CPU, m) {
  m.impl("sampler_insert_", TORCH_BOX(&lmdecode::sampling::insert));
  m.impl("sampler_accept_", TORCH_BOX(&lmdecode::sampling::accept));
  m.impl("sampler_rewind_", TORCH_BOX(&lmdecode::sampling::rewind));
  m.impl("sampler_copy_", TORCH_BOX(&lmdecode::sampling::copy));
}

STABLE_TORCH_LIBRARY_IMPL(lmdecode, CompositeExplicitAutograd, m) {
  m.impl("sampler_layout", TORCH_BOX(&lmdecode::sampling::places_and_flags));
  m.impl("sampler_row_bytes", TORCH_BOX(&lmdecode::sampling::row_bytes));
}
