// The rows of a lmdecode.Sampler: parameters and state of a sequence in one block of bytes, so that
// a batch is one tensor [batch, bytes], and a row moves by copying its bytes.
//
// A row is a SamplerRow, then arrays whose sizes its first three fields give. The touched tokens
// may have another logit than the model's: the tokens of the rules, and of the text if penalties
// depend on it. A hash table finds them; a bitmap of the vocabulary tells which tokens are touched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::sampling {

// The system whose order of stages and rules at boundaries a row follows; sampling/sampler_rows.py
// holds the names.
enum class SamplerDialect : int64_t {
  kLmdecode = 0,
  kTransformers = 1,
  kVllm = 2,
  kLlamaCpp = 3,
  kSglang = 4,
};
constexpr int64_t kSamplerDialectCount = 5;

// The parameters of a row, in the order of sampler_rows.py.
struct SamplerIntegers {
  int64_t dialect;
  int64_t seed;  // < 0: no noise
  int64_t top_k;
  int64_t no_repeat_ngram_size;  // 0: off
  int64_t dry_allowed_length;
  int64_t min_tokens;
  int64_t keeps_text;  // penalties and rules look at it, or it must be there to go back
};
constexpr int64_t kSamplerIntegers = sizeof(SamplerIntegers) / sizeof(int64_t);

struct SamplerNumbers {
  double temperature;
  double top_p, min_p;
  double typical_p;                                // >= 1: off
  double epsilon_cutoff, eta_cutoff, top_n_sigma;  // 0: off
  double top_h;                                    // 0: off
  double xtc_probability, xtc_threshold;
  double repetition_penalty;  // 1: off
  double presence_penalty, frequency_penalty;
  double dry_multiplier, dry_base;
  double mirostat_tau, mirostat_eta;  // tau 0: off
  double dynamic_temperature_range, dynamic_temperature_exponent;
  double adaptive_target, adaptive_decay;  // target < 0: off
};
constexpr int64_t kSamplerNumbers = sizeof(SamplerNumbers) / sizeof(double);

struct SamplerRow {
  int64_t vocab, text_capacity, rules_capacity;
  int64_t active;         // 0: no sequence
  int64_t position;       // of the next token: the second part of the noise counter
  int64_t prompt_length;  // tokens of the text that are the prompt's
  int64_t length;         // of the text
  int64_t output_length;  // accepted tokens
  int64_t touched;        // tokens in the table
  int64_t rules_size;
  double mu;  // mirostat's state, or adaptive-p's mean: an f32 value
  SamplerIntegers integers;
  SamplerNumbers numbers;
  int64_t rule_touched;  // number of touched tokens that come from rules; they come first
};

// The rules of a row, int32 numbers: five sizes, then as many of each
//   biases      token, bits of the f32 bias: -inf bans
//   end tokens  token
//   forced      output count, token
//   breakers    token
//   sequences   length >= 2, that many tokens, bits of the f32 bias of the last one
struct SamplerRules {
  const int32_t *biases, *end_tokens, *forced, *breakers, *sequences;
  int64_t bias_count, end_count, forced_count, breaker_count, sequence_count;
};
constexpr int64_t kRuleSizes = 5;

// Offsets of a row's arrays, in bytes.
struct SamplerLayout {
  int64_t vocab, text_capacity, rules_capacity, touched_capacity, slot_bits;
  int64_t text, mu_before, ids, biases, prompt_counts, output_counts, slots, bits, rules, size;

  LMD_HOST_DEVICE static SamplerLayout of(int64_t vocab, int64_t text_capacity,
                                          int64_t rules_capacity) {
    SamplerLayout l{};
    l.vocab = vocab;
    l.text_capacity = text_capacity;
    l.rules_capacity = rules_capacity;
    l.touched_capacity = text_capacity + rules_capacity;
    l.slot_bits = 4;
    while ((int64_t{1} << l.slot_bits) < 2 * l.touched_capacity) ++l.slot_bits;
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t begin = at;
      at += (bytes + 63) / 64 * 64;
      return begin;
    };
    take(sizeof(SamplerRow));
    l.text = take(4 * text_capacity);
    l.mu_before = take(4 * text_capacity);
    const int64_t padded = 4 * (l.touched_capacity + 16);  // whole vectors are read
    l.ids = take(padded);
    l.biases = take(padded);
    l.prompt_counts = take(padded);
    l.output_counts = take(padded);
    l.slots = take(int64_t{4} << l.slot_bits);
    l.bits = take(8 * ((vocab + 63) / 64));
    l.rules = take(4 * rules_capacity);
    l.size = at;
    return l;
  }
};

// One row, and its arrays.
struct SamplerRowView {
  SamplerRow* row;
  int32_t* text;     // [text_capacity] prompt, then output, where integers.keeps_text
  float* mu_before;  // [text_capacity] mu before the token was chosen
  uint32_t* ids;     // [touched] tokens: of the rules, then of the text, in order of first use
  float* biases;     // [touched]
  uint32_t* prompt_counts;  // [touched] how often the prompt has the token
  uint32_t* output_counts;  // [touched] how often the output has it
  uint32_t* slots;          // [2^slot_bits] 1 + place in the arrays, 0 where free
  uint64_t* bits;           // [ceil(vocab / 64)] bit t % 64 of t / 64: the token is touched
  int32_t* rules;
  int64_t slot_bits;

  LMD_HOST_DEVICE SamplerRowView(void* memory, const SamplerLayout& l) {
    char* base = static_cast<char*>(memory);
    row = reinterpret_cast<SamplerRow*>(base);
    text = reinterpret_cast<int32_t*>(base + l.text);
    mu_before = reinterpret_cast<float*>(base + l.mu_before);
    ids = reinterpret_cast<uint32_t*>(base + l.ids);
    biases = reinterpret_cast<float*>(base + l.biases);
    prompt_counts = reinterpret_cast<uint32_t*>(base + l.prompt_counts);
    output_counts = reinterpret_cast<uint32_t*>(base + l.output_counts);
    slots = reinterpret_cast<uint32_t*>(base + l.slots);
    bits = reinterpret_cast<uint64_t*>(base + l.bits);
    rules = reinterpret_cast<int32_t*>(base + l.rules);
    slot_bits = l.slot_bits;
  }

  // Whether kernels may trust the row: it has no sequence, or the sizes of this layout.
  LMD_HOST_DEVICE bool fits(const SamplerLayout& l) const {
    return row->active == 0 || (row->vocab == l.vocab && row->text_capacity == l.text_capacity &&
                                row->rules_capacity == l.rules_capacity && row->length >= 0 &&
                                row->length <= l.text_capacity && row->touched >= 0 &&
                                row->touched <= l.touched_capacity && row->rules_size >= 0 &&
                                row->rules_size <= l.rules_capacity && row->integers.dialect >= 0 &&
                                row->integers.dialect < kSamplerDialectCount);
  }

  LMD_HOST_DEVICE SamplerRules parsed_rules() const {
    SamplerRules r{};
    if (row->rules_size == 0) return r;
    r.bias_count = rules[0];
    r.end_count = rules[1];
    r.forced_count = rules[2];
    r.breaker_count = rules[3];
    r.sequence_count = rules[4];
    r.biases = rules + kRuleSizes;
    r.end_tokens = r.biases + 2 * r.bias_count;
    r.forced = r.end_tokens + r.end_count;
    r.breakers = r.forced + 2 * r.forced_count;
    r.sequences = r.breakers + r.breaker_count;
    return r;
  }

  // The slot of a token in the table, or the free slot where it belongs.
  LMD_HOST_DEVICE uint32_t slot_of(uint32_t token) const {
    const uint32_t mask = (uint32_t{1} << slot_bits) - 1;
    uint32_t slot = (token * 0x9e3779b1u) >> (32 - slot_bits);
    while (slots[slot] != 0 && ids[slots[slot] - 1] != token) slot = (slot + 1) & mask;
    return slot;
  }

  // The token's place in the arrays; -1 where it is not touched.
  LMD_HOST_DEVICE int64_t find(int64_t token) const {
    if (token < 0 || token >= row->vocab) return -1;
    return static_cast<int64_t>(slots[slot_of(static_cast<uint32_t>(token))]) - 1;
  }

  // The same; enters a new token. Requires room. -1 if the number is not a token.
  LMD_HOST_DEVICE int64_t touch(int64_t token) {
    if (token < 0 || token >= row->vocab) return -1;
    const uint32_t slot = slot_of(static_cast<uint32_t>(token));
    if (slots[slot] == 0) {
      const int64_t at = row->touched++;
      ids[at] = static_cast<uint32_t>(token);
      biases[at] = -0.0f;  // added to anything, it is that
      prompt_counts[at] = output_counts[at] = 0;
      slots[slot] = static_cast<uint32_t>(at) + 1;
      bits[token / 64] |= uint64_t{1} << (token % 64);
    }
    return static_cast<int64_t>(slots[slot]) - 1;
  }

  // The token that was entered last is not touched any more. No probe of another one passes its
  // slot: all others were entered while it was free.
  LMD_HOST_DEVICE void forget_last() {
    const uint32_t token = ids[--row->touched];
    slots[slot_of(token)] = 0;
    bits[token / 64] &= ~(uint64_t{1} << (token % 64));
  }

  LMD_HOST_DEVICE bool has_room(int64_t tokens = 1) const {
    return row->integers.keeps_text == 0 || row->length + tokens <= row->text_capacity;
  }

  // The next token of the sequence is this one; has_room().
  LMD_HOST_DEVICE void accept(int64_t token) {
    if (row->integers.keeps_text != 0) {
      text[row->length] = static_cast<int32_t>(token);
      mu_before[row->length] = static_cast<float>(row->mu);
      ++row->length;
      const int64_t at = touch(token);
      if (at >= 0) ++output_counts[at];
    }
    ++row->output_length;
    ++row->position;
  }

  // Takes back the last n accepted tokens; n <= output_length.
  LMD_HOST_DEVICE void rewind(int64_t n) {
    row->output_length -= n;
    row->position -= n;
    if (row->integers.keeps_text == 0) return;
    for (; n > 0; --n) {
      --row->length;
      row->mu = static_cast<double>(mu_before[row->length]);
      const int64_t at = find(text[row->length]);
      if (at < 0) continue;
      --output_counts[at];
      // A token that this position entered was entered last: forgetting it keeps the table within
      // text and rules.
      if (at == row->touched - 1 && at >= row->rule_touched &&
          prompt_counts[at] + output_counts[at] == 0) {
        forget_last();
      }
    }
  }
};

struct SamplerInsertParams {
  void* row;  // the bytes of the row
  SamplerLayout layout;
  SamplerIntegers integers;
  SamplerNumbers numbers;
  const int32_t* rules;  // [rules_size] as above, checked
  int64_t rules_size;
  const int64_t* prompt;  // [prompt_length]
  int64_t prompt_length;
};

// Makes the row one of a new sequence.
void sampler_insert_cpu(const SamplerInsertParams& params);

// The sequence of `from`, with the room that `to` has: at least as much.
void sampler_copy_row_cpu(const void* from, const SamplerLayout& from_layout, void* to,
                          const SamplerLayout& to_layout);

// Checks everything that a kernel would trust in a row of arbitrary bytes. Returns the error, or
// null.
const char* wrong_row(const void* row, const SamplerLayout& layout);

// Checks the sizes and tokens of rules. Returns the error, or null.
const char* wrong_rules(const int32_t* rules, int64_t size, int64_t vocab);

}  // namespace lmdecode::sampling
