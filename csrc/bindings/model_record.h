// The packed weights of a model, in one memory. It begins with a record: a head, then text, a line
// for each entry, `name value`. Entries config.* are the fields of a config, weights.* the place of
// each part ([offset, bytes], from the beginning of the memory), layers.* what packing has decided
// of a layer. An absent entry of a switch is off; others are needed.
// python/lmdecode/models/record.py writes it.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bindings/packed_weight_checks.h"
#include "decoder/decoder_config.h"

namespace lmdecode::decoder {

using Integers = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

constexpr int64_t kMaxDecoderSize = int64_t{1} << 31;

struct RecordHead {
  char magic[8];  // kRecordMagic
  uint32_t version;
  uint32_t checksum;  // CRC-32 of the text
  uint64_t text_bytes;
  uint64_t memory_bytes;  // the model's own: those of another one may follow
  char zeros[32];
};
static_assert(sizeof(RecordHead) == 64);
inline constexpr std::string_view kRecordMagic = "lmdmodel";
constexpr uint32_t kRecordVersion = 1;

// The names of choices, in the order of their enums.
inline constexpr std::string_view kFormatNames[] = {"float32", "bfloat16", "int8", "int4", "file"};
inline constexpr std::string_view kNormNames[] = {"layer_norm", "rms_norm"};
// Activation has kNone before these.
inline constexpr std::string_view kActivationNames[] = {"relu", "gelu", "gelu_tanh", "silu"};
inline constexpr std::string_view kRouterNames[] = {"softmax", "softmax_of_chosen", "sigmoid"};
// MixerKind has kNone before these.
inline constexpr std::string_view kMixerNames[] = {"short_convolution", "gated_delta_rule",
                                                   "mamba2"};

// The entries of a memory's record. Throws for an entry that is out of range, one that is not read,
// and a part that ends behind the memory.
class ModelRecord {
 public:
  ModelRecord(const char* op, const Tensor& memory);
  ModelRecord(const ModelRecord&) = delete;
  ModelRecord& operator=(const ModelRecord&) = delete;

  // Whether a memory is the one that was read, with the same record.
  bool is_of(const Tensor& memory) const;

  bool has(const std::string& name);
  // An entry that is absent is what the caller says, or an error.
  int64_t integer(const std::string& name, int64_t low, int64_t high = kMaxDecoderSize - 1,
                  std::optional<int64_t> absent = std::nullopt);
  bool flag(const std::string& name) { return integer(name, 0, 1, 0) != 0; }
  float number(const std::string& name, std::optional<float> absent = std::nullopt);
  // Which of the choices an entry names.
  int64_t choice(const std::string& name, std::span<const std::string_view> choices);
  // At most as many as there are entries: a lie about it takes no memory.
  int64_t num_layers() {
    return integer("config.num_layers", 1, static_cast<int64_t>(entries_.size()));
  }
  // Of each layer an integer, `absent` for null, or if the whole entry is absent.
  Integers integers(const std::string& name, int64_t count, int64_t low, int64_t high,
                    int64_t absent);
  std::vector<float> numbers(const std::string& name);
  // Where a part begins, and its bytes. Null if absent.
  const char* part(const std::string& name, int64_t* bytes);
  // The format of linear weights; without it each has its own.
  std::optional<linear::LinearFormat> format();

  void check_kind(std::string_view kind);
  // Throws if there is an entry that such a model does not have.
  void check_all_read();

  const char* op() const { return op_; }

 private:
  struct Entry {
    std::string_view value;
    bool is_read = false;
  };
  const std::string_view* find(const std::string& name);
  std::vector<std::string_view> list(const std::string& name, std::string_view value) const;
  int64_t to_integer(const std::string& name, std::string_view value, int64_t low,
                     int64_t high) const;
  float to_number(const std::string& name, std::string_view value) const;

  const char* op_;
  const char* memory_;
  int64_t bytes_;
  int64_t own_bytes_ = 0;
  std::string text_;  // with the head
  std::unordered_map<std::string_view, Entry> entries_;
};

// The header of a packed weight, as it was when the weight was checked.
struct CheckedHeader {
  const void* place;
  linear::PackedHeader header;

  explicit CheckedHeader(const void* place) : place(place) {
    std::memcpy(&header, place, sizeof(header));
  }
  bool is_there() const { return std::memcmp(&header, place, sizeof(header)) == 0; }
};

// The parts of a model (prefix "weights.") or of a layer ("weights.layers.0.").
class WeightParts {
 public:
  WeightParts(ModelRecord* record, std::vector<CheckedHeader>* headers, std::string prefix)
      : record_(*record), headers_(*headers), prefix_(std::move(prefix)) {}

  // [count] floats or bfloat16. Null if absent.
  template <class T>
  const T* values(const char* name, int64_t count) {
    constexpr int64_t kSize = sizeof(T);
    int64_t bytes = 0;
    const char* const found = record_.part(prefix_ + name, &bytes);
    if (found != nullptr && (bytes % kSize != 0 || bytes / kSize != count)) {
      fail(record_.op(), prefix_, name, " has ", bytes, " bytes; expected ", count, " of ", kSize);
    }
    return reinterpret_cast<const T*>(found);
  }
  const float* floats(const char* name, int64_t count) { return values<float>(name, count); }
  const float* needed(const char* name, int64_t count) {
    const float* const found = floats(name, count);
    if (found == nullptr) fail(record_.op(), prefix_, name, " is absent; expected it");
    return found;
  }
  // How many rows of floats a table has, and where.
  const float* table(const char* name, int64_t columns, int64_t* rows);

  NormWeights norm(const char* gamma, const char* beta, int64_t size) {
    NormWeights norm;
    norm.gamma = floats(gamma, size);
    if (beta != nullptr) norm.beta = floats(beta, size);
    return norm;
  }

  // One matrix, without a bias.
  linear::PackedLinear matrix(const char* name, std::optional<linear::LinearFormat> format,
                              int64_t in_features, int64_t out_features) {
    linear::PackedLinear part;
    read(name, format, in_features, out_features, &part, 1);
    return part;
  }
  // The first of several concatenated matrices of one shape and format, and the bytes from one to
  // the next. The header of the first alone is looked at again at each step.
  linear::PackedLinear matrices(const char* name, std::optional<linear::LinearFormat> format,
                                int64_t count, int64_t in_features, int64_t out_features,
                                int64_t* stride);
  LinearWeights linear(const char* name, const char* bias,
                       std::optional<linear::LinearFormat> format, int64_t in_features,
                       int64_t out_features);

  // Whether there is a part.
  bool has(const char* name) { return record_.has(prefix_ + name); }

 private:
  // Returns the number of parts.
  int64_t read(const char* name, std::optional<linear::LinearFormat> format, int64_t in_features,
               int64_t out_features, linear::PackedLinear* parts, int64_t most,
               int64_t matrices = 1);

  ModelRecord& record_;
  std::vector<CheckedHeader>& headers_;
  const std::string prefix_;
};

// A record that is being read, with the headers of the weights that were looked at.
struct ModelReader {
  ModelRecord& record;
  std::vector<CheckedHeader>& headers;

  WeightParts parts() { return {&record, &headers, "weights."}; }
  WeightParts parts_of_layer(int64_t i) {
    return {&record, &headers, "weights.layers." + std::to_string(i) + "."};
  }
};

// A checked model, with what it was read from. Model is made of a ModelReader.
template <class Model>
class CheckedModel {
 public:
  CheckedModel(const char* op, const Tensor& memory)
      : record_(op, memory), model_(ModelReader{record_, headers_}) {
    record_.check_all_read();
  }
  CheckedModel(const CheckedModel&) = delete;
  CheckedModel& operator=(const CheckedModel&) = delete;

  bool is_of(const Tensor& memory) const {
    if (!record_.is_of(memory)) return false;
    for (const CheckedHeader& header : headers_) {
      if (!header.is_there()) return false;
    }
    return true;
  }
  const Model& model() const { return model_; }

 private:
  std::vector<CheckedHeader> headers_;
  ModelRecord record_;
  const Model model_;
};

// Throws for anything but uint8 bytes, contiguous, on the CPU, aligned to 64.
void check_model_memory(const char* op, const Tensor& memory);

// The weights are checked once, and not at every step: where all that the checks look at is as it
// was, so is what they found. That is the place and the size of the memory, its record, and the
// header of each packed weight. The last results of a thread are kept. Valid until the thread's
// next call for such a model.
template <class Model>
const Model& checked_model(const char* op, const Tensor& memory) {
  check_model_memory(op, memory);
  // As many models as a thread is likely to take turns with.
  static thread_local std::array<std::unique_ptr<const CheckedModel<Model>>, 4> kept;
  static thread_local size_t oldest = 0;
  for (const auto& checked : kept) {
    if (checked != nullptr && checked->is_of(memory)) return checked->model();
  }
  auto& place = kept[oldest];
  place = std::make_unique<const CheckedModel<Model>>(op, memory);
  oldest = (oldest + 1) % kept.size();
  return place->model();
}

}  // namespace lmdecode::decoder
