// Rows of samplers: made, and copied to where there is more room.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "common/bits.h"
#include "sampling/sampler_state.h"

namespace lmdecode::sampling {
namespace {

// The tokens that rules touch, in the order in which they are entered; some come again.
template <class Enter>
void for_each_rule_token(const SamplerRules& rules, const Enter& enter) {
  for (int64_t i = 0; i < rules.bias_count; ++i) enter(rules.biases[2 * i]);
  for (int64_t i = 0; i < rules.end_count; ++i) enter(rules.end_tokens[i]);
  const int32_t* sequence = rules.sequences;
  for (int64_t i = 0; i < rules.sequence_count; ++i, sequence += sequence[0] + 2) {
    enter(sequence[sequence[0]]);
  }
}

// sum_of(token): its accumulated bias in the table.
template <class SumOf>
void add_biases(const SamplerRules& rules, const SumOf& sum_of) {
  for (int64_t i = 0; i < rules.bias_count; ++i) {
    const float bias = float_of(static_cast<uint32_t>(rules.biases[2 * i + 1]));
    float& sum = sum_of(rules.biases[2 * i]);
    // A ban stays a ban: further biases are not added.
    sum = sum == minus_infinity() ? sum : sum + bias;
  }
}

void enter_rules(SamplerRowView* view) {
  const SamplerRules rules = view->parsed_rules();
  for_each_rule_token(rules, [&](int64_t token) { view->touch(token); });
  view->row->rule_touched = view->row->touched;
  add_biases(rules, [&](int64_t token) -> float& { return view->biases[view->find(token)]; });
}

}  // namespace

const char* wrong_rules(const int32_t* rules, int64_t size, int64_t vocab) {
  constexpr const char* kShort = "its sizes are not those of its numbers";
  constexpr const char* kToken = "it has a number that is no token of the vocabulary";
  if (size == 0) return nullptr;
  if (size < kRuleSizes) return kShort;
  int64_t at = kRuleSizes;
  const auto left = [&] { return size - at; };
  const auto is_token = [&](int64_t i) { return rules[i] >= 0 && rules[i] < vocab; };
  for (int64_t i = 0; i < kRuleSizes; ++i) {
    if (rules[i] < 0) return kShort;
  }
  constexpr int64_t kWidth[4] = {2, 1, 2, 1}, kToken_at[4] = {0, 0, 1, 0};
  for (int64_t section = 0; section < 4; ++section) {
    if (rules[section] > left() / kWidth[section]) return kShort;
    for (int64_t i = 0; i < rules[section]; ++i, at += kWidth[section]) {
      if (!is_token(at + kToken_at[section])) return kToken;
    }
  }
  for (int64_t i = 0; i < rules[4]; ++i) {
    if (left() < 4 || rules[at] < 2 || rules[at] > left() - 2) return kShort;
    const int64_t length = rules[at];
    for (int64_t j = 1; j <= length; ++j) {
      if (!is_token(at + j)) return kToken;
    }
    at += length + 2;
  }
  return left() == 0 ? nullptr : kShort;
}

// Numbers of steps that leave room for more.
constexpr int64_t kMostSteps = int64_t{1} << 62;

const char* wrong_row(const void* memory, const SamplerLayout& layout) {
  const SamplerRowView view(const_cast<void*>(memory), layout);
  const SamplerRow& row = *view.row;
  if (row.active == 0) return nullptr;
  const bool keeps_text = row.integers.keeps_text != 0;
  const int64_t most = keeps_text ? layout.text_capacity : 0;
  if (row.active != 1 || row.vocab != layout.vocab || row.text_capacity != layout.text_capacity ||
      row.rules_capacity != layout.rules_capacity || row.integers.keeps_text < 0 ||
      row.integers.keeps_text > 1 || row.integers.dialect < 0 ||
      row.integers.dialect >= kSamplerDialectCount) {
    return "its sizes are others";
  }
  if (row.integers.no_repeat_ngram_size < 0 || row.integers.dry_allowed_length < 0) {
    return "its rules have sizes below 0";
  }
  if (row.length < 0 || row.length > most || row.output_length < 0 || row.position < 0 ||
      row.prompt_length < 0 || row.prompt_length > row.length || row.position > kMostSteps ||
      row.output_length > kMostSteps ||
      (keeps_text && row.prompt_length + row.output_length != row.length)) {
    return "its lengths do not fit";
  }
  if (row.touched < 0 || row.touched > layout.touched_capacity || row.rules_size < 0 ||
      row.rules_size > layout.rules_capacity) {
    return "its table has more than there is room for";
  }
  if (const char* wrong = wrong_rules(view.rules, row.rules_size, layout.vocab)) return wrong;
  // The tokens of rules and text must be in the table, once, in the order in which they come: as
  // rewind() takes the last ones back, and there is room for as much text as there is room for.
  std::vector<uint64_t> marks((layout.vocab + 63) / 64);
  int64_t touched = 0;
  bool same = true;
  std::unordered_map<int64_t, int64_t> places;
  const auto enter = [&](int64_t token) {
    if (token < 0 || token >= layout.vocab) return;
    const uint64_t bit = uint64_t{1} << (token % 64);
    if ((marks[token / 64] & bit) != 0) return;
    marks[token / 64] |= bit;
    same &= touched < row.touched && view.ids[touched] == static_cast<uint64_t>(token);
    places.emplace(token, touched++);
  };
  for_each_rule_token(view.parsed_rules(), enter);
  same &= touched == row.rule_touched;
  for (int64_t i = 0; i < row.length; ++i) enter(view.text[i]);
  same &= touched == row.touched && std::equal(marks.begin(), marks.end(), view.bits);
  constexpr const char* kTable = "its table is not that of its text and rules";
  if (!same) return kTable;
  // And what the table says of them.
  std::vector<float> biases(touched, -0.0f);
  add_biases(view.parsed_rules(), [&](int64_t token) -> float& { return biases[places[token]]; });
  std::vector<uint32_t> counts[2]{std::vector<uint32_t>(touched), std::vector<uint32_t>(touched)};
  for (int64_t i = 0; i < row.length; ++i) {
    const auto place = places.find(view.text[i]);
    if (place != places.end()) ++counts[i < row.prompt_length ? 0 : 1][place->second];
  }
  const auto is_same_bias = [](float a, float b) { return bits_of(a) == bits_of(b); };
  same = std::equal(biases.begin(), biases.end(), view.biases, is_same_bias) &&
         std::equal(counts[0].begin(), counts[0].end(), view.prompt_counts) &&
         std::equal(counts[1].begin(), counts[1].end(), view.output_counts);
  return same ? nullptr : kTable;
}

void sampler_insert_cpu(const SamplerInsertParams& p) {
  const SamplerLayout& layout = p.layout;
  SamplerRowView view(p.row, layout);
  SamplerRow& row = *view.row;
  row = {};
  row.vocab = layout.vocab;
  row.text_capacity = layout.text_capacity;
  row.rules_capacity = layout.rules_capacity;
  row.active = 1;
  row.integers = p.integers;
  row.numbers = p.numbers;
  // A negative target switches adaptive-p off.
  row.mu =
      p.numbers.adaptive_target >= 0.0 ? p.numbers.adaptive_target : 2.0 * p.numbers.mirostat_tau;
  row.rules_size = p.rules_size;
  row.position = p.prompt_length;
  std::fill_n(view.slots, int64_t{1} << layout.slot_bits, 0u);
  std::fill_n(view.bits, (layout.vocab + 63) / 64, uint64_t{0});
  std::copy_n(p.rules, p.rules_size, view.rules);
  enter_rules(&view);
  if (p.integers.keeps_text == 0) return;
  for (int64_t i = 0; i < p.prompt_length; ++i) {
    view.text[i] = static_cast<int32_t>(p.prompt[i]);
    const int64_t at = view.touch(p.prompt[i]);
    if (at >= 0) ++view.prompt_counts[at];
  }
  row.prompt_length = row.length = p.prompt_length;
}

void sampler_copy_row_cpu(const void* from, const SamplerLayout& from_layout, void* to,
                          const SamplerLayout& to_layout) {
  const SamplerRowView old(const_cast<void*>(from), from_layout);
  SamplerRowView view(to, to_layout);
  *view.row = *old.row;
  view.row->text_capacity = to_layout.text_capacity;
  view.row->rules_capacity = to_layout.rules_capacity;
  std::copy_n(old.text, old.row->length, view.text);
  std::copy_n(old.mu_before, old.row->length, view.mu_before);
  const int64_t touched = old.row->touched;
  std::copy_n(old.ids, touched, view.ids);
  std::copy_n(old.biases, touched, view.biases);
  std::copy_n(old.prompt_counts, touched, view.prompt_counts);
  std::copy_n(old.output_counts, touched, view.output_counts);
  std::copy_n(old.bits, (from_layout.vocab + 63) / 64, view.bits);
  std::copy_n(old.rules, old.row->rules_size, view.rules);
  std::fill_n(view.slots, int64_t{1} << to_layout.slot_bits, 0u);
  for (int64_t i = 0; i < touched; ++i) {
    view.slots[view.slot_of(view.ids[i])] = static_cast<uint32_t>(i) + 1;
  }
}

}  // namespace lmdecode::sampling
