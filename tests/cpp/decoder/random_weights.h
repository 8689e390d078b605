// Weights of decoders for tests: random, and the same ones for the same calls in the same order.
#pragma once

#include <memory>
#include <vector>

#include "decoder/decoder_config.h"
#include "exact_memory.h"

namespace lmdecode::decoder {

class RandomWeights {
 public:
  // [count], from -scale to scale. What is returned here and below lives as long as this.
  float* floats(int64_t count, float scale) {
    floats_.push_back(std::make_unique<Exactly<float>>(count));
    for (int64_t i = 0; i < count; ++i) (*floats_.back())[i] = scale * random_.next();
    return floats_.back()->get();
  }

  LinearWeights linear(int64_t in, int64_t out, linear::LinearFormat format) {
    const linear::PackedLinearShape shape{in, out, format};
    packed_.push_back(
        std::make_unique<Exactly<uint8_t>>(static_cast<int64_t>(packed_linear_bytes(shape))));
    pack_linear(shape, floats(in * out, 1.0f), in, 1, packed_.back()->get());
    LinearWeights weights;
    weights.parts[0] = {shape, packed_.back()->get()};
    weights.out_features = out;
    weights.bias = floats(out, 0.3f);
    return weights;
  }

 private:
  Random random_;
  std::vector<std::unique_ptr<Exactly<float>>> floats_;
  std::vector<std::unique_ptr<Exactly<uint8_t>>> packed_;
};

}  // namespace lmdecode::decoder
