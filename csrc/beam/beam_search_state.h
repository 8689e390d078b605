// The state and the parameters of beam searches as plain pointers; python/lmdecode/beam/state.py
// describes each tensor. A slot is one search. Every tensor is contiguous.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace lmdecode::beam {

enum class BeamDialect : int32_t { kGenerate = 0, kScorer = 1, kFairseq = 2 };

// Values of BeamSearchParameters::early_stopping.
constexpr int64_t kEarlyStoppingTrue = 1;
constexpr int64_t kEarlyStoppingNever = 2;

// Bits of the status of a slot, in addition to log_softmax_top_k's.
constexpr uint8_t kBeamStatusContinuations = 8;  // fewer candidates go on than there are beams
constexpr uint8_t kBeamStatusCapacity = 16;      // the sequences are full; on a GPU alone

struct BeamSearchState {
  int64_t slots = 0;
  int64_t beams = 0;
  int64_t hypotheses = 0;
  int64_t capacity = 0;
  int64_t log_prob_capacity = 0;    // capacity, or 0: not kept
  int64_t beam_index_capacity = 0;  // likewise

  int64_t* sequences = nullptr;                // [slots, beams, capacity]
  float* log_probs = nullptr;                  // [slots, beams, log_prob_capacity]
  int32_t* beam_indices = nullptr;             // [slots, beams, beam_index_capacity]
  float* scores = nullptr;                     // [slots, beams]
  int64_t* lengths = nullptr;                  // [slots]
  int64_t* hypothesis_sequences = nullptr;     // [slots, hypotheses, capacity]
  float* hypothesis_log_probs = nullptr;       // [slots, hypotheses, log_prob_capacity]
  int32_t* hypothesis_beam_indices = nullptr;  // [slots, hypotheses, beam_index_capacity]
  int64_t* hypothesis_lengths = nullptr;       // [slots, hypotheses]
  double* hypothesis_scores = nullptr;         // [slots, hypotheses]
  int64_t* hypothesis_numbers = nullptr;       // [slots, hypotheses]
  double* worst_scores = nullptr;              // [slots]
  uint8_t* done = nullptr;                     // [slots]
  uint8_t* status = nullptr;                   // [slots]
};

struct BeamSearchParameters {
  const int64_t* num_beams = nullptr;       // [slots]
  const int64_t* num_hypotheses = nullptr;  // [slots]
  const int64_t* prompt_lengths = nullptr;  // [slots]
  const int64_t* max_lengths = nullptr;     // [slots]
  const double* length_penalty = nullptr;   // [slots]
  const int64_t* early_stopping = nullptr;  // [slots]
  const int64_t* end_tokens = nullptr;      // [slots, num_end_tokens]; below 0: none
  const int64_t* pad_tokens = nullptr;      // [slots]
  int64_t num_end_tokens = 0;
};

// [requests, columns] of the caller, any strides in elements.
template <class T>
struct RequestRows {
  const T* data = nullptr;
  int64_t request_stride = 0;
  int64_t stride = 1;

  LMD_HOST_DEVICE T at(int64_t request, int64_t column) const {
    return data[request * request_stride + column * stride];
  }
};

// The running sequences where the caller keeps them: [requests, beams, length], any strides.
struct CallerSequences {
  bool is_given = false;
  const int64_t* data = nullptr;
  int64_t length = 0;
  int64_t request_stride = 0;
  int64_t beam_stride = 0;
  int64_t stride = 1;
};

}  // namespace lmdecode::beam
