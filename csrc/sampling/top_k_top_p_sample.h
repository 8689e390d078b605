// top_k_top_p_sample: rows of logits to token ids, fused and exact. docs/reference/sampling.md is
// the user's page.
//
// A row, in f32, is divided by its temperature, then filtered by top-k, top-p and min-p in this
// order. Each stage keeps a prefix of one order: value descending, then index ascending. The kept
// part of a row is therefore one position in that order, its "cut", and top-p searches for the
// position at which a sum of integer masses (common/exp_weight.h) is reached. The draw takes the
// kept token with the largest weight / noise, the lowest index at ties.
#pragma once

#include <cstdint>

#include "common/half.h"
#include "sampling/dialect.h"
#include "simd/kernel_levels.h"

namespace lmdecode::sampling {

// Bits of the status of a row.
constexpr uint8_t kStatusNan =
    1;  // a logit, or the noise of a kept token, was NaN (it counts as -inf)
constexpr uint8_t kStatusEmpty = 2;      // no logit above -inf: index 0, nothing kept
constexpr uint8_t kStatusParameter = 4;  // a parameter was NaN, or the temperature negative

// A parameter that is one number for all rows, or one for each row.
template <class T>
struct PerRow {
  T value{};                // where rows is null
  const T* rows = nullptr;  // [batch], any stride
  int64_t stride = 0;

  LMD_HOST_DEVICE T at(int64_t row) const { return rows ? rows[row * stride] : value; }
};

struct TopKTopPSampleParams {
  int64_t batch = 0;
  int64_t vocab = 0;  // >= 1, < 2^31

  const void* logits = nullptr;  // [batch, vocab] of dtype, strides in elements
  DType dtype = DType::kFloat32;
  int64_t logits_row_stride = 0;
  int64_t logits_vocab_stride = 1;

  PerRow<int64_t> top_k;            // <= 0 or >= vocab: off
  PerRow<float> top_p{1.0f};        // >= 1: off; <= 0: one token
  PerRow<float> min_p{0.0f};        // <= 0: off; >= 1: the maximum
  PerRow<float> temperature{1.0f};  // 0: argmax

  const float* q = nullptr;  // [batch, vocab] external exponential noise, or null
  int64_t q_row_stride = 0;
  int64_t q_vocab_stride = 1;
  float eps = 1e-8f;

  bool has_seed = false;
  PerRow<int64_t> seed;  // < 0: no noise in that row
  PerRow<int64_t> position;

  Dialect dialect = Dialect::kLmdecode;

  int64_t* index = nullptr;       // [batch]
  float* kept_logits = nullptr;   // [batch, vocab] contiguous, or null
  float* logprob = nullptr;       // [batch], or null
  int32_t* kept_count = nullptr;  // [batch]
  uint8_t* status = nullptr;      // [batch]
};

// Runs on the calling thread and torch's worker threads; the arguments have been checked.
void top_k_top_p_sample_cpu(const TopKTopPSampleParams& params);

// stream is a cudaStream_t; launches only.
void top_k_top_p_sample_cuda(const TopKTopPSampleParams& params, void* stream);

}  // namespace lmdecode::sampling

LMD_DECLARE_KERNELS(sampling,
                    void top_k_top_p_sample_rows(const TopKTopPSampleParams& params, int64_t begin,
                                                 int64_t end, void* workspace);)
