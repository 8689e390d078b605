// Arguments of the decoder ops to kernel parameters. python/lmdecode/decoder/state.py makes the
// tensors that come here.
#pragma once

#include <optional>
#include <vector>

#include "bindings/beam_search_checks.h"
#include "bindings/model_record.h"
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

 private:
  const char* op_;
  const char* name_;
  const Integers& values_;
  size_t index_ = 0;
};

// The fields that configs of all kinds have.
DecoderConfig common_config(ModelRecord& record, int64_t least_vocab);

// For an encoder: a vocab_size of 0 if it takes no tokens, and a memory_size of 0.
DecoderConfig decoder_config(ModelRecord& record, bool is_encoder = false);

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

// Reads what surrounds the layers of a decoder or an encoder.
template <class Weights>
void read_tables(ModelReader reader, const DecoderConfig& c, Weights* weights) {
  const char* const op = reader.record.op();
  WeightParts parts = reader.parts();
  int64_t positions = 0, rows = reader.record.integer("relative_bias_rows", 0);
  weights->positions = parts.table("positions", c.model_size, &positions);
  weights->num_positions = std::max<int64_t>(positions - c.position_offset, 0);
  weights->has_bias_of_layers = c.layers > 1 && rows == c.layers * c.heads;
  if (rows > 0 && rows != c.heads && !weights->has_bias_of_layers) {
    fail(op, "weights.relative_bias has ", rows, " rows; expected ", c.heads, ", from config");
  }
  weights->relative_bias =
      parts.table("relative_bias", std::max<int64_t>(rows, 1), &weights->num_distances);
  if ((weights->relative_bias == nullptr) != (rows == 0)) {
    fail(op, "relative_bias_rows is ", rows, "; expected 0 just where weights have no such bias");
  }
  weights->embedding_norm = parts.norm("embedding_norm_gamma", "embedding_norm_beta", c.model_size);
  weights->final_norm = parts.norm("final_norm_gamma", "final_norm_beta", c.model_size);
}

// The layers of a decoder, or of an encoder.
std::vector<LayerWeights> read_layers(ModelReader reader, const DecoderConfig& config);

// The weights of a decoder but for the embedding, which has a tensor of its own: it may be that of
// another model. A layer by itself has no logits.
struct DecoderModel {
  DecoderConfig config;
  std::vector<LayerWeights> layers;
  DecoderWeights weights;

  explicit DecoderModel(ModelReader reader);
  // With embedding and layers; throws without logits.
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
