#include "bindings/model_record.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace lmdecode::decoder {

void check_model_memory(const char* op, const Tensor& memory) {
  check_dtype(op, "weights", memory, ScalarType::Byte);
  if (memory.dim() == 1 && memory.is_contiguous() && memory.is_cpu() &&
      reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 64 == 0) {
    return;
  }
  fail(op, "weights has shape ", shape_text(memory), " on ", device_name(memory),
       "; expected [bytes], contiguous, on cpu, aligned to 64");
}

namespace {

// CRC-32 as zlib has it.
uint32_t checksum_of(std::string_view text) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : text) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  return ~crc;
}

// The beginning of a name or value of a record that may have any.
std::string_view shown(std::string_view text) { return text.substr(0, 60); }

}  // namespace

ModelRecord::ModelRecord(const char* op, const Tensor& memory) : op_(op) {
  memory_ = static_cast<const char*>(memory.const_data_ptr());
  bytes_ = memory.numel();
  RecordHead head = {};
  if (bytes_ >= static_cast<int64_t>(sizeof(head))) std::memcpy(&head, memory_, sizeof(head));
  if (std::string_view(head.magic, sizeof(head.magic)) != kRecordMagic) {
    fail(op, "weights has no record in its ", bytes_, " bytes; expected that of a packed model");
  }
  if (head.version != kRecordVersion) {
    fail(op, "weights has a record of version ", head.version, "; expected ", kRecordVersion,
         ": pack the model again");
  }
  if (head.memory_bytes > static_cast<uint64_t>(bytes_) || head.memory_bytes < sizeof(head) ||
      head.text_bytes > head.memory_bytes - sizeof(head)) {
    fail(op, "weights has ", bytes_, " bytes; expected ", head.memory_bytes, ", with ",
         head.text_bytes, " of text, as its record says");
  }
  own_bytes_ = static_cast<int64_t>(head.memory_bytes);
  text_.assign(memory_, sizeof(head) + head.text_bytes);
  std::string_view text = std::string_view(text_).substr(sizeof(head));
  if (const uint32_t found = checksum_of(text); found != head.checksum) {
    fail(op, "weights has a record with the checksum ", found, "; expected ", head.checksum,
         ": pack the model again");
  }
  const auto is_printed = [](char byte) { return byte == '\n' || (byte >= ' ' && byte <= '~'); };
  if (!std::all_of(text.begin(), text.end(), is_printed)) {
    fail(op, "weights has a record of other bytes; expected printable ASCII");
  }
  while (!text.empty()) {
    const size_t end = text.find('\n'), space = text.find(' ');
    if (end == std::string_view::npos || space >= end) {
      fail(op, "weights has a record with other text behind ", entries_.size(),
           " entries; expected lines of a name and a value");
    }
    const std::string_view name = text.substr(0, space);
    const bool is_new =
        entries_.emplace(name, Entry{text.substr(space + 1, end - space - 1)}).second;
    if (!is_new) fail(op, shown(name), " is in the record twice; expected it once");
    text.remove_prefix(end + 1);
  }
}

bool ModelRecord::is_of(const Tensor& memory) const {
  return memory.const_data_ptr() == memory_ && memory.numel() == bytes_ &&
         std::memcmp(memory_, text_.data(), text_.size()) == 0;
}

const std::string_view* ModelRecord::find(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return nullptr;
  found->second.is_read = true;
  return &found->second.value;
}

bool ModelRecord::has(const std::string& name) { return find(name) != nullptr; }

int64_t ModelRecord::to_integer(const std::string& name, std::string_view value, int64_t low,
                                int64_t high) const {
  int64_t number = 0;
  if (value == "true" || value == "false") {
    number = value == "true" ? 1 : 0;
  } else {
    const auto [end, error] = std::from_chars(value.begin(), value.end(), number);
    if (error != std::errc() || end != value.end()) {
      fail(op_, name, " is ", shown(value), "; expected an integer, ", low, " to ", high);
    }
  }
  if (number >= low && number <= high) return number;
  fail(op_, name, " is ", number, "; expected ", low, " to ", high);
}

float ModelRecord::to_number(const std::string& name, std::string_view value) const {
  // In no locale of the process. from_chars and streams would need a newer libstdc++.
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  const std::string text(value);
  char* end = nullptr;
  const double number = strtod_l(text.c_str(), &end, classic);
  if (!text.empty() && text.find_first_not_of("0123456789+-.eE") == std::string::npos &&
      end == text.c_str() + text.size() && std::abs(number) <= std::numeric_limits<float>::max()) {
    return static_cast<float>(number);
  }
  fail(op_, name, " is ", shown(value), "; expected a number");
}

std::vector<std::string_view> ModelRecord::list(const std::string& name,
                                                std::string_view value) const {
  if (value.size() < 2 || value.front() != '[' || value.back() != ']') {
    fail(op_, name, " is ", shown(value), "; expected a list");
  }
  value = value.substr(1, value.size() - 2);
  std::vector<std::string_view> found;
  while (!value.empty()) {
    const size_t end = std::min(value.find(", "), value.size());
    found.push_back(value.substr(0, end));
    value.remove_prefix(std::min(end + 2, value.size()));
  }
  return found;
}

int64_t ModelRecord::integer(const std::string& name, int64_t low, int64_t high,
                             std::optional<int64_t> absent) {
  const std::string_view* const value = find(name);
  if (value != nullptr) return to_integer(name, *value, low, high);
  if (absent) return *absent;
  fail(op_, name, " is absent; expected ", low, " to ", high);
}

float ModelRecord::number(const std::string& name, std::optional<float> absent) {
  const std::string_view* const value = find(name);
  if (value != nullptr) return to_number(name, *value);
  if (absent) return *absent;
  fail(op_, name, " is absent; expected a number");
}

int64_t ModelRecord::choice(const std::string& name, std::span<const std::string_view> choices) {
  const std::string_view* const value = find(name);
  std::string names;
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string quoted = '"' + std::string(choices[i]) + '"';
    if (value != nullptr && *value == quoted) return static_cast<int64_t>(i);
    names += (i == 0 ? "" : ", ") + quoted;
  }
  if (value == nullptr) fail(op_, name, " is absent; expected one of ", names);
  fail(op_, name, " is ", shown(*value), "; expected one of ", names);
}

Integers ModelRecord::integers(const std::string& name, int64_t count, int64_t low, int64_t high,
                               int64_t absent) {
  const std::string_view* const value = find(name);
  if (value == nullptr) return Integers(static_cast<size_t>(count), absent);
  Integers found;
  for (const std::string_view entry : list(name, *value)) {
    found.push_back(entry == "null" ? absent : to_integer(name, entry, low, high));
  }
  if (static_cast<int64_t>(found.size()) == count) return found;
  fail(op_, name, " has ", found.size(), " entries; expected ", count);
}

std::vector<float> ModelRecord::numbers(const std::string& name) {
  std::vector<float> found;
  if (const std::string_view* const value = find(name)) {
    for (const std::string_view entry : list(name, *value)) {
      found.push_back(to_number(name, entry));
    }
  }
  return found;
}

const char* ModelRecord::part(const std::string& name, int64_t* bytes) {
  *bytes = 0;
  if (!has(name)) return nullptr;
  const Integers place = integers(name, 2, INT64_MIN, INT64_MAX, 0);
  const int64_t begin = place[0], size = place[1];
  if (begin < static_cast<int64_t>(text_.size()) || begin % 64 != 0 || size < 1 ||
      begin > own_bytes_ - size) {
    fail(op_, name, " is at byte ", begin, "; expected a multiple of 64 behind the record, and ",
         size, " bytes behind it in a memory of ", own_bytes_);
  }
  *bytes = size;
  return memory_ + begin;
}

std::optional<linear::LinearFormat> ModelRecord::format() {
  switch (choice("weight_format", kFormatNames)) {
    case 0:
      return linear::LinearFormat::kFloat32;
    case 1:
      return linear::LinearFormat::kBFloat16;
    default:
      return std::nullopt;
  }
}

void ModelRecord::check_kind(std::string_view kind) {
  const std::string_view* const found = find("kind");
  if (found != nullptr && *found == kind) return;
  fail(op_, "weights are of kind ", found == nullptr ? "none" : shown(*found), "; expected ", kind);
}

void ModelRecord::check_all_read() {
  const auto unread = std::find_if(entries_.begin(), entries_.end(),
                                   [](const auto& entry) { return !entry.second.is_read; });
  if (unread == entries_.end()) return;
  fail(op_, "weights has a record with ", shown(unread->first),
       "; expected no entry that such a model does not have");
}

const float* WeightParts::table(const char* name, int64_t columns, int64_t* rows) {
  int64_t bytes = 0;
  const char* const found = record_.part(prefix_ + name, &bytes);
  const int64_t size = columns * static_cast<int64_t>(sizeof(float));
  if (bytes % size != 0) {
    fail(record_.op(), prefix_, name, " has ", bytes, " bytes; expected a multiple of ", size);
  }
  *rows = bytes / size;
  return reinterpret_cast<const float*>(found);
}

int64_t WeightParts::read(const char* name, std::optional<linear::LinearFormat> format,
                          int64_t in_features, int64_t out_features, linear::PackedLinear* parts,
                          int64_t most, int64_t matrices) {
  const char* const op = record_.op();
  int64_t bytes = 0, used = 0;
  const char* const begin = record_.part(prefix_ + name, &bytes);
  if (begin == nullptr) fail(op, prefix_, name, " is absent; expected it");
  const int64_t count =
      check_packed_parts(op, prefix_ + name, begin, bytes, in_features, out_features, format,
                         ", from config", parts, most, &used);
  if (bytes % used != 0 || bytes / used != matrices) {
    fail(op, prefix_, name, " has ", bytes, " bytes; expected ", matrices, " of ", used);
  }
  for (int64_t i = 0; i < count; ++i) headers_.emplace_back(parts[i].packed);
  return count;
}

linear::PackedLinear WeightParts::matrices(const char* name,
                                           std::optional<linear::LinearFormat> format,
                                           int64_t count, int64_t in_features, int64_t out_features,
                                           int64_t* stride) {
  linear::PackedLinear first;
  read(name, format, in_features, out_features, &first, 1, count);
  const char* const begin = static_cast<const char*>(first.packed);
  *stride = static_cast<int64_t>(linear::packed_linear_bytes(first.shape));
  for (int64_t i = 1; i < count; ++i) {
    linear::check_packed_weight(record_.op(), prefix_ + name + "[" + std::to_string(i) + "]",
                                begin + i * *stride, *stride, first.shape, ", from config");
  }
  return first;
}

LinearWeights WeightParts::linear(const char* name, const char* bias,
                                  std::optional<linear::LinearFormat> format, int64_t in_features,
                                  int64_t out_features) {
  LinearWeights weights;
  weights.out_features = out_features;
  weights.num_parts = read(name, format, in_features, out_features, weights.parts, kMaxLinearParts);
  weights.bias = floats(bias, out_features);
  return weights;
}

}  // namespace lmdecode::decoder
