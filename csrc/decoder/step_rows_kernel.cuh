// The kernels between the products of a decoder's step on a GPU: embedding, residuals and norms,
// activations.
#pragma once

#include <cmath>

#include "decoder/step_block.cuh"

namespace lmdecode::decoder::step_cuda_kernels {

// write(i, read(i)) for the elements i of a thread, in order: it reads some before it writes the
// first, so that these loads do not wait for each other.
template <class Read, class Write>
__device__ __forceinline__ void each_of_thread(int64_t size, Read read, Write write) {
  constexpr int kBatch = step_cuda_tuning::kElementsInFlight;
  for (int64_t first = threadIdx.x; first < size; first += kBatch * blockDim.x) {
    float values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = first + b * blockDim.x;
      values[b] = i < size ? read(i) : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t i = first + b * blockDim.x;
      if (i < size) write(i, values[b]);
    }
  }
}

// A block a row. A thread reads back only what it has written itself.
template <class T>
__global__ void __launch_bounds__(kThreads) decoder_add_norm_kernel(const StepAddNormParams p) {
  StepStorage& storage = cuda::shared_storage<StepStorage>();
  const float size = static_cast<float>(p.size);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float* const x = p.x + row * p.size;
    T* const out = static_cast<T*>(p.out) + row * p.size;
    const T* const delta =
        p.delta == nullptr ? nullptr : static_cast<const T*>(p.delta) + row * p.size;
    float sum = 0.0f;
    each_of_thread(
        p.size,
        [&](int64_t i) {
          float value = x[i];
          if (delta != nullptr) value += to_float(delta[i]);
          if (p.bias != nullptr) value += p.bias[i];
          return value;
        },
        [&](int64_t i, float value) {
          x[i] = value;
          if (p.gamma == nullptr) out[i] = ValueOf<T>::from(value);
          sum += value;
        });
    if (p.gamma == nullptr) continue;
    const float mean = p.rms_norm ? 0.0f : reduce_block(sum, storage.reduced, Sum()) / size;
    float squares = 0.0f;
    each_of_thread(
        p.size, [&](int64_t i) { return x[i] - mean; },
        [&](int64_t, float centered) { squares += centered * centered; });
    const float variance = reduce_block(squares, storage.reduced, Sum()) / size;
    const float factor = 1.0f / sqrtf(variance + p.epsilon);
    each_of_thread(
        p.size,
        [&](int64_t i) {
          const float value = (x[i] - mean) * factor * p.gamma[i];
          return p.beta == nullptr ? value : value + p.beta[i];
        },
        [&](int64_t i, float value) {
          if (!p.norm_first) x[i] = value;
          out[i] = ValueOf<T>::from(value);
        });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) decoder_embed_kernel(const StepEmbedParams p) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows * p.size;
       i += threads) {
    const int64_t row = i / p.size, d = i % p.size;
    const int64_t token = p.tokens[row], position = p.positions[row] + p.position_offset;
    float value = 0.0f;
    if (token >= 0 && token < p.vocab) {
      value = to_float(static_cast<const T*>(p.embedding)[token * p.size + d]) * p.scale;
    }
    if (p.position_table != nullptr && position >= 0 && position < p.num_positions) {
      value += p.position_table[position * p.size + d];
    }
    p.x[i] = value;
  }
}

__device__ __forceinline__ float activated(float x, StepActivation activation) {
  switch (activation) {
    case StepActivation::kRelu:
      return x > 0.0f || x != x ? x : 0.0f;
    case StepActivation::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case StepActivation::kGeluTanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default:
      return x / (1.0f + expf(-x));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) decoder_activate_kernel(const StepActivateParams p) {
  T* const up = static_cast<T*>(p.up);
  const T* const gate = static_cast<const T*>(p.gate);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count;
       i += threads) {
    const float value = to_float(up[i]);
    up[i] = ValueOf<T>::from(gate == nullptr ? activated(value, p.activation)
                                             : activated(to_float(gate[i]), p.activation) * value);
  }
}

}  // namespace lmdecode::decoder::step_cuda_kernels
