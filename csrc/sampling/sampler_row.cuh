// The row of a Sampler as a block of threads sees it: the logits as they came, and a copy in which
// they count, which the stages narrow.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "sampling/adaptive_p.h"
#include "sampling/row_cluster.cuh"

namespace lmdecode::sampling::cuda_kernels {

// Four logits that a thread has read; the loop that sees them stands in the code once.
struct FourLogits {
  float first, second, third, fourth;

  __device__ void shift() { first = second, second = third, third = fourth; }
};

// As they came: of dtype T, any stride.
template <class T>
struct RawRow {
  const T* x;
  int64_t stride;
  uint32_t vocab;

  __device__ float at(int64_t token) const { return to_float(x[token * stride]); }

  // see(logit, token) for each logit, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const RawRow row = *this;  // in registers, whatever see() writes
    const auto load = [&](uint32_t token) {
      return row.at(token < row.vocab ? token : threadIdx.x);
    };
    for (uint32_t token = threadIdx.x; token < row.vocab;) {
      const uint32_t step = blockDim.x;
      FourLogits four{load(token), load(token + step), load(token + 2 * step),
                      load(token + 3 * step)};
#pragma unroll 1
      for (int i = 0; i < 4 && token < row.vocab; ++i, token += step) {
        see(four.first, token);
        four.shift();
      }
    }
  }
};

// After the edits, without NaN, in the block's scratch memory. Tokens that are not left are -inf.
// Passes give each token to the same thread, so that none waits for another between them.
struct EditedRow {
  // [vocab] logits, probabilities where these are adapted; whole vectors of four, aligned to 16.
  float* value;
  uint32_t vocab;
  bool adapts = false;  // adaptive-p makes other logits of the tokens that are left
  float target = 0.0f;
  // Few tokens, among which all are that are left; 0: none are listed.
  const uint32_t* list = nullptr;
  uint32_t listed = 0;

  __device__ bool has(uint32_t token) const { return value[token] > minus_infinity(); }

  // The logit of a token that is left.
  __device__ float at(int64_t token) const { return logit_of(value[token]); }

  // see(logit, token) for each token that is left, once, by any thread.
  template <class See>
  __device__ void each(See see) const {
    const EditedRow row = *this;  // in registers, whatever see() writes
    const auto look = [&](float value_of_token, uint32_t token) {
      if (value_of_token > minus_infinity()) see(row.logit_of(value_of_token), token);
    };
    // Vectors of four, two of them on their way at once; or tokens of the list.
    const bool is_listed = row.list != nullptr;
    const uint32_t count = is_listed ? row.listed : (row.vocab + 3) / 4;
    const uint32_t step = blockDim.x, round = is_listed ? step : 2 * step;
    const auto load = [&](uint32_t i) {
      const float4 four = reinterpret_cast<const float4*>(row.value)[i];
      return FourLogits{four.x, four.y, four.z, four.w};
    };
    for (uint32_t i = threadIdx.x; i < count; i += round) {
      FourLogits four{}, next{};
      if (is_listed) {
        four.first = row.value[row.list[i]];
      } else {
        four = load(i);
        next = load(i + step < count ? i + step : i);
      }
#pragma unroll 1
      for (uint32_t v = i; v < count && v < i + round; v += step, four = next) {
        uint32_t token = is_listed ? row.list[v] : 4 * v;
        const uint32_t size = is_listed ? 1 : row.vocab - token;
#pragma unroll 1
        for (const uint32_t end = token + (size < 4 ? size : 4); token < end; ++token) {
          look(four.first, token);
          four.shift();
        }
      }
    }
  }

  // Drops the tokens for which drops(logit, token).
  template <class Drops>
  __device__ void drop(Drops drops) const {
    each([to = value, &drops](float logit, uint32_t token) {
      if (drops(logit, token)) to[token] = minus_infinity();
    });
  }

  // The same; where few stay, passes see these alone from now on. All threads of the block.
  template <class Drops>
  __device__ void drop_and_list(RowStorage& storage, Drops drops) {
    if (list != nullptr) return drop(drops);
    constexpr uint32_t kRoom = cuda_tuning::kListedLogits;
    RowList& to = storage.list;
    __syncthreads();  // its size, of a time before, has been read
    if (threadIdx.x == 0) to.size = 0;
    __syncthreads();
    bool has_room = true;
    each([&, values = value](float logit, uint32_t token) {
      if (drops(logit, token)) {
        values[token] = minus_infinity();
      } else if (has_room) {
        const uint32_t place = atomicAdd(&to.size, 1u);
        has_room = place < kRoom;
        if (has_room) to.token[place] = token;
      }
    });
    __syncthreads();
    if (to.size > kRoom) return;
    list = to.token;
    listed = to.size;
  }

 private:
  __device__ float logit_of(float value_of_token) const {
    return adapts ? adapted_logit(value_of_token, target) : value_of_token;
  }
};

}  // namespace lmdecode::sampling::cuda_kernels
