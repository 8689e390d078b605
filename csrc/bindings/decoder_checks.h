// Arguments of the decoder ops to kernel parameters. python/lmdecode/decoder/weights.py and
// python/lmdecode/decoder/state.py make the tensors and numbers that come here.
#pragma once

#include <optional>
#include <vector>

#include "bindings/beam_search_checks.h"
#include "bindings/weight_parts.h"
#include "decoder/decoding.h"
#include "decoder/step_attention.h"

namespace lmdecode::decoder {

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
  // The format of linear weights; -1: each has its own.
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

// For an encoder: a vocab_size of 0 if it takes no tokens, and a memory_size of 0.
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

// A list of tensors read one after the other, each contiguous, and on the CPU or where the
// arguments are to be.
class TensorList {
 public:
  TensorList(const char* op, const char* name, const Tensors& tensors, size_t expected)
      : TensorList(Arguments(op), name, tensors, expected) {}
  TensorList(const Arguments& arguments, const char* name, const Tensors& tensors, size_t expected)
      : arguments_(arguments), prefix_(std::string(name) + "."), tensors_(tensors) {
    if (tensors.size() != expected) {
      fail(arguments.op(), name, " has ", tensors.size(), " tensors; expected ", expected);
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

 private:
  const Arguments arguments_;
  const std::string prefix_;
  const Tensors& tensors_;
  size_t index_ = 0;
};

// Reads the first columns of the model's row in a decoder's or an encoder's layout.
template <class Weights>
void read_tables(const char* op, WeightParts& parts, const DecoderConfig& c, Weights* weights) {
  const int64_t positions = parts.number(0, "positions", 0);
  const int64_t rows = parts.number(0, "rows of the relative bias", 0);
  weights->num_distances = parts.number(0, "distances", 0);
  weights->has_bias_of_layers = c.layers > 1 && rows == c.layers * c.heads;
  weights->positions = parts.next<float>("positions", positions * c.model_size);
  weights->relative_bias = parts.next<float>("relative_bias", rows * weights->num_distances);
  if ((weights->positions == nullptr) != (positions == 0)) {
    fail(op, "layout[0].positions is ", positions,
         "; expected 0 just where weights have no positions");
  }
  if (positions > 0) weights->num_positions = positions - c.position_offset;
  if (weights->relative_bias != nullptr && rows != c.heads && !weights->has_bias_of_layers) {
    fail(op, "weights.relative_bias has ", rows, " rows; expected ", c.heads, ", from config");
  }
  weights->embedding_norm = parts.norm("embedding_norm_gamma", "embedding_norm_beta", c.model_size);
  weights->final_norm = parts.norm("final_norm_gamma", "final_norm_beta", c.model_size);
}

// The layers of a decoder, or of an encoder.
std::vector<LayerWeights> read_layers(const char* op, const ModelArguments& from,
                                      const DecoderConfig& config,
                                      std::vector<CheckedHeader>* headers);

struct DecoderLayers {
  static constexpr int64_t kLayoutColumns = 22;
  DecoderConfig config;
  std::vector<LayerWeights> layers;

  DecoderLayers(const char* op, const ModelArguments& from, std::vector<CheckedHeader>* headers)
      : config(decoder_config(op, from.config, from.numbers)),
        layers(read_layers(op, from, config, headers)) {}
};

// The weights of a whole decoder but for the embedding, which has a tensor of its own: it may be
// that of another model.
struct DecoderModel : DecoderLayers {
  DecoderWeights weights;

  DecoderModel(const char* op, const ModelArguments& from, std::vector<CheckedHeader>* headers);
  // With embedding and layers.
  DecoderWeights with(const char* op, const Tensor& embedding) const;
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
