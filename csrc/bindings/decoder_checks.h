// Arguments of the decoder ops to kernel parameters. python/lmdecode/decoder/weights.py and
// python/lmdecode/decoder/state.py make the lists of tensors and numbers that come here.
#pragma once

#include <optional>
#include <vector>

#include "bindings/beam_search_checks.h"
#include "decoder/decoding.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

using Integers = std::vector<int64_t>;
using Numbers = std::vector<double>;
using Tensors = std::vector<Tensor>;

constexpr int64_t kMaxDecoderSize = int64_t{1} << 31;

inline void check_number(const char* op, const char* name, int64_t entry, int64_t value,
                         int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  fail(op, name, "[", entry, "] is ", value, "; expected ", low, " to ", high);
}

// Reads a list of numbers one after the other.
class IntegerList {
 public:
  IntegerList(const char* op, const char* name, const Integers& values, size_t expected)
      : op_(op), name_(name), values_(values) {
    if (values.size() != expected) {
      fail(op, name, " has ", values.size(), " numbers; expected ", expected);
    }
  }

  int64_t next(const char* field, int64_t low, int64_t high = kMaxDecoderSize - 1) {
    const int64_t value = values_[index_++];
    if (value < low || value > high) {
      fail(op_, name_, ".", field, " is ", value, "; expected ", low, " to ", high);
    }
    return value;
  }
  bool next_flag(const char* field) { return next(field, 0, 1) != 0; }
  // Of linear weights; -1: each has its own.
  std::optional<linear::LinearFormat> next_format() {
    const int64_t format = next("format", -1, linear::kMaxLinearFormat);
    if (format < 0) return std::nullopt;
    return static_cast<linear::LinearFormat>(format);
  }

 private:
  const char* op_;
  const char* name_;
  const Integers& values_;
  size_t index_ = 0;
};

// Of an encoder: a vocab_size of 0 where it takes no tokens, and a memory_size of 0.
inline DecoderConfig decoder_config(const char* op, const Integers& sizes, const Numbers& numbers,
                                    bool is_encoder = false) {
  IntegerList list(op, "config", sizes, 14);
  DecoderConfig c;
  c.layers = list.next("num_layers", 1);
  c.model_size = list.next("model_size", 1);
  c.heads = c.kv_heads = list.next("num_heads", 1);
  c.head_size = list.next("head_size", 1);
  c.ffn_size = list.next("ffn_size", 1);
  c.vocab = list.next("vocab_size", is_encoder ? 0 : 1);
  c.memory_size = is_encoder ? list.next("memory_size", 0, 0) : list.next("memory_size", 1);
  c.position_offset = list.next("position_offset", 0);
  c.unplaced_token = list.next("unplaced_token", -1);
  c.norm = static_cast<NormKind>(list.next("norm", 0, 1));
  c.norm_first = list.next_flag("norm_first");
  c.gated = list.next_flag("gated");
  c.activation = static_cast<linear::Activation>(list.next("activation", 0, 4));
  c.format = list.next_format();
  if (c.heads * c.head_size >= kMaxDecoderSize) {
    fail(op, "config has ", c.heads, " heads of ", c.head_size,
         "; expected fewer than 2^31 in all");
  }
  if (numbers.size() != 4) fail(op, "numbers has ", numbers.size(), " entries; expected 4");
  c.norm_epsilon = static_cast<float>(numbers[0]);
  c.attention_scale = static_cast<float>(numbers[1]);
  c.denominator_epsilon = static_cast<float>(numbers[2]);
  c.embedding_scale = static_cast<float>(numbers[3]);
  return c;
}

// A list of tensors read one after the other, each contiguous and on the CPU.
class TensorList {
 public:
  TensorList(const char* op, const char* name, const Tensors& tensors, size_t expected)
      : arguments_(op), prefix_(std::string(name) + "."), tensors_(tensors) {
    if (tensors.size() != expected) {
      fail(op, name, " has ", tensors.size(), " tensors; expected ", expected);
    }
  }

  // A size below 0 stands for any.
  template <class T>
  T* next(const char* field, Arguments::Sizes sizes, ScalarType type = scalar_type_of<T>()) {
    const ArgumentName name(prefix_.c_str(), field);
    return arguments_.contiguous<T>(name, tensors_[index_++], sizes, nullptr, type);
  }

  // Null where the tensor is empty.
  template <class T>
  T* next_or_null(const char* field, Arguments::Sizes sizes) {
    if (next_tensor().numel() > 0) return next<T>(field, sizes);
    ++index_;
    return nullptr;
  }

  const Tensor& next_tensor() const { return tensors_[index_]; }
  bool is_at_end() const { return index_ == tensors_.size(); }

 private:
  const Arguments arguments_;
  const std::string prefix_;
  const Tensors& tensors_;
  size_t index_ = 0;
};

constexpr size_t kModelTensors = 9, kLayerTensors = 22, kEncoderLayerTensors = 14;

// Reads a gamma and a beta, either of which may be missing.
NormWeights norm_weights(TensorList& list, const char* gamma, const char* beta, int64_t size);

// Whether a relative bias is [layers * heads, distances], not [heads, distances].
bool is_bias_of_layers(const Tensor& bias, const DecoderConfig& config);

// Reads the 22 tensors of a layer, or of an encoder's the 14 that are not of cross-attention.
LayerWeights layer_weights(const char* op, TensorList& list, const DecoderConfig& config);

// The weights of a whole decoder, with the list that they refer to.
struct DecoderModel {
  DecoderConfig config;
  std::vector<LayerWeights> layers;
  DecoderWeights weights;

  DecoderModel(const char* op, const Tensors& tensors, const Integers& sizes,
               const Numbers& numbers);
  DecoderModel(const DecoderModel&) = delete;
  DecoderModel& operator=(const DecoderModel&) = delete;
};

// The caches of a decoder, of which the op may write all: seven tensors.
struct CacheTensors {
  DecoderCaches caches;
  float* cross_keys = nullptr;
  float* cross_values = nullptr;
  int64_t* memory_lengths = nullptr;
  int64_t* cached_lengths = nullptr;  // [requests]

  CacheTensors(const char* op, const Tensors& tensors, const DecoderConfig& config);
};

}  // namespace lmdecode::decoder
