// The weights of a model, in one memory: `layout`, a row for the model and one for each layer, says
// where each part lies, in bytes, -1 if absent; some of its columns are numbers.
// python/lmdecode/decoder/weights.py and causal_weights.py make both.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/packed_weight_checks.h"
#include "decoder/decoder_config.h"

namespace lmdecode::decoder {

using Integers = std::vector<int64_t>;
using Numbers = std::vector<double>;
using Tensors = std::vector<Tensor>;

constexpr int64_t kMaxDecoderSize = int64_t{1} << 31;

// The header of a packed weight, as it was when the weight was checked.
struct CheckedHeader {
  const void* place;
  linear::PackedHeader header;

  explicit CheckedHeader(const void* place) : place(place) {
    std::memcpy(&header, place, sizeof(header));
  }
  bool is_there() const { return std::memcmp(&header, place, sizeof(header)) == 0; }
};

// Parts of one memory. Adds the headers of packed weights to `headers`.
class WeightParts {
 public:
  WeightParts(const char* op, const Tensor& memory, const int64_t* row,
              std::vector<CheckedHeader>* headers)
      : op_(op),
        memory_(static_cast<const char*>(memory.const_data_ptr())),
        bytes_(memory.numel()),
        row_(row),
        headers_(headers) {}

  // A number in the layout, not an offset.
  int64_t number(int64_t row, const char* name, int64_t low, int64_t high = kMaxDecoderSize - 1) {
    const int64_t value = *row_++;
    if (value >= low && value <= high) return value;
    fail(op_, "layout[", row, "].", name, " is ", value, "; expected ", low, " to ", high);
  }

  // Null if absent.
  template <class T>
  const T* next(const char* name, int64_t count) {
    constexpr int64_t kSize = sizeof(T);
    if (count > bytes_ / kSize) count = bytes_ / kSize + 1;  // too many, and no overflow
    return static_cast<const T*>(take(name, count * kSize));
  }

  NormWeights norm(const char* gamma, const char* beta, int64_t size) {
    NormWeights norm;
    norm.gamma = next<float>(gamma, size);
    if (beta != nullptr) norm.beta = next<float>(beta, size);
    return norm;
  }

  // One matrix, without a bias.
  linear::PackedLinear matrix(const char* name, std::optional<linear::LinearFormat> format,
                              int64_t in_features, int64_t out_features) {
    linear::PackedLinear parts[1];
    read(name, format, in_features, out_features, parts, 1);
    return parts[0];
  }

  // The first of several concatenated matrices of one shape and format, and the bytes from one to
  // the next. The header of the first alone is looked at again at each step.
  linear::PackedLinear matrices(const char* name, std::optional<linear::LinearFormat> format,
                                int64_t count, int64_t in_features, int64_t out_features,
                                int64_t* stride) {
    const linear::PackedLinear first = matrix(name, format, in_features, out_features);
    *stride = static_cast<int64_t>(linear::packed_linear_bytes(first.shape));
    const char* const packed = static_cast<const char*>(first.packed);
    if (count > (memory_ + bytes_ - packed) / *stride) {
      fail(op_, "weights.", name, " has fewer than ", count, " matrices; expected one an expert");
    }
    for (int64_t i = 1; i < count; ++i) {
      linear::check_packed_weight(op_,
                                  std::string("weights.") + name + "[" + std::to_string(i) + "]",
                                  packed + i * *stride, *stride, first.shape, ", from config");
    }
    return first;
  }

  LinearWeights linear(const char* name, const char* bias,
                       std::optional<linear::LinearFormat> format, int64_t in_features,
                       int64_t out_features) {
    LinearWeights weights;
    weights.out_features = out_features;
    weights.num_parts =
        read(name, format, in_features, out_features, weights.parts, kMaxLinearParts);
    weights.bias = next<float>(bias, out_features);
    return weights;
  }

  void skip(int64_t columns = 1) { row_ += columns; }

  // Whether there is the part that many columns on.
  bool has(int64_t columns) const { return row_[columns] != -1; }

 private:
  int64_t read(const char* name, std::optional<linear::LinearFormat> format, int64_t in_features,
               int64_t out_features, linear::PackedLinear* parts, int64_t most) {
    const char* const packed = static_cast<const char*>(take(name, sizeof(linear::PackedHeader)));
    if (packed == nullptr) fail(op_, "weights have no ", name, "; expected it");
    int64_t used = 0;
    const int64_t count =
        check_packed_parts(op_, std::string("weights.") + name, packed, memory_ + bytes_ - packed,
                           in_features, out_features, format, ", from config", parts, most, &used);
    for (int64_t i = 0; i < count; ++i) headers_->emplace_back(parts[i].packed);
    return count;
  }

  const void* take(const char* name, int64_t bytes) {
    const int64_t at = *row_++;
    if (at == -1) return nullptr;
    if (at < 0 || at % 64 != 0 || at > bytes_ - bytes) {
      fail(op_, "layout has ", name, " at byte ", at, "; expected a multiple of 64, and ", bytes,
           " bytes behind it in a memory of ", bytes_);
    }
    return memory_ + at;
  }

  const char* const op_;
  const char* const memory_;
  const int64_t bytes_;
  const int64_t* row_;
  std::vector<CheckedHeader>* const headers_;
};

// The arguments that describe a model.
struct ModelArguments {
  const Tensor& memory;
  const Tensor& layout;
  const Integers& config;
  const Numbers& numbers;

  // The row of the model, or of layer i - 1. Parts that it reads add their headers.
  WeightParts row(const char* op, int64_t i, std::vector<CheckedHeader>* headers) const {
    return {op, memory, data_of<const int64_t>(layout) + i * layout.size(1), headers};
  }
  void check_rows(const char* op, int64_t layers) const {
    if (layout.size(0) == layers + 1) return;
    fail(op, "layout has shape ", shape_text(layout), "; expected [", layers + 1, ", ",
         layout.size(1), "], as config has ", layers, " layers");
  }
};

// A checked model, with the inputs of the checks. Model has kLayoutColumns, and is made of the name
// of an op, ModelArguments and a list for headers of packed weights.
template <class Model>
class CheckedModel {
 public:
  CheckedModel(const char* op, const ModelArguments& from)
      : model_(op, from, &headers_),
        memory_(from.memory.const_data_ptr()),
        bytes_(from.memory.numel()),
        layout_(data_of<const int64_t>(from.layout),
                data_of<const int64_t>(from.layout) + from.layout.numel()),
        config_(from.config),
        numbers_(from.numbers) {}
  CheckedModel(const CheckedModel&) = delete;
  CheckedModel& operator=(const CheckedModel&) = delete;

  bool is_of(const ModelArguments& from) const {
    if (memory_ != from.memory.const_data_ptr() || bytes_ != from.memory.numel() ||
        static_cast<int64_t>(layout_.size()) != from.layout.numel() || config_ != from.config ||
        numbers_ != from.numbers ||
        !std::equal(layout_.begin(), layout_.end(), data_of<const int64_t>(from.layout))) {
      return false;
    }
    return std::all_of(headers_.begin(), headers_.end(),
                       [](const CheckedHeader& header) { return header.is_there(); });
  }
  const Model& model() const { return model_; }

 private:
  std::vector<CheckedHeader> headers_;
  const Model model_;
  const void* memory_;
  int64_t bytes_;
  Integers layout_, config_;
  Numbers numbers_;
};

inline void check_bytes(const char* op, const char* name, const Tensor& tensor) {
  check_dtype(op, name, tensor, ScalarType::Byte);
  if (tensor.dim() == 1 && tensor.is_contiguous() && tensor.is_cpu() &&
      reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64 == 0) {
    return;
  }
  fail(op, name, " has shape ", shape_text(tensor), " on ", device_name(tensor),
       "; expected [bytes], contiguous, on cpu, aligned to 64");
}

// The weights are checked once, and not at every step: where all that the checks look at is as it
// was, so is what they found. That is the place and the size of the memory, the layout, config and
// numbers, and in the memory the header of each packed weight. The last results of a thread are
// kept. Valid until the thread's next call for such a model.
template <class Model>
const Model& checked_model(const char* op, const ModelArguments& from) {
  const Tensor& layout = from.layout;
  check_bytes(op, "weights", from.memory);
  check_dtype(op, "layout", layout, ScalarType::Long);
  if (!layout.is_cpu() || !layout.is_contiguous() || layout.dim() != 2 ||
      layout.size(1) != Model::kLayoutColumns) {
    fail(op, "layout has shape ", shape_text(layout), " on ", device_name(layout),
         "; expected [layers + 1, ", Model::kLayoutColumns, "], contiguous, on cpu");
  }
  // As many models as a thread is likely to take turns with.
  static thread_local std::array<std::unique_ptr<const CheckedModel<Model>>, 4> kept;
  static thread_local size_t oldest = 0;
  for (const auto& checked : kept) {
    if (checked != nullptr && checked->is_of(from)) return checked->model();
  }
  auto& place = kept[oldest];
  place = std::make_unique<const CheckedModel<Model>>(op, from);
  oldest = (oldest + 1) % kept.size();
  return place->model();
}

}  // namespace lmdecode::decoder
