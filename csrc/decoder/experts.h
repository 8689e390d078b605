// The experts of a feed-forward layer on the rows of a step.
//
// Rows are sorted by expert: the rows of an expert are one product over its panels. Threads share
// the panels of all experts that some row has, by the bytes and products that these take. A row
// adds its experts in their ascending order. So its bits depend neither on other rows nor on
// threads.
#pragma once

#include "decoder/decoder_config.h"

namespace lmdecode::decoder {

// Scratch for a number of rows; each part aligned to 64. A slot is a row of one of its experts;
// slots are sorted by expert, then by row.
struct ExpertsBuffers {
  float* logits = nullptr;     // [rows, count]
  int32_t* experts = nullptr;  // [rows, chosen], ascending
  float* weights = nullptr;    // [rows, chosen]
  int32_t* slots = nullptr;    // [rows, chosen]: where a row's experts stand
  int32_t* rows = nullptr;     // [slots]: of which row
  int32_t* ends = nullptr;     // [count + 1]: slots of expert e are [ends[e], ends[e + 1])
  int32_t* used = nullptr;     // [count]: experts that have slots
  linear::LinearInput* inputs = nullptr;  // [count]: rows of these, prepared
  float* up = nullptr;                    // [slots, size]
  float* inner = nullptr;                 // [slots, size]
  float* outputs = nullptr;               // [slots, model_size]
  float* shared = nullptr;                // [rows, model_size]: of the shared expert
  float* gates = nullptr;                 // [rows]: of the shared expert
  float* router_rows = nullptr;           // [rows, model_size]: the router's input
  void* row_inputs = nullptr;             // prepared rows, by pieces
  void* slot_inputs = nullptr;            // of the slots, gathered or prepared
};

size_t split_experts_buffers(const ExpertsConfig& config, int64_t model_size, int64_t rows,
                             void* memory, ExpertsBuffers* buffers);

// What is computed of rows of one layer: out [rows, model_size] = residual + the sum of the row's
// experts + the shared expert's, buffers.shared where config has one. residual may be null or out;
// out may be x: it is written last.
struct ExpertsParams {
  const ExpertsConfig* config = nullptr;
  const ExpertsWeights* weights = nullptr;
  linear::Activation activation = linear::Activation::kSilu;
  int64_t model_size = 0;
  int64_t rows = 0;
  const float* x = nullptr;
  const float* router_x = nullptr;  // the router's input; null: x
  const float* residual = nullptr;
  float* out = nullptr;
};

void experts_cpu(const ExpertsParams& params, const ExpertsBuffers& buffers);

}  // namespace lmdecode::decoder
