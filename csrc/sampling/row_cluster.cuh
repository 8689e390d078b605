// The blocks that work on one row: a thread block cluster, its shared memory and its exchanges.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "sampling/sampling_cuda_tuning.h"

namespace lmdecode::sampling::cuda_kernels {

constexpr int kBins = 1 << cuda_tuning::kDigitBits;
constexpr int kMaxWarps = 32;
constexpr int kMaxWords = 4;  // of a value that goes through RowCluster::reduce

// 64-bit words as the atomics of CUDA take them.
using Word = unsigned long long;

// Logits of a block's slice, in any order; row_list.cuh.
struct RowList {
  float logit[cuda_tuning::kListedLogits];
  uint32_t token[cuda_tuning::kListedLogits];
  uint32_t size;
};

// The shared memory of a block; the cached part of its slice of the row follows it.
struct alignas(16) RowStorage {
  // A bin is low + high * 2^32: 64-bit atomics on shared memory would be loops.
  struct Histogram {
    uint32_t low[kBins];
    uint32_t high[kBins];
  };
  union {
    Histogram histogram[2];                // by phase
    Word ranked[cuda_tuning::kRankChunk];  // of the cluster's first block; rank_noise.cuh
  };
  Word warp_part[kMaxWarps][kMaxWords];
  Word block_part[2][kMaxWords];  // by phase
  Word found_above, found_at;     // radix_descent.cuh
  uint32_t found_digit;
  uint32_t ranked_size;
  RowList list;
};

// Every exchange is a phase: a block writes into buffers of the phase's parity, the cluster meets
// once, all blocks read all buffers. A buffer is written again two phases later, when the meeting
// between has made sure that all have read it: one meeting a phase is enough.
class RowCluster {
 public:
  __device__ RowCluster(RowStorage& storage, int size)
      : storage_(storage),
        size_(static_cast<unsigned>(size)),
        rank_(size > 1 ? cuda::cluster_rank() : 0) {}

  __device__ RowStorage& storage() { return storage_; }
  __device__ unsigned size() const { return size_; }
  __device__ unsigned rank() const { return rank_; }
  __device__ unsigned parity() const { return parity_; }

  __device__ void sync() {
    if (size_ == 1) {
      __syncthreads();
    } else {
      cuda::cluster_sync();
    }
  }

  // Ends the writing half of a phase; other blocks may now read the buffers of the returned parity.
  __device__ unsigned meet() {
    sync();
    const unsigned parity = parity_;
    parity_ ^= 1;
    return parity;
  }

  template <class P>
  __device__ P* at_rank(P* pointer, unsigned rank) const {
    return size_ == 1 ? pointer : cuda::map_shared_rank(pointer, rank);
  }

  // combine(a, b) over the values of all threads of the cluster, the same for all of them. Value is
  // a struct of Words; combine is associative and commutative, so the result does not depend on
  // the order.
  template <class Value, class Combine>
  __device__ Value reduce(Value value, Combine combine) {
    constexpr int kWords = sizeof(Value) / sizeof(Word);
    static_assert(sizeof(Value) % sizeof(Word) == 0 && kWords <= kMaxWords);
    const unsigned warps = blockDim.x / cuda::kWarpSize;
    value = combine_lanes(value, cuda::kWarpSize, combine);
    if (cuda::lane_id() == 0) put(storage_.warp_part[cuda::warp_id()], value);
#if !defined(LMD_PLANT_MISSING_BARRIER)  // tests leave it out to see that this is noticed
    __syncthreads();
#endif
    if (cuda::warp_id() == 0) {
      value = get<Value>(storage_.warp_part[static_cast<unsigned>(cuda::lane_id()) % warps]);
      value = combine_lanes(value, warps, combine);
      if (cuda::lane_id() == 0) put(storage_.block_part[parity_], value);
    }
    const unsigned parity = meet();
    // Lane i reads the part of block i: all at once.
    const unsigned rank = static_cast<unsigned>(cuda::lane_id()) % size_;
    return combine_lanes(get<Value>(at_rank(storage_.block_part[parity], rank)), size_, combine);
  }

 private:
  template <class Value>
  struct Words {
    Word word[sizeof(Value) / sizeof(Word)];
  };

  // Combines the values of `lanes` neighbours, a power of two; each gets the result.
  template <class Value, class Combine>
  static __device__ Value combine_lanes(Value value, unsigned lanes, Combine combine) {
#pragma unroll 1
    for (int offset = static_cast<int>(lanes) / 2; offset > 0; offset /= 2) {
      value = combine(value, shuffle(value, offset));
    }
    return value;
  }

  template <class Value>
  static __device__ Value shuffle(const Value& value, int offset) {
    Words<Value> words = __builtin_bit_cast(Words<Value>, value);
    for (Word& word : words.word) word = __shfl_xor_sync(cuda::kFullMask, word, offset);
    return __builtin_bit_cast(Value, words);
  }

  template <class Value>
  static __device__ void put(Word* to, const Value& value) {
    const Words<Value> words = __builtin_bit_cast(Words<Value>, value);
    for (unsigned i = 0; i < sizeof(Value) / sizeof(Word); ++i) to[i] = words.word[i];
  }

  template <class Value>
  static __device__ Value get(const Word* from) {
    Words<Value> words;
    for (unsigned i = 0; i < sizeof(Value) / sizeof(Word); ++i) words.word[i] = from[i];
    return __builtin_bit_cast(Value, words);
  }

  RowStorage& storage_;
  const unsigned size_;
  const unsigned rank_;
  unsigned parity_ = 0;
};

}  // namespace lmdecode::sampling::cuda_kernels
