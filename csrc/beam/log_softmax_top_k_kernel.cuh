// log_softmax_top_k on a GPU: a thread block cluster a row leaves the row's best candidates in the
// scratch, then a block a request merges them. beam/log_softmax_top_k_cpu_kernel.h has the same on
// the CPU: results are equal bit for bit.
//
// The row is read once into the shared memory of the cluster; its best are found by radix descents
// over it (sampling/radix_descent.cuh). The order in which candidates come to the scratch is
// whatever it is: the merge ranks each among all.
#pragma once

#include "beam/beam_tuning.h"
#include "beam/candidate_score.h"
#include "sampling/row_list.cuh"

namespace lmdecode::beam::cuda_kernels {

using sampling::kept_from;
using sampling::KeptSet;
using sampling::SamplingLaunchPlan;
using sampling::TokenWeight;
using sampling::cuda_kernels::RowCluster;
using sampling::cuda_kernels::RowList;
using sampling::cuda_kernels::RowSlice;
using sampling::cuda_kernels::RowStorage;
using sampling::cuda_kernels::Word;

// lowest_value() with a warp's lanes trying 32 values at a time. All lanes, same values.
template <class Score>
__device__ float lowest_value_of_warp(const Score& score, uint32_t score_key) {
  uint32_t low = kMinusInfinityKey, high = order_key(score.top());
  if (order_key(score(value_of_key(high))) < score_key) return float_of(0x7fc00000u);
  while (high - low > 1) {  // low does not reach the key, high does
    const uint32_t step = (high - low + cuda::kWarpSize) / (cuda::kWarpSize + 1);
    const uint64_t mine = low + static_cast<uint64_t>(cuda::lane_id() + 1) * step;
    const bool reached =
        mine >= high || order_key(score(value_of_key(static_cast<uint32_t>(mine)))) >= score_key;
    const unsigned lanes = __ballot_sync(cuda::kFullMask, reached);
    const uint32_t below =
        lanes == 0 ? cuda::kWarpSize : static_cast<uint32_t>(__ffs(static_cast<int>(lanes)) - 1);
    const uint64_t end = low + static_cast<uint64_t>(below + 1) * step;
    if (lanes != 0 && end < high) high = static_cast<uint32_t>(end);
    low += below * step;
  }
  return value_of_key(high);
}

template <class T>
class RowCandidates {
 public:
  __device__ RowCandidates(const LogSoftmaxTopKParams& params, const SamplingLaunchPlan& plan,
                           RowStorage& storage)
      : params_(params),
        launch_(plan),
        vocab_(static_cast<uint32_t>(params.vocab)),
        cluster_(storage, plan.cluster_size) {}

  __device__ void run(int64_t row) {
    row_ = row;
    const float beam_score = params_.beam_scores[row * params_.beam_scores_stride];
    const uint8_t status = beam_score_status(beam_score);
    if (status != 0 || !is_alive(beam_score)) return finish(0, status);
    RowSlice<T> slice(static_cast<const T*>(params_.logits) + params_.logits_of(row),
                      params_.logits_vocab_stride, vocab_, cluster_.rank(), launch_,
                      reinterpret_cast<unsigned char*>(&cluster_.storage() + 1));
    const Scan scan = load(slice);
    const float top = value_of_key(static_cast<uint32_t>(scan.max_key));
    if (scan.has_nan) {
      finish(0, kBeamStatusNan);
    } else if (!(top > minus_infinity())) {
      finish(0, kBeamStatusEmpty);
    } else {
      const CandidateScore score = score_of(slice, top, beam_score);
      write(slice, score, best_of(slice, score));
    }
    // Nobody starts the next row, or leaves, while others still read this block's memory.
    cluster_.sync();
  }

 protected:
  struct Scan {
    Word max_key, has_nan;
  };

  __device__ Scan load(RowSlice<T>& slice) {
    float best = minus_infinity();
    bool has_nan = false;
    slice.load([&](float logit) {
      best = logit > best ? logit : best;
      has_nan |= logit != logit;
    });
    best_ = best;
    return cluster_.reduce(Scan{order_key(best), has_nan}, [](const Scan& a, const Scan& b) {
      return Scan{a.max_key > b.max_key ? a.max_key : b.max_key, a.has_nan | b.has_nan};
    });
  }

  // Two sums of 64 bits over the row.
  struct Sums {
    Word first, second;
  };
  __device__ Sums sum(const Sums& mine) {
    return cluster_.reduce(mine, [](const Sums& a, const Sums& b) {
      return Sums{a.first + b.first, a.second + b.second};
    });
  }

  __device__ CandidateScore score_of(const RowSlice<T>& slice, float top, float beam_score) {
    weight_ = {top, exponent_factor(1.0f), mass_fraction_bits(params_.vocab)};
    const bool infinite = top == plus_infinity();
    Sums sums{0, 0};
    slice.each([&](float logit, uint32_t) {
      sums.first += infinite ? static_cast<Word>(logit == top) : Word{weight_.mass(logit)};
    });
    return CandidateScore::of_row(top, sum(sums).first, weight_.fraction_bits, beam_score);
  }

  // The row's first candidates in the order "score descending, then token". They need no more than
  // tokens that reach the k-th largest, or have its score.
  template <class Score>
  __device__ KeptSet best_of(RowSlice<T>& slice, const Score& score) {
    using namespace sampling::cuda_kernels;
    const KeptSet all = kept_from(lowest_value_of_warp(score, kMinusInfinityKey + 1));
    const Word k = static_cast<Word>(params_.row_candidates);
    keep_largest(cluster_, slice, vocab_, best_, k, launch_.list_room,
                 [&](float logit) { return lowest_value_of_warp(score, order_key(score(logit))); });
    // The list holds k tokens.
    const Descent cut = descend<false, Order::kValue>(
        cluster_, slice, vocab_, TokenRange{all}, weight_,
        [k](Word candidates) { return k < candidates ? k : Word{0}; });
    if (!cut.reached) return all;
    // Other logits may have the score of the last one.
    const uint32_t key = order_key(score(value_of_short_key<T>(cut.key)));
    KeptSet best{lowest_value_of_warp(score, key), lowest_value_of_warp(score, key + 1)};
    Sums counts{0, 0};
    slice.each([&](float logit, uint32_t) {
      counts.first += logit >= best.above_ties;
      counts.second += logit >= best.lowest && !(logit >= best.above_ties);
    });
    counts = sum(counts);
    const Word wanted = k - counts.first;
    if (wanted < counts.second) {
      TokenRange ties{kept_from(best.lowest)};
      ties.below = best.above_ties;
      const Descent tie = descend<false, Order::kLowTokenFirst>(
          cluster_, slice, vocab_, ties, weight_, [wanted](Word) { return wanted; });
      best.last_tie = vocab_ - 1 - tie.key;
    }
    return best;
  }

  struct SameToken {
    __device__ uint32_t operator()(uint32_t token) const { return token; }
  };

  // The set to the scratch, in any order. token_of(place): of an element of the row.
  template <class Score, class TokenOf = SameToken>
  __device__ void write(const RowSlice<T>& slice, const Score& score, const KeptSet& set,
                        TokenOf token_of = {}, uint32_t status = 0) {
    RowStorage& storage = cluster_.storage();
    cluster_.sync();
    if (cluster_.rank() == 0 && threadIdx.x == 0) storage.ranked_size = 0;
    cluster_.sync();
    uint32_t* size = cluster_.at_rank(&storage.ranked_size, 0);
    float *scores = params_.row_scores(row_), *log_probs = params_.row_log_probs(row_);
    uint32_t* tokens = params_.row_tokens(row_);
    slice.each([&](float logit, uint32_t place) {
      if (!set.contains(logit, place)) return;
      const uint32_t at = atomicAdd(size, 1u);
      scores[at] = score(logit);
      log_probs[at] = score.log_prob(logit);
      tokens[at] = token_of(place);
    });
    cluster_.sync();
    finish(cluster_.rank() == 0 ? storage.ranked_size : 0, status);  // nobody wrote the others'
  }

  __device__ void finish(uint32_t count, uint32_t status) {
    if (cluster_.rank() != 0 || threadIdx.x != 0) return;
    *params_.row_count(row_) = count;
    *params_.row_status(row_) = status;
  }

  const LogSoftmaxTopKParams& params_;
  const SamplingLaunchPlan& launch_;
  uint32_t vocab_;  // elements of a row
  RowCluster cluster_;
  int64_t row_ = 0;
  TokenWeight weight_;
  float best_ = 0.0f;  // the largest logit that this thread has read
};

template <class T>
__global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    log_softmax_top_k_row_kernel(const LMD_KERNEL_PARAM LogSoftmaxTopKParams params,
                                 const LMD_KERNEL_PARAM SamplingLaunchPlan plan) {
  RowCandidates<T> candidates(params, plan, cuda::shared_storage<RowStorage>());
  for (int64_t row = blockIdx.x / plan.cluster_size; row < params.rows; row += plan.clusters) {
    candidates.run(row);
  }
}

// Orders the candidates of one request, from its rows' parts of the scratch.
class RequestMerge {
 public:
  __device__ RequestMerge(const LogSoftmaxTopKParams& params, RowStorage& storage)
      : params_(params), storage_(storage), block_(storage, 1) {}

  __device__ void run(int64_t request) {
    rows_ = params_.rows_of(request);
    size_ = (rows_.end - rows_.begin) * params_.row_candidates;
    const Word k = static_cast<Word>(params_.num_candidates);
    Sums sums{0, 0};
    for (int64_t row = rows_.begin + threadIdx.x; row < rows_.end; row += blockDim.x) {
      sums.status |= *params_.row_status(row);
      sums.count += *params_.row_count(row);
    }
    sums = reduce(sums);
    const bool has_trie = (sums.status & kRowHasTrie) != 0;
    sums.status &= ~Word{kRowHasTrie};
    if (sums.count == 0 && sums.status == 0 && !has_trie) sums.status = kBeamStatusEmpty;
    if (sums.status != 0) sums.count = 0;
    if (threadIdx.x == 0) params_.status[request] = static_cast<uint8_t>(sums.status);
    if (sums.count > 0) {
      list_all();
      // With few candidates, counting those before each is cheaper than a search for the k-th.
      const bool is_many = sums.count > k && size_ > tuning::kRankedCandidates;
      place(request, is_many ? lowest_key(k) : 0);
    }
    const int64_t first = request * params_.num_candidates;
    for (int64_t i = static_cast<int64_t>(sums.count) + threadIdx.x; i < params_.num_candidates;
         i += blockDim.x) {
      params_.scores[first + i] = minus_infinity();
      params_.log_probs[first + i] = minus_infinity();
      params_.tokens[first + i] = 0;
      params_.beams[first + i] = 0;
    }
  }

  // see(0, key) of each candidate of the request, once, by any thread: for descend_keys().
  template <class See>
  __device__ void each(See see) const {
    for (int64_t i = threadIdx.x; i < size_; i += blockDim.x) see(0.0f, at(i).key);
  }

 private:
  struct Sums {
    Word count, status;
  };
  __device__ Sums reduce(const Sums& sums) {
    return block_.reduce(sums, [](const Sums& a, const Sums& b) {
      return Sums{a.count + b.count, a.status | b.status};
    });
  }

  // A candidate of the request: place i % row_candidates of row i / row_candidates.
  struct Candidate {
    uint32_t key;  // of the score; 0: none
    uint32_t token;
  };

  __device__ Candidate left_at(int64_t i) const {
    const int64_t row = rows_.begin + i / params_.row_candidates, at = i % params_.row_candidates;
    if (at >= *params_.row_count(row)) return {0, 0};
    return {order_key(params_.row_scores(row)[at]), params_.row_tokens(row)[at]};
  }

  // The candidates, from the list where they have room in it.
  __device__ Candidate at(int64_t i) const {
    const RowList& list = storage_.list;
    return size_ <= kRoom ? Candidate{bits_of(list.logit[i]), list.token[i]} : left_at(i);
  }

  __device__ void list_all() {
    if (size_ > kRoom) return;
    for (int64_t i = threadIdx.x; i < size_; i += blockDim.x) {
      const Candidate candidate = left_at(i);
      storage_.list.logit[i] = float_of(candidate.key);
      storage_.list.token[i] = candidate.token;
    }
    __syncthreads();
  }

  // The key of the k-th score; there are more than k.
  __device__ uint32_t lowest_key(Word k) {
    const auto key_of = [](float, uint32_t of_candidate, uint32_t* key) {
      *key = of_candidate;
      return of_candidate != 0;
    };
    return sampling::cuda_kernels::descend_keys<false>(
               block_, *this, 32, key_of, [](float) { return Word{0}; }, [k](Word) { return k; })
        .key;
  }

  // Each candidate from this key on to its place, which is the number of those before it; a warp
  // counts them.
  __device__ void place(int64_t request, uint32_t from) {
    const int64_t k = params_.num_candidates, first = request * k;
    const int64_t warps = blockDim.x / cuda::kWarpSize;
    for (int64_t i = cuda::warp_id(); i < size_; i += warps) {
      const Candidate candidate = at(i);
      if (candidate.key == 0 || candidate.key < from) continue;
      const int64_t beam = i / params_.row_candidates;
      const int64_t row_begin = beam * params_.row_candidates;
      const int64_t row_end = row_begin + params_.row_candidates;
      uint32_t before = 0;
      for (int64_t j = cuda::lane_id(); j < size_; j += cuda::kWarpSize) {
        const Candidate other = at(j);
        // By its place too: arrays that are no trie may allow a token twice.
        const bool is_first =
            j < row_begin || (j < row_end && (other.token < candidate.token ||
                                              (other.token == candidate.token && j < i)));
        before += other.key > candidate.key || (other.key == candidate.key && is_first);
      }
      for (int offset = cuda::kWarpSize / 2; offset > 0; offset /= 2)
        before += __shfl_xor_sync(cuda::kFullMask, before, offset);
      if (cuda::lane_id() != 0 || before >= k) continue;
      const int64_t to = first + before, row = rows_.begin + beam;
      params_.scores[to] = params_.row_scores(row)[i - row_begin];
      params_.log_probs[to] = params_.row_log_probs(row)[i - row_begin];
      params_.tokens[to] = candidate.token;
      params_.beams[to] = beam;
    }
  }

  static constexpr int64_t kRoom = sampling::cuda_tuning::kListedLogits;
  const LogSoftmaxTopKParams& params_;
  RowStorage& storage_;
  RowCluster block_;
  LogSoftmaxTopKParams::RowRange rows_{0, 0};
  int64_t size_ = 0;  // of the scratch of a request's rows
};

inline __global__ void __launch_bounds__(sampling::cuda_tuning::kMaxThreads)
    log_softmax_top_k_request_kernel(const LMD_KERNEL_PARAM LogSoftmaxTopKParams params) {
  RequestMerge merge(params, cuda::shared_storage<RowStorage>());
  for (int64_t request = blockIdx.x; request < params.requests; request += gridDim.x) {
    merge.run(request);
  }
}

}  // namespace lmdecode::beam::cuda_kernels
