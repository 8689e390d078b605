// A feed-forward layer of experts: sizes, switches, and where its weights are.
// docs/reference/causal_models.md lists which architectures set which of the switches.
#pragma once

#include <cstdint>

#include "linear/packed_linear.h"

namespace lmdecode::decoder {

// What the weights of a row's experts are made of: softmax of all logits, softmax of the chosen
// ones, or the sigmoid of each.
enum class RouterKind : int32_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2 };

struct ExpertsConfig {
  int64_t count = 0;        // 0: no layer has experts
  int64_t chosen = 0;       // experts of a row
  int64_t size = 0;         // inner features of an expert
  int64_t shared_size = 0;  // of the expert that each row has, ffn_up and so on; 0: none
  RouterKind router = RouterKind::kSoftmax;
  bool is_normalized = false;  // weights are divided by their sum + epsilon
  bool is_clamped = false;     // see below
  float epsilon = 0.0f;
  float scale = 1.0f;  // what weights are multiplied by at last
  // Of experts that are clamped: min(gate, limit) * sigmoid(alpha * min(gate, limit)) *
  // (clamp(up, -limit, limit) + 1) instead of activation(gate) * up.
  float alpha = 0.0f;
  float limit = 0.0f;
};

// The matrices of one kind of all experts, one behind the other, of one format.
struct ExpertMatrices {
  linear::PackedLinear first;
  int64_t stride = 0;           // bytes from an expert's to the next one's
  const float* bias = nullptr;  // [count, out_features] or null

  linear::PackedLinear at(int64_t expert) const {
    return {first.shape, static_cast<const char*>(first.packed) + expert * stride};
  }
  const float* bias_at(int64_t expert) const {
    return bias == nullptr ? nullptr : bias + expert * first.shape.out_features;
  }
};

struct ExpertsWeights {
  linear::PackedLinear router;         // [count, model_size] float32; no bytes: no experts
  const float* router_bias = nullptr;  // [count] or null: added to logits
  const float* choice_bias = nullptr;  // [count] or null: added to what experts are chosen by
  const float* scales = nullptr;       // [count] or null: weights are multiplied by them at last
  ExpertMatrices gate;                 // [size, model_size]
  ExpertMatrices up;                   // likewise
  ExpertMatrices down;                 // [model_size, size]
  const float* shared_gate = nullptr;  // [model_size] or null: its sigmoid scales the shared one

  bool are_there() const { return router.packed != nullptr; }
};

}  // namespace lmdecode::decoder
