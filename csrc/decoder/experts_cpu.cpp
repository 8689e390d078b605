// Rows to experts, and the panels of these to threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/parallel_rows.h"
#include "common/split_memory.h"
#include "decoder/decoder_tuning.h"
#include "decoder/experts.h"
#include "decoder/experts_kernels.h"
#include "linear/linear_tuning.h"
#include "linear/packed_linear_kernels.h"

namespace lmdecode::decoder {
namespace {

using linear::LinearFormat;
using linear::LinearInput;
using linear::LinearOutput;

// Rows that are prepared together: threads share the pieces.
constexpr int64_t kPieceRows = 8;
// Rows from which on a product takes longer than the reading of its weights.
constexpr int64_t kRowsOfOneRead = 8;

int64_t rounded_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t most_bytes(int64_t in_features, int64_t rows) {
  return rounded_up(static_cast<int64_t>(linear::most_linear_input_bytes(in_features, rows)));
}

// Bytes of a slot in slot_inputs: a row with its scale, in any format.
int64_t slot_bytes(int64_t in_features) {
  return 64 + std::max(most_bytes(in_features, 1), rounded_up(4 * in_features));
}

// The chosen experts of a row and their weights, by descending choice, then sorted.
class RowChoice {
 public:
  RowChoice(const ExpertsConfig& config, const ExpertsWeights& weights)
      : c_(config), bias_(weights.choice_bias), scales_(weights.scales) {}

  // logits [count] are overwritten.
  void choose(float* logits, int32_t* experts, float* weights) const {
    if (c_.router == RouterKind::kSigmoid) {
      for (int64_t e = 0; e < c_.count; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    }
    for (int64_t i = 0; i < c_.chosen; ++i) {
      int64_t best = -1;
      for (int64_t e = 0; e < c_.count; ++e) {
        const bool is_taken = std::find(experts, experts + i, e) != experts + i;
        if (!is_taken && (best < 0 || is_above(logits, e, best))) best = e;
      }
      experts[i] = static_cast<int32_t>(best);
    }
    weigh(logits, experts, weights);
    for (int64_t i = 1; i < c_.chosen; ++i) {  // few
      for (int64_t at = i; at > 0 && experts[at - 1] > experts[at]; --at) {
        std::swap(experts[at - 1], experts[at]);
        std::swap(weights[at - 1], weights[at]);
      }
    }
  }

 private:
  float score(const float* values, int64_t e) const {
    return bias_ == nullptr ? values[e] : values[e] + bias_[e];
  }

  // NaN is above all, as for torch.topk; of equal scores the lower index is chosen.
  bool is_above(const float* values, int64_t e, int64_t best) const {
    const float mine = score(values, e), other = score(values, best);
    return mine > other || (std::isnan(mine) && !std::isnan(other));
  }

  void weigh(const float* values, const int32_t* experts, float* weights) const {
    const bool is_softmax = c_.router != RouterKind::kSigmoid;
    float total = 0.0f;
    if (is_softmax) {
      float largest = values[0];
      for (int64_t e = 1; e < c_.count; ++e) largest = std::max(largest, values[e]);
      const auto power = [&](int64_t e) { return std::exp(values[e] - largest); };
      const bool of_all = c_.router == RouterKind::kSoftmax && !c_.is_normalized;
      for (int64_t i = 0; i < c_.chosen; ++i) weights[i] = power(experts[i]);
      if (of_all) {
        for (int64_t e = 0; e < c_.count; ++e) total += power(e);
      } else {
        for (int64_t i = 0; i < c_.chosen; ++i) total += weights[i];
      }
    } else {
      for (int64_t i = 0; i < c_.chosen; ++i) weights[i] = values[experts[i]];
      for (int64_t i = 0; i < c_.chosen; ++i) total += weights[i];
      total = c_.is_normalized ? total + c_.epsilon : 1.0f;
    }
    for (int64_t i = 0; i < c_.chosen; ++i) weights[i] = weights[i] / total * c_.scale;
    if (scales_ == nullptr) return;
    for (int64_t i = 0; i < c_.chosen; ++i) weights[i] *= scales_[experts[i]];
  }

  const ExpertsConfig& c_;
  const float* const bias_;
  const float* const scales_;
};

class Experts {
 public:
  Experts(const ExpertsParams& params, const ExpertsBuffers& buffers)
      : p_(params), c_(*params.config), w_(*params.weights), b_(buffers) {}

  void run() {
    choose();
    sort_slots();
    const LinearFormat up = w_.up.first.shape.format, gate = w_.gate.first.shape.format;
    prepare(up);
    if (up == gate) {
      multiply_inner(/*with_up=*/true, /*with_gate=*/true);
    } else {
      multiply_inner(true, false);
      prepare(gate);
      multiply_inner(false, true);
    }
    prepare_inner();
    multiply_down();
    add();
  }

 private:
  int64_t slots() const { return p_.rows * c_.chosen; }
  int64_t first_slot(int64_t expert) const { return b_.ends[expert]; }
  int64_t rows_of(int64_t expert) const { return b_.ends[expert + 1] - b_.ends[expert]; }

  void choose() const {
    LinearOutput logits;
    logits.y = b_.logits;
    logits.y_stride = c_.count;
    logits.bias = w_.router_bias;
    const float* const x = p_.router_x == nullptr ? p_.x : p_.router_x;
    const LinearInput rows = {x, nullptr, 4 * p_.model_size, p_.rows};
    packed_linear(w_.router, rows, logits);
    const RowChoice choice(c_, w_);
    const auto dot = LMD_SELECT_KERNEL(decoder, dot_row);
    const double row_nanoseconds =
        2.0 * static_cast<double>(c_.count) * static_cast<double>(c_.chosen + 2);
    parallel_rows(p_.rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * c_.chosen;
        choice.choose(b_.logits + row * c_.count, b_.experts + at, b_.weights + at);
        if (w_.shared_gate == nullptr) continue;
        const float logit = dot(p_.x + row * p_.model_size, w_.shared_gate, p_.model_size);
        b_.gates[row] = 1.0f / (1.0f + std::exp(-logit));
      }
    });
  }

  void sort_slots() {
    std::fill_n(b_.ends, c_.count + 1, 0);
    for (int64_t i = 0; i < slots(); ++i) ++b_.ends[b_.experts[i] + 1];
    num_used_ = 0;
    for (int64_t e = 0; e < c_.count; ++e) {
      if (b_.ends[e + 1] > 0) b_.used[num_used_++] = static_cast<int32_t>(e);
      b_.ends[e + 1] += b_.ends[e];
    }
    for (int64_t row = 0; row < p_.rows; ++row) {
      for (int64_t i = row * c_.chosen; i < (row + 1) * c_.chosen; ++i) {
        const int32_t slot = b_.ends[b_.experts[i]]++;
        b_.slots[i] = slot;
        b_.rows[slot] = static_cast<int32_t>(row);
      }
    }
    for (int64_t e = c_.count; e > 0; --e) b_.ends[e] = b_.ends[e - 1];
    b_.ends[0] = 0;
  }

  // Rows of x as products of a format read them: of an expert with several side by side.
  void prepare(LinearFormat format) {
    const int64_t size = p_.model_size, piece_bytes = most_bytes(size, kPieceRows);
    const bool is_in_place = format == LinearFormat::kFloat32;
    const auto piece = [&](int64_t number) {
      const int64_t first = number * kPieceRows;
      return prepare_linear_input(format, p_.x + first * size, size,
                                  std::min(kPieceRows, p_.rows - first), size,
                                  static_cast<char*>(b_.row_inputs) + number * piece_bytes);
    };
    const LinearInput first = piece(0);
    const int64_t pieces = (p_.rows + kPieceRows - 1) / kPieceRows;
    if (!is_in_place) {
      const double nanoseconds =
          tuning::kNanosecondsPerCopy * kPieceRows * static_cast<double>(size);
      parallel_rows(pieces - 1, nanoseconds, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) piece(i + 1);
      });
    }
    // In every piece rows begin at the same place, one after another, as up to 16 rows lie: their
    // scales take as much room, and one row is rotated at a time.
    static_assert(kPieceRows <= 16 && kPieceRows <= linear::tuning::kPreparedRows);
    const auto row_input = [&](int64_t row) {
      const int64_t number = is_in_place ? 0 : row / kPieceRows;
      const int64_t place = is_in_place ? row : row % kPieceRows;
      const int64_t at = number * piece_bytes;
      return LinearInput{static_cast<const char*>(first.rows) + at + place * first.row_bytes,
                         first.scales == nullptr ? nullptr : first.scales + at / 4 + place,
                         first.row_bytes, 1};
    };
    const auto scales_of = [&](int64_t expert) {
      return reinterpret_cast<float*>(static_cast<char*>(b_.slot_inputs) +
                                      first_slot(expert) * slot_bytes(size));
    };
    const auto rows_at = [&](int64_t expert) {
      return reinterpret_cast<char*>(scales_of(expert)) + rounded_up(4 * rows_of(expert));
    };
    for (int64_t i = 0; i < num_used_; ++i) {
      const int64_t expert = b_.used[i], rows = rows_of(expert);
      b_.inputs[expert] =
          rows == 1
              ? row_input(b_.rows[first_slot(expert)])
              : LinearInput{rows_at(expert), first.scales == nullptr ? nullptr : scales_of(expert),
                            first.row_bytes, rows};
    }
    parallel_rows(slots(), 1.0 + 0.1 * static_cast<double>(first.row_bytes),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t slot = begin; slot < end; ++slot) {
                      const int64_t expert = expert_of(slot), place = slot - first_slot(expert);
                      if (rows_of(expert) == 1) continue;
                      const LinearInput from = row_input(b_.rows[slot]);
                      std::memcpy(rows_at(expert) + place * from.row_bytes, from.rows,
                                  static_cast<size_t>(from.row_bytes));
                      if (from.scales != nullptr) scales_of(expert)[place] = from.scales[0];
                    }
                  });
  }

  int64_t expert_of(int64_t slot) const {
    return std::upper_bound(b_.ends, b_.ends + c_.count + 1, static_cast<int32_t>(slot)) - b_.ends -
           1;
  }

  // multiply(expert, first panel, last panel) for all panels of all experts that have rows.
  template <class Multiply>
  void for_panels(const linear::PackedLinearShape& shape, int64_t matrices,
                  const Multiply& multiply) const {
    const int64_t panels = packed_linear_panels(shape);
    const auto cost = [&](int64_t expert) { return std::max(kRowsOfOneRead, rows_of(expert)); };
    int64_t total = 0;
    for (int64_t i = 0; i < num_used_; ++i) total += panels * cost(b_.used[i]);
    const double bytes = static_cast<double>(packed_linear_bytes(shape)) *
                         static_cast<double>(matrices) / static_cast<double>(panels);
    const double nanoseconds = 0.01 + bytes / linear::tuning::kProductBytesPerNanosecond;
    parallel_rows(
        total, nanoseconds,
        [&](int64_t begin, int64_t end) {
          int64_t at = 0;
          for (int64_t i = 0; i < num_used_ && at < end; ++i) {
            const int64_t expert = b_.used[i], each = cost(expert);
            // A panel is of the part that its first unit is in.
            const auto panel_at = [&](int64_t unit) {
              return std::clamp<int64_t>((unit - at + each - 1) / each, 0, panels);
            };
            const int64_t first = begin <= at ? 0 : panel_at(begin);
            const int64_t last = panel_at(end);
            if (first < last) multiply(expert, first, last);
            at += panels * each;
          }
        },
        linear::tuning::kTaskNanoseconds);
  }

  LinearOutput output(float* y, int64_t expert, int64_t columns,
                      const ExpertMatrices& matrices) const {
    LinearOutput output;
    output.y = y + first_slot(expert) * columns;
    output.y_stride = columns;
    output.bias = matrices.bias_at(expert);
    return output;
  }

  void multiply_inner(bool with_up, bool with_gate) const {
    const linear::PackedLinearShape shape = (with_gate ? w_.gate : w_.up).first.shape;
    const int64_t width = linear::linear_kernels_of(shape.format).tile(shape.format).width;
    const auto clamp = LMD_SELECT_KERNEL(decoder, clamp_gates);
    for_panels(shape, with_up + with_gate, [&](int64_t expert, int64_t begin, int64_t end) {
      const LinearInput& input = b_.inputs[expert];
      if (with_up) {
        packed_linear_range(w_.up.at(expert), input, output(b_.up, expert, c_.size, w_.up), begin,
                            end);
      }
      if (!with_gate) return;
      LinearOutput gate = output(b_.inner, expert, c_.size, w_.gate);
      const float* const up = b_.up + first_slot(expert) * c_.size;
      if (!c_.is_clamped) {
        gate.activation = p_.activation;
        gate.multiplier = up;
        gate.multiplier_stride = c_.size;
      }
      packed_linear_range(w_.gate.at(expert), input, gate, begin, end);
      if (!c_.is_clamped) return;
      const int64_t column = begin * width;
      clamp({gate.y + column, up + column, c_.size, rows_of(expert),
             std::min(c_.size, end * width) - column, c_.alpha, c_.limit});
    });
  }

  void prepare_inner() const {
    const LinearFormat format = w_.down.first.shape.format;
    const double nanoseconds = tuning::kNanosecondsPerCopy * static_cast<double>(c_.size);
    parallel_rows(slots(), nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < num_used_; ++i) {
        const int64_t expert = b_.used[i], first = first_slot(expert);
        if (first < begin || first >= end) continue;
        b_.inputs[expert] = prepare_linear_input(
            format, b_.inner + first * c_.size, c_.size, rows_of(expert), c_.size,
            static_cast<char*>(b_.slot_inputs) + first * slot_bytes(c_.size));
      }
    });
  }

  void multiply_down() const {
    for_panels(w_.down.first.shape, 1, [&](int64_t expert, int64_t begin, int64_t end) {
      packed_linear_range(w_.down.at(expert), b_.inputs[expert],
                          output(b_.outputs, expert, p_.model_size, w_.down), begin, end);
    });
  }

  void add() const {
    const auto sum = LMD_SELECT_KERNEL(decoder, sum_experts);
    const int64_t size = p_.model_size;
    const double row_nanoseconds =
        tuning::kNanosecondsPerCopy * static_cast<double>(size * (c_.chosen + 1));
    parallel_rows(p_.rows, row_nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        ExpertsSumParams params;
        params.outputs = b_.outputs;
        params.slots = b_.slots + row * c_.chosen;
        params.weights = b_.weights + row * c_.chosen;
        params.chosen = c_.chosen;
        params.size = size;
        params.shared = c_.shared_size > 0 ? b_.shared + row * size : nullptr;
        params.gate = w_.shared_gate != nullptr ? b_.gates[row] : 1.0f;
        params.residual = p_.residual == nullptr ? nullptr : p_.residual + row * size;
        params.to = p_.out + row * size;
        sum(params);
      }
    });
  }

  const ExpertsParams& p_;
  const ExpertsConfig& c_;
  const ExpertsWeights& w_;
  const ExpertsBuffers& b_;
  int64_t num_used_ = 0;
};

}  // namespace

size_t split_experts_buffers(const ExpertsConfig& config, int64_t model_size, int64_t rows,
                             void* memory, ExpertsBuffers* b) {
  if (config.count == 0) return 0;
  SplitMemory split(memory);
  const int64_t slots = rows * config.chosen;
  split.take(&b->logits, rows * config.count);
  split.take(&b->experts, slots);
  split.take(&b->weights, slots);
  split.take(&b->slots, slots);
  split.take(&b->rows, slots);
  split.take(&b->ends, config.count + 1);
  split.take(&b->used, config.count);
  split.take(&b->inputs, config.count);
  split.take(&b->up, slots * config.size);
  split.take(&b->inner, slots * config.size);
  split.take(&b->outputs, slots * model_size);
  split.take(&b->shared, config.shared_size > 0 ? rows * model_size : 0);
  split.take(&b->gates, rows);
  split.take(&b->router_rows, rows * model_size);
  unsigned char *row_inputs = nullptr, *slot_inputs = nullptr;
  const int64_t pieces = (rows + kPieceRows - 1) / kPieceRows;
  split.take(&row_inputs, pieces * most_bytes(model_size, kPieceRows));
  split.take(&slot_inputs, slots * std::max(slot_bytes(model_size), slot_bytes(config.size)));
  b->row_inputs = row_inputs;
  b->slot_inputs = slot_inputs;
  return split.used();
}

void experts_cpu(const ExpertsParams& params, const ExpertsBuffers& buffers) {
  if (params.rows > 0) Experts(params, buffers).run();
}

}  // namespace lmdecode::decoder
