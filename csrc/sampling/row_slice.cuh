// A block's slice of a row of logits: read from global memory once and kept in shared memory as
// far as there is room; the rest is read again in each pass (from L2, more often than not).
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "common/half.h"
#include "sampling/row_cluster.cuh"
#include "sampling/sampling_cuda_tuning.h"
#include "sampling/sampling_launch_plan.h"

namespace lmdecode::sampling::cuda_kernels {

// The elements of T that 16 bytes hold.
__device__ __forceinline__ float unpack(const uint4& bytes, int i, const float*) {
  return float_of(i == 0 ? bytes.x : i == 1 ? bytes.y : i == 2 ? bytes.z : bytes.w);
}
template <class T>
__device__ __forceinline__ float unpack(const uint4& bytes, int i, const T*) {
  const unsigned pair = i < 2 ? bytes.x : i < 4 ? bytes.y : i < 6 ? bytes.z : bytes.w;
  return to_float(T{static_cast<uint16_t>(i % 2 ? pair >> 16 : pair)});
}

template <class T>
class RowSlice {
 public:
  static constexpr uint32_t kPerVector = 16 / sizeof(T);

  // row: the logits of all tokens of the row, `stride` elements apart. cache: room for plan.cached
  // elements, sampling_cache_bytes(), aligned to 16.
  __device__ RowSlice(const T* row, int64_t stride, uint32_t vocab, unsigned rank,
                      const SamplingLaunchPlan& plan, unsigned char* cache)
      : row_(row), stride_(stride) {
    const int64_t begin = rank * plan.slice;
    begin_ = begin < vocab ? static_cast<uint32_t>(begin) : vocab;
    size_ = vocab - begin_;
    if (size_ > plan.slice) size_ = static_cast<uint32_t>(plan.slice);
    const uint32_t room = static_cast<uint32_t>(plan.cached);
    cache_ = reinterpret_cast<T*>(cache);
    if (stride != 1) {  // one by one
      head_ = size_;
      cached_ = size_ < room ? size_ : room;
      return;
    }
    // The cache is as far from a multiple of 16 as the row, so that vectors of one are vectors of
    // the other.
    const uint32_t lead = reinterpret_cast<uintptr_t>(row_ + begin_) % 16 / sizeof(T);
    cache_ += lead;
    head_ = (kPerVector - lead) % kPerVector;
    if (head_ > size_) head_ = size_;
    vectors_ = (size_ - head_) / kPerVector;
    if (room >= size_) {
      cached_ = size_;
      cached_vectors_ = vectors_;
    } else {
      cached_vectors_ = room > head_ ? (room - head_) / kPerVector : 0;
      cached_ = cached_vectors_ ? head_ + cached_vectors_ * kPerVector : 0;
    }
  }

  __device__ uint32_t begin() const { return begin_; }
  __device__ uint32_t size() const { return size_; }

  // Reads the slice and fills the cache: see(logit) for each logit, once, by any thread.
  template <class See>
  __device__ void load(See see) {
    for (uint32_t j = threadIdx.x; j < head_; j += blockDim.x) see(load_one(j));
    constexpr int kBatch = cuda_tuning::kLoadsInFlight;
    const uint4* from = global_vectors();
    uint4* to = cached_vectors();
    for (uint32_t v = threadIdx.x; v < vectors_; v += kBatch * blockDim.x) {
      uint4 bytes[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = v + b * blockDim.x;
        bytes[b] = __ldg(from + (at < vectors_ ? at : v));
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const uint32_t at = v + b * blockDim.x;
        if (at >= vectors_) break;
        if (at < cached_vectors_) to[at] = bytes[b];
#pragma unroll
        for (uint32_t i = 0; i < kPerVector; ++i) see(unpack(bytes[b], i, row_));
      }
    }
    for (uint32_t j = tail() + threadIdx.x; j < size_; j += blockDim.x) see(load_one(j));
  }

  // see(logit, token) for each logit, or for those of the list, once, by any thread: load() and a
  // barrier come first.
  template <class See>
  __device__ void each(See see) const {
    const uint32_t single = list_ != nullptr ? listed_ : singles();
    for (uint32_t i = threadIdx.x; i < single; i += blockDim.x) {
      const uint32_t j = list_ != nullptr ? list_->token[i] - begin_ : single_at(i);
      see(list_ != nullptr ? list_->logit[i] : (*this)[j], begin_ + j);
    }
    if (list_ != nullptr) return;
    const uint4* from = global_vectors();
    const uint4* cache = cached_vectors();
    for (uint32_t v = threadIdx.x; v < vectors_; v += blockDim.x) {
      const uint4 bytes = v < cached_vectors_ ? cache[v] : __ldg(from + v);
      const uint32_t token = begin_ + head_ + v * kPerVector;
#pragma unroll
      for (uint32_t i = 0; i < kPerVector; ++i) see(unpack(bytes, i, row_), token + i);
    }
  }

  // The same row, one logit at a time: for rare passes, whose code is not to be inlined eight
  // times.
  struct OneByOne {
    const RowSlice& slice;
    template <class See>
    __device__ void each(See see) const {
      const RowList* const list = slice.list_;
      const uint32_t count = list != nullptr ? slice.listed_ : slice.size_;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        const uint32_t token = list != nullptr ? list->token[i] : slice.begin_ + i;
        see(list != nullptr ? list->logit[i] : slice[i], token);
      }
    }
  };
  __device__ OneByOne one_by_one() const { return {*this}; }

  // see(logits, first) for tokens first to first + 3, one Philox block. Tokens outside the slice or
  // the list are NaN.
  template <class See>
  __device__ void each_quad(See see) const {
    float logits[4];
    if (list_ != nullptr) {
      for (uint32_t i = threadIdx.x; i < listed_; i += blockDim.x) {
        const uint32_t token = list_->token[i];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          logits[j] = token % 4 == j ? list_->logit[i] : float_of(0x7fc00000u);
        }
        see(logits, token / 4 * 4);
      }
      return;
    }
    const uint32_t end = (begin_ + size_ + 3) / 4;
    const bool is_aligned = vectors_ > 0 && (begin_ + head_) % 4 == 0;
    for (uint32_t quad = begin_ / 4 + threadIdx.x; quad < end; quad += blockDim.x) {
      const uint32_t first = 4 * quad - begin_;  // before the slice: far beyond it
      if (is_aligned && first < cached_ && cached_ - first >= 4) {
        const uint4 bytes = quad_at(cache_ + first);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) logits[j] = unpack(bytes, j, row_);
      } else {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          logits[j] = first + j < size_ ? (*this)[first + j] : float_of(0x7fc00000u);
        }
      }
      see(logits, 4 * quad);
    }
  }

  // each() restricted to wanted(logit), which few logits are. Requires that there is no list.
  template <class Wanted, class See>
  __device__ void each_of(Wanted wanted, See see) const {
    for (uint32_t i = threadIdx.x; i < singles(); i += blockDim.x) {
      const uint32_t j = single_at(i);
      if (wanted((*this)[j])) see((*this)[j], begin_ + j);
    }
    const uint4* from = global_vectors();
    const uint4* cache = cached_vectors();
    for (uint32_t v = threadIdx.x; v < vectors_; v += blockDim.x) {
      const uint4 bytes = v < cached_vectors_ ? cache[v] : __ldg(from + v);
      bool any = false;
#pragma unroll
      for (uint32_t i = 0; i < kPerVector; ++i) any |= wanted(unpack(bytes, i, row_));
      if (!any) continue;
      const uint32_t first = head_ + v * kPerVector;
#pragma unroll 1
      for (uint32_t j = first; j < first + kPerVector; ++j) {
        if (wanted((*this)[j])) see((*this)[j], begin_ + j);
      }
    }
  }

  // Restricts each() to the tokens of this list. Their order keys, in all blocks of the row, are in
  // [lowest, highest].
  __device__ void keep(const RowList& list, uint32_t lowest, uint32_t highest) {
    list_ = &list;
    listed_ = list.size;
    lowest_key_ = lowest;
    highest_key_ = highest;
  }

  __device__ void keep_all() {
    list_ = nullptr;
    lowest_key_ = 0;
    highest_key_ = 0xffffffffu;
  }

  __device__ bool has_list() const { return list_ != nullptr; }
  __device__ uint32_t lowest_key() const { return lowest_key_; }
  __device__ uint32_t highest_key() const { return highest_key_; }

  // value(logit, token) of each token to row_out[token], `filler` where there is a list without it:
  // whole vectors where they are aligned, with a streaming hint, since nothing here reads them
  // again.
  template <class ValueOf>
  __device__ void write(float* row_out, float filler, ValueOf value) const {
    float* out = row_out + begin_;
    if (list_ == nullptr) {
      write_each(out, [&](uint32_t j) { return value((*this)[j], begin_ + j); });
      return;
    }
    write_each(out, [&](uint32_t) { return filler; });
    __syncthreads();  // or a filler would come after
    for (uint32_t i = threadIdx.x; i < listed_; i += blockDim.x) {
      row_out[list_->token[i]] = value(list_->logit[i], list_->token[i]);
    }
  }

  // The j-th logit of the slice.
  __device__ float operator[](uint32_t j) const {
    return j < cached_ ? to_float(cache_[j]) : of_row(begin_ + j);
  }

  // A logit of the whole row.
  __device__ float of_row(uint32_t token) const {
    return to_float(row_[static_cast<int64_t>(token) * stride_]);
  }

 private:
  // at(j) of each place of the slice to out[j].
  template <class At>
  __device__ void write_each(float* out, At at) const {
    uint32_t head = (16 - reinterpret_cast<uintptr_t>(out) % 16) / sizeof(float) % 4;
    if (head > size_) head = size_;
    const uint32_t vectors = (size_ - head) / 4;
    for (uint32_t j = threadIdx.x; j < head; j += blockDim.x) __stcs(out + j, at(j));
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      const uint32_t j = head + 4 * v;
      __stcs(reinterpret_cast<float4*>(out + j),
             make_float4(at(j), at(j + 1), at(j + 2), at(j + 3)));
    }
    for (uint32_t j = head + 4 * vectors + threadIdx.x; j < size_; j += blockDim.x) {
      __stcs(out + j, at(j));
    }
  }

  // Four elements, as the first of a vector; aligned to their size.
  static __device__ uint4 quad_at(const T* from) {
    if constexpr (sizeof(T) == 4) return *reinterpret_cast<const uint4*>(from);
    const uint2 bytes = *reinterpret_cast<const uint2*>(from);
    return {bytes.x, bytes.y, 0, 0};
  }

  // Elements before and after the vectors, and the place of one of these.
  __device__ uint32_t singles() const { return size_ - vectors_ * kPerVector; }
  __device__ uint32_t single_at(uint32_t i) const {
    return i < head_ ? i : i + vectors_ * kPerVector;
  }
  __device__ uint32_t tail() const { return head_ + vectors_ * kPerVector; }
  __device__ const uint4* global_vectors() const {
    return reinterpret_cast<const uint4*>(row_ + begin_ + head_);
  }
  __device__ uint4* cached_vectors() const { return reinterpret_cast<uint4*>(cache_ + head_); }

  __device__ float load_one(uint32_t j) {
    const T logit = row_[static_cast<int64_t>(begin_ + j) * stride_];
    if (j < cached_) cache_[j] = logit;
    return to_float(logit);
  }

  const T* row_;
  int64_t stride_;
  T* cache_;
  uint32_t begin_, size_;
  uint32_t head_;  // elements before the first vector
  uint32_t vectors_ = 0;
  uint32_t cached_ = 0;  // elements [0, cached_) are in the cache
  uint32_t cached_vectors_ = 0;
  const RowList* list_ = nullptr;
  uint32_t listed_ = 0;
  uint32_t lowest_key_ = 0, highest_key_ = 0xffffffffu;
};

}  // namespace lmdecode::sampling::cuda_kernels
