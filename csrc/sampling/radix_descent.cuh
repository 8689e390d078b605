// Finds the key at which a sum over the tokens of a row, in descending order of keys, reaches a
// target: a descent over the digits of the key, one histogram a digit. Amounts are integers, so the
// order in which they are added does not matter.
#pragma once

#include "common/cuda_intrinsics.cuh"
#include "sampling/kept_set.h"
#include "sampling/row_cluster.cuh"
#include "sampling/row_slice.cuh"
#include "sampling/token_weight.cuh"

// The logits that a temperature maps to one value, on the device.

namespace lmdecode::sampling::cuda_kernels {

// lowest_logit() with a warp's lanes trying the neighbours of a first guess. All lanes, same
// values.
LMD_OUT_OF_LINE __device__ inline float find_lowest_logit(uint32_t key, float temperature) {
  if (temperature == 1.0f) return value_of_key(key);
  const uint32_t guess = order_key(value_of_key(key) * temperature);
  constexpr uint32_t kLanes = cuda::kWarpSize;
  uint32_t start = guess < kMinusInfinityKey + kLanes / 2 ? kMinusInfinityKey : guess - kLanes / 2;
  if (start > kPlusInfinityKey - (kLanes - 1)) start = kPlusInfinityKey - (kLanes - 1);
  const float value = value_of_key(start + static_cast<uint32_t>(cuda::lane_id()));
  const unsigned reached =
      __ballot_sync(cuda::kFullMask, order_key(tempered(value, temperature)) >= key);
  if (reached != 0 && (reached & 1) == 0) {
    return value_of_key(start + static_cast<uint32_t>(__ffs(static_cast<int>(reached)) - 1));
  }
  return lowest_logit(key, temperature);
}

// The logits that the temperature maps to one value: [lowest, above), above NaN at +inf.
struct ValueClass {
  float lowest, above;
};

// The class of `logit`. Called by all lanes of the warp, with the same values.
__device__ inline ValueClass class_of(float logit, float temperature) {
  const uint32_t key = order_key(tempered(logit, temperature));
  return {find_lowest_logit(key, temperature), key == kPlusInfinityKey
                                                   ? float_of(0x7fc00000u)
                                                   : find_lowest_logit(key + 1, temperature)};
}

// Tokens of a row: those of `set`, below the value `below` (NaN: no limit), without the tokens of
// `done`, if given.
struct TokenRange {
  KeptSet set;
  float below = float_of(0x7fc00000u);
  bool has_done = false;
  KeptSet done{};

  __device__ bool contains(float logit, uint32_t token) const {
    return set.contains(logit, token) && !(logit >= below) &&
           !(has_done && done.contains(logit, token));
  }
};

// Keys of values are the order keys of logits, without the bits that T leaves no choice of.
template <class T>
constexpr int kUnusedKeyBits = 0;
template <>
inline constexpr int kUnusedKeyBits<Half> = 13;
template <>
inline constexpr int kUnusedKeyBits<BFloat16> = 16;

template <class T>
__device__ float value_of_short_key(uint32_t key) {
  constexpr int kUnused = kUnusedKeyBits<T>;
  const uint32_t high = key << kUnused;
  // A negative value's key is the complement of its bits.
  return value_of_key(high & 0x80000000u ? high : high | ((1u << kUnused) - 1));
}

enum class Order { kValue, kLowTokenFirst, kHighTokenFirst };

struct Descent {
  bool reached = false;  // false: the target was 0 or above the total
  uint32_t key = 0;      // at which the sum reaches the target
  Word above = 0;        // the sum over larger keys
  Word at = 0;           // over this key
  Word target = 0;
};

// A vocabulary has fewer tokens than a bin can count.
__device__ inline void count_in_bin(RowStorage::Histogram& histogram, uint32_t bin) {
#if defined(LMD_PLANT_RACE)  // tests plant it to see that it is noticed
  const uint32_t old = histogram.low[bin];
  cuda::schedule_point();
  histogram.low[bin] = old + 1;
#else
  atomicAdd(&histogram.low[bin], 1u);  // result unused, so it is one instruction a warp and bin
#endif
}

__device__ inline void add_to_bin(RowStorage::Histogram& histogram, uint32_t bin, Word amount) {
#if defined(LMD_PLANT_RACE)  // tests plant it to see that it is noticed
  const uint32_t old = histogram.low[bin];
  cuda::schedule_point();
  histogram.low[bin] = old + static_cast<uint32_t>(amount);
#else
  const uint32_t old = atomicAdd(&histogram.low[bin], static_cast<uint32_t>(amount));
#endif
  const uint32_t sum = old + static_cast<uint32_t>(amount);
  const uint32_t carried = static_cast<uint32_t>(amount >> 32) + (sum < old);
  if (carried != 0) atomicAdd(&histogram.high[bin], carried);
}

__device__ inline void add_amount_to_bin(RowStorage::Histogram& histogram, const BinnedMass& mass) {
  atomicAdd(&histogram.low[mass.bin], mass.amount & ((1u << kLowAmountBits) - 1));
  atomicAdd(&histogram.high[mass.bin], mass.amount >> kLowAmountBits);
}

// How the words of a bin are added up.
enum class BinKind { kCount, kMass, kAmount };

// Bins are read four at a time, so there are four at least.
__device__ inline uint32_t bins_of(int width) { return width < 2 ? 4u : 1u << width; }

struct BinGroup {
  Word sum[4];
};

// The sums of bins [4 * group, 4 * group + 4) over the cluster.
template <BinKind kKind>
__device__ BinGroup group_sums(RowCluster& cluster, unsigned parity, uint32_t group) {
  RowStorage::Histogram& histogram = cluster.storage().histogram[parity];
  uint4* low = reinterpret_cast<uint4*>(histogram.low) + group;
  uint4* high = reinterpret_cast<uint4*>(histogram.high) + group;
  constexpr int kHighBit = kKind == BinKind::kAmount ? kLowAmountBits : 32;
  BinGroup bins{};
#pragma unroll 4
  for (unsigned rank = 0; rank < cluster.size(); ++rank) {
    const uint4 l = *cluster.at_rank(low, rank);
    const uint4 h = kKind == BinKind::kCount ? uint4{} : *cluster.at_rank(high, rank);
    bins.sum[0] += l.x + (static_cast<Word>(h.x) << kHighBit);
    bins.sum[1] += l.y + (static_cast<Word>(h.y) << kHighBit);
    bins.sum[2] += l.z + (static_cast<Word>(h.z) << kHighBit);
    bins.sum[3] += l.w + (static_cast<Word>(h.w) << kHighBit);
  }
  if constexpr (kKind == BinKind::kAmount) {
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) bins.sum[b] <<= mass_shift(4 * group + b);
  }
  return bins;
}

// A thread's share of a histogram, from the highest bin down: the sum before the share, of the
// share, and of all bins.
struct BinShare {
  uint32_t begin, end;  // groups, counted from the highest
  Word before, sum, total;
};

// Computes a thread's share of the bins of `width` bits, and the sums. Called by all threads of the
// block.
template <BinKind kKind>
LMD_OUT_OF_LINE __device__ BinShare share_of_bins(RowCluster cluster, unsigned parity, int width) {
  RowStorage& storage = cluster.storage();
  const uint32_t groups = bins_of(width) / 4;
  const uint32_t per_thread = (groups + blockDim.x - 1) / blockDim.x;
  BinShare share{threadIdx.x * per_thread, 0, 0, 0, 0};
  share.end = share.begin + per_thread < groups ? share.begin + per_thread : groups;
  for (uint32_t i = share.begin; i < share.end; ++i) {
    const BinGroup bins = group_sums<kKind>(cluster, parity, groups - 1 - i);
    share.sum += bins.sum[0] + bins.sum[1] + bins.sum[2] + bins.sum[3];
  }
  share.before = share.sum;
  for (int offset = 1; offset < cuda::kWarpSize; offset *= 2) {
    const Word other = __shfl_up_sync(cuda::kFullMask, share.before, offset);
    if (cuda::lane_id() >= offset) share.before += other;
  }
  if (cuda::lane_id() == cuda::kWarpSize - 1) {
    storage.warp_part[cuda::warp_id()][0] = share.before;
  }
  share.before -= share.sum;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / cuda::kWarpSize; ++warp) {
    const Word part = storage.warp_part[warp][0];
    if (warp < cuda::warp_id()) share.before += part;
    share.total += part;
  }
  return share;
}

// Stores the bin at which the sum from the highest reaches `target`; the thread with the bin in its
// share writes it.
template <BinKind kKind>
LMD_OUT_OF_LINE __device__ void find_bin(RowCluster cluster, unsigned parity, int width,
                                         const BinShare share, Word above, Word target) {
  RowStorage& storage = cluster.storage();
  const uint32_t groups = bins_of(width) / 4;
  Word before = share.before + above;
  if (!(before < target && before + share.sum >= target)) return;
  bool found = false;
  for (uint32_t i = share.begin; i < share.end && !found; ++i) {
    const BinGroup bins = group_sums<kKind>(cluster, parity, groups - 1 - i);
    for (int b = 3; b >= 0 && !found; --b) {
      found = before + bins.sum[b] >= target;
      if (found) {
        storage.found_digit = 4 * (groups - 1 - i) + static_cast<uint32_t>(b);
        storage.found_above = before;
        storage.found_at = bins.sum[b];
      }
      before += bins.sum[b];
    }
  }
}

// One step: the digit of `width` bits below `shift` at which the target is reached.
// target_of(total) is asked at the first step.
template <BinKind kKind, class TargetOf>
__device__ void find_digit(RowCluster& cluster, unsigned parity, int width, bool first,
                           TargetOf target_of, Descent* descent) {
  RowStorage& storage = cluster.storage();
  const BinShare share = share_of_bins<kKind>(cluster, parity, width);
  if (first) {
    descent->target = target_of(share.total);
    descent->reached = descent->target >= 1 && descent->target <= share.total;
  }
  if (descent->reached) {
    find_bin<kKind>(cluster, parity, width, share, descent->above, descent->target);
  }
  __syncthreads();
  if (!descent->reached) return;
  descent->key = descent->key << width | storage.found_digit;
  descent->above = storage.found_above;
  descent->at = storage.found_at;
}

// The histogram of this phase, for digits of `width` bits.
template <BinKind kKind>
__device__ RowStorage::Histogram& empty_histogram(RowCluster& cluster, int width) {
  RowStorage::Histogram& histogram = cluster.storage().histogram[cluster.parity()];
  for (uint32_t bin = threadIdx.x; bin < bins_of(width); bin += blockDim.x) {
    histogram.low[bin] = 0;
    if constexpr (kKind != BinKind::kCount) histogram.high[bin] = 0;
  }
  __syncthreads();
  return histogram;
}

// The bin of masses at which the sum over the tokens of `set` reaches target_of(sum of all): one
// step, `key` being the bin.
template <class Row, class TargetOf>
__device__ Descent find_mass_bin(RowCluster& cluster, const Row& row, const KeptSet& set,
                                 const TokenWeight& weight, TargetOf target_of) {
  RowStorage::Histogram& histogram =
      empty_histogram<BinKind::kAmount>(cluster, cuda_tuning::kDigitBits);
  const auto add_all = [&](auto mass_of) {
    row.each([&](float logit, uint32_t token) {
      if (set.contains(logit, token)) add_amount_to_bin(histogram, mass_of(weight, logit));
    });
  };
  if (weight.probabilities) {
    add_all(binned_probability);
  } else {
    add_all(binned_weight);
  }
  const unsigned parity = cluster.meet();
  Descent descent;
  find_digit<BinKind::kAmount>(cluster, parity, cuda_tuning::kDigitBits, /*first=*/true, target_of,
                               &descent);
  return descent;
}

// The largest key with amount(tokens with this key or a larger one) >= target, where target =
// target_of(amount of all). key_of(logit, token, &key): whether the token counts, and its key, of
// `bits` bits. kMass: amounts are mass_of(logit), else counts.
template <bool kMass, class Row, class KeyOf, class MassOf, class TargetOf>
__device__ Descent descend_keys(RowCluster& cluster, const Row& row, int bits, KeyOf key_of,
                                MassOf mass_of, TargetOf target_of) {
  constexpr BinKind kKind = kMass ? BinKind::kMass : BinKind::kCount;
  int shift = bits;
  Descent descent;
  for (bool first = true; shift > 0; first = false) {
    const int digits = (shift + cuda_tuning::kDigitBits - 1) / cuda_tuning::kDigitBits;
    const int width = (shift + digits - 1) / digits;
    const int next = shift - width;
    RowStorage::Histogram& histogram = empty_histogram<kKind>(cluster, width);
    const uint32_t prefix = descent.key, mask = (1u << width) - 1;
    row.each([&](float logit, uint32_t token) {
      uint32_t key;
      if (!key_of(logit, token, &key)) return;
      if (!first && key >> shift != prefix) return;
      if constexpr (kMass) {
        const Word mass = mass_of(logit);
        if (mass != 0) add_to_bin(histogram, key >> next & mask, mass);
      } else {
        count_in_bin(histogram, key >> next & mask);
      }
    });
    const unsigned parity = cluster.meet();
    find_digit<kKind>(cluster, parity, width, first, target_of, &descent);
    if (!descent.reached) return descent;
    shift = next;
  }
  return descent;
}

// Bits of keys up to `largest`; 1 at least.
__device__ inline int bits_of_number(uint32_t largest) {
  return 32 - __clz(static_cast<int>(largest | 1u));
}

// The same of the tokens of a range, by value or by number.
template <bool kMass, Order kOrder, class T, class TargetOf>
__device__ Descent descend(RowCluster& cluster, const RowSlice<T>& slice, uint32_t vocab,
                           const TokenRange& range, const TokenWeight& weight, TargetOf target_of) {
  // Keys of values count from the lowest one that the row has.
  const uint32_t first = slice.lowest_key() >> kUnusedKeyBits<T>;
  const auto key_of = [&](float logit, uint32_t token, uint32_t* key) {
    if (!range.contains(logit, token)) return false;
    if constexpr (kOrder == Order::kValue) {
      *key = (order_key(logit) >> kUnusedKeyBits<T>)-first;
    } else {
      *key = kOrder == Order::kLowTokenFirst ? vocab - 1 - token : token;
    }
    return true;
  };
  const int bits = kOrder == Order::kValue
                       ? bits_of_number((slice.highest_key() >> kUnusedKeyBits<T>)-first)
                       : bits_of_number(vocab);
  const auto mass_of = [&](float logit) { return weight.mass(logit); };
  if constexpr (kOrder != Order::kValue) {  // ties at the cut, which most rows have not
    return descend_keys<kMass>(cluster, slice.one_by_one(), bits, key_of, mass_of, target_of);
  }
  Descent descent = descend_keys<kMass>(cluster, slice, bits, key_of, mass_of, target_of);
  descent.key += first;
  return descent;
}

}  // namespace lmdecode::sampling::cuda_kernels
