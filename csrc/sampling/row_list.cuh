// The few logits of a row that its k largest are among: what is looked for after a first pass is
// looked for in them.
#pragma once

#include "sampling/radix_descent.cuh"

namespace lmdecode::sampling::cuda_kernels {

// A row that has one logit a thread.
struct LogitsOfThreads {
  float mine;
  template <class See>
  __device__ void each(See see) const {
    see(mine, 0);
  }
};

// A logit that at least k of the row reach; -inf: none is known. best: the largest that this thread
// has read, each logit having been read by one. The k-th of these is reached k times, and as each
// thread has logits from everywhere in the row, hardly more often.
template <class T>
__device__ float reached_by(RowCluster& cluster, float best, Word k) {
  // Two digits are enough for a bound: the key without its last bits is a smaller one.
  constexpr int kLeft = kUnusedKeyBits<T> > 10 ? kUnusedKeyBits<T> : 10;
  const Descent cut = descend_keys<false>(
      cluster, LogitsOfThreads{best}, 32 - kLeft,
      [](float logit, uint32_t, uint32_t* key) {
        *key = order_key(logit) >> kLeft;
        return true;
      },
      [](float) { return Word{0}; }, [k](Word) { return k; });
  const uint32_t key = cut.key << kLeft;
  return cut.reached && key > kMinusInfinityKey ? value_of_key(key) : minus_infinity();
}

// Leaves of the slices what reaches `lowest`, in the lists of their blocks; or leaves all, where
// some block has more than `room`.
template <class T>
__device__ void keep_from(RowCluster& cluster, RowSlice<T>& slice, float lowest, uint32_t room) {
  struct Most {
    Word size;
  };
  RowList& list = cluster.storage().list;
  __syncthreads();  // what was there has been read
  if (threadIdx.x == 0) list.size = 0;
  __syncthreads();
  slice.each_from(lowest, [&](float logit, uint32_t token) {
    const uint32_t at = atomicAdd(&list.size, 1u);
    if (at >= room) return;
    list.logit[at] = logit;
    list.token[at] = token;
  });
  __syncthreads();
  const Most most =
      cluster.reduce(Most{list.size}, [](Most a, Most b) { return a.size > b.size ? a : b; });
  if (most.size <= room) slice.keep(list);
}

// Leaves of a row's slices what its k largest logits are among, in lists of at most `room`, where
// k is few against the threads and these against the logits; or leaves all. best: as of
// reached_by(). lowest_of(logit): the lowest logit that counts as much as this one.
template <class T, class LowestOf>
__device__ void keep_largest(RowCluster& cluster, RowSlice<T>& slice, uint32_t vocab, float best,
                             Word k, int room, LowestOf lowest_of) {
  const uint32_t threads = cluster.size() * blockDim.x;
  if (4 * k > threads || 4 * threads > vocab) return;
  const float reached = reached_by<T>(cluster, best, k);
  if (!(reached > minus_infinity())) return;
  keep_from(cluster, slice, lowest_of(reached), static_cast<uint32_t>(room));
}

}  // namespace lmdecode::sampling::cuda_kernels
