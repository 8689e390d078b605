// log_softmax_top_k on the CPU, compiled once for each CPU capability. See simd/vec.h.
//
// A row is streamed twice: for its maximum, and for the masses, which lists the candidates on the
// way. The first pass also keeps the largest logits of groups of tokens: at least k tokens reach
// the k-th largest of these, so it is a threshold that no guess has to verify. The rest to look at
// is whether tokens below it have the score of the k-th candidate too.
#pragma once

#include "beam/beam_tuning.h"
#include "beam/candidate_score.h"
#include "sampling/row_passes.h"

namespace lmdecode::LMD_SIMD::beam {

using namespace lmdecode::beam;
using sampling::CandidateList;
using sampling::count_from;
using sampling::gather_row;
using sampling::kBlock;
using sampling::keep_from;
using sampling::list_in;
using sampling::make_keys;
using sampling::MassScan;
using sampling::push;
using sampling::RowMax;
using sampling::scan_masses;
using sampling::scan_max;
using sampling::scan_max_groups;
using sampling::select_top_k;
using sampling::sort_by_key;

// A value that at least `rank` of values[0 .. size) reach, few more where that can be had; size is
// a multiple of kLanes, 1 <= rank <= size.
inline float quantile_bound(const float* values, int64_t size, int64_t rank) {
  F32 top = load(values), bottom = splat(0.0f) - top;
  for (int64_t i = kLanes; i < size; i += kLanes) {
    top = max(load(values + i), top);
    bottom = max(splat(0.0f) - load(values + i), bottom);
  }
  // count(>= low) >= rank; count(>= high) < rank
  uint64_t low = order_key(0.0f - reduce_max(bottom));
  uint64_t high = static_cast<uint64_t>(order_key(reduce_max(top))) + 1;
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    const int64_t n = count_from(values, size, value_of_key(static_cast<uint32_t>(middle)));
    (n >= rank ? low : high) = middle;
    if (n >= rank && n <= rank + rank / tuning::kSurplusShare) break;
  }
  return value_of_key(static_cast<uint32_t>(low));
}

// Appends the first `room` tokens with lowest <= logit and not logit >= above, in token order.
template <class T>
void collect_first(const T* x, int64_t n, float lowest, float above, int64_t room,
                   CandidateList* list) {
  const F32 from = splat(lowest), to = splat(above);
  const int64_t full = list->size + room;
  for (int64_t i = 0; i < n && list->size < full; i += kLanes) {
    const F32 a =
        i + kLanes <= n ? load(x + i) : load_part(x + i, static_cast<int>(n - i), minus_infinity());
    push(list, bits(a >= from) & ~bits(a >= to), a,
         iota_u32() + splat_u32(static_cast<uint32_t>(i)));
  }
  if (list->size > full) list->size = full;
}

// The largest values of groups of tokens, `groups` of them or a few less or more: a first pass over
// a row, which leaves them in `maxima`, whole vectors.
struct GroupMaxima {
  RowMax row;
  int64_t size;
};
template <class T>
GroupMaxima scan_groups(const T* x, int64_t n, int64_t groups, float* maxima) {
  const int64_t blocks = n / kBlock;
  if (groups < tuning::kMinGroups) groups = tuning::kMinGroups;
  const int64_t group_blocks = blocks * kLanes > groups ? blocks * kLanes / groups : 1;
  int64_t size = 0;
  const RowMax row = scan_max_groups(x, n, group_blocks, [&](F32 best) {
    store(maxima + size, best);
    size += kLanes;
  });
  return {row, size};
}

// A value that at least `rank` tokens reach, or the lowest that a candidate can have.
inline float threshold_of(const float* maxima, int64_t size, int64_t rank) {
  const float lowest = lowest_candidate();
  if (rank > size) return lowest;
  const float bound = quantile_bound(maxima, size, rank);
  return bound > lowest ? bound : lowest;
}

// The second pass: sums the masses, and appends the tokens from the threshold on. next: the row
// that comes after, or null; it is fetched meanwhile.
template <class T>
MassScan scan_row(const T* x, int64_t n, float top, int fraction_bits, float threshold,
                  CandidateList* list, const T* next) {
  return scan_masses<false>(x, n, top, exponent_factor(1.0f), fraction_bits, threshold,
                            plus_infinity(), list, [&](int64_t i) {
                              if (next == nullptr) return;
                              const char* at = reinterpret_cast<const char*>(next + i);
                              for (int line = 0; line < static_cast<int>(kBlock * sizeof(T));
                                   line += 64)
                                __builtin_prefetch(at + line, 0, 2);
                            });
}

template <class Score>
void score_list(const Score score, CandidateList* list) {
  for (int64_t i = 0; i < list->size; ++i) list->value[i] = score(list->value[i]);
}

// Cuts the list, of the scores of all tokens with a value from the threshold on, to the best k of
// the row; equal scores stay in token order. A threshold above the lowest leaves k and more.
template <class T, class Score>
void keep_best(const T* x, int64_t n, int64_t k, float threshold, const Score& score,
               CandidateList* list) {
  if (list->size < k) return;  // then the threshold was the lowest: these are all
  make_keys(list, 1.0f);
  const uint32_t cut = select_top_k(list, k, /*keep_ties=*/false);
  const float below = value_of_key(order_key(threshold) - 1);  // the largest that was not listed
  if (cut > kMinusInfinityKey && order_key(score(below)) >= cut) {
    // Others, or the whole row beside a beam score of -1e9, tie with the last candidate.
    keep_from(list, cut + 1, list->size);
    const int64_t above = list->size;
    collect_first(x, n, lowest_value(score, cut), lowest_value(score, cut + 1), k - above, list);
    for (int64_t i = above; i < list->size; ++i) list->value[i] = value_of_key(cut);
  }
}

// Writes the list, without non-candidates, to the row's part of the scratch. Of a row that failed
// nothing, however long its list had become. log_prob(token): of the token alone.
template <class LogProb>
void write_row(const LogSoftmaxTopKParams& params, int64_t row, const CandidateList& list,
               uint32_t status, LogProb log_prob) {
  float *scores = params.row_scores(row), *log_probs = params.row_log_probs(row);
  uint32_t* tokens = params.row_tokens(row);
  uint32_t size = 0;
  const int64_t listed = (status & ~kRowHasTrie) == 0 ? list.size : 0;
  for (int64_t i = 0; i < listed; ++i) {
    if (!(list.value[i] > minus_infinity())) continue;
    const uint32_t token = list.token[i];
    scores[size] = list.value[i];
    log_probs[size] = log_prob(token);
    tokens[size++] = token;
  }
  *params.row_count(row) = size;
  *params.row_status(row) = status;
}

template <class T>
class RowCandidates {
 public:
  // maxima: scratch for the vocabulary's size.
  RowCandidates(const LogSoftmaxTopKParams& params, CandidateList list, float* maxima)
      : params_(params),
        list_(list),
        maxima_(maxima),
        n_(params.vocab),
        k_(params.row_candidates),
        fraction_bits_(mass_fraction_bits(params.vocab)) {}

  // Leaves the row's best candidates, equal scores in token order, and its status in the scratch.
  // next: the row that comes after, or null; it is fetched meanwhile.
  void run(const T* x, int64_t row, const T* next) {
    list_.size = 0;
    const float beam_score = params_.beam_scores[row * params_.beam_scores_stride];
    uint8_t status = beam_score_status(beam_score);
    if (status == 0 && is_alive(beam_score)) status = find(x, beam_score, next);
    write_row(params_, row, list_, status,
              [&](uint32_t token) { return score_.log_prob(to_float(x[token])); });
  }

 private:
  // Lists the row's best: list_.value holds their scores.
  uint8_t find(const T* x, float beam_score, const T* next) {
    const GroupMaxima groups = scan_groups(x, n_, k_ * tuning::kGroupsPerCandidate, maxima_);
    if (groups.row.has_nan) return kBeamStatusNan;
    if (!(groups.row.max > minus_infinity())) return kBeamStatusEmpty;
    const float top = groups.row.max + 0.0f;  // -0.0 or 0.0: it depends on the order of the lanes
    if (top == plus_infinity()) {
      const int64_t share = count_from(x, n_, top);
      collect_first(x, n_, top, __builtin_nanf(""), k_, &list_);
      score_ = CandidateScore::of_row(top, static_cast<uint64_t>(share), 0, beam_score);
      score_list(score_, &list_);
      return 0;
    }
    const float threshold = threshold_of(maxima_, groups.size, k_);
    const MassScan masses = scan_row(x, n_, top, fraction_bits_, threshold, &list_, next);
    score_ = CandidateScore::of_row(top, masses.total, fraction_bits_, beam_score);
    score_list(score_, &list_);
    keep_best(x, n_, k_, threshold, score_, &list_);
    return 0;
  }

  const LogSoftmaxTopKParams& params_;
  CandidateList list_;
  float* maxima_;
  const int64_t n_, k_;
  const int fraction_bits_;
  CandidateScore score_{};  // of the row at hand
};

// Orders the candidates of one request, from its rows' parts of the scratch.
class RequestMerge {
 public:
  RequestMerge(const LogSoftmaxTopKParams& params, CandidateList list)
      : params_(params), list_(list) {}

  void run(int64_t request) {
    const auto rows = params_.rows_of(request);
    const int64_t k = params_.num_candidates;
    uint32_t status = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) status |= *params_.row_status(row);
    const bool has_trie = (status & kRowHasTrie) != 0;
    status &= ~kRowHasTrie;
    list_.size = 0;
    if (status == 0) {
      gather(rows);
      if (list_.size == 0 && !has_trie) status = kBeamStatusEmpty;
    }
    params_.status[request] = static_cast<uint8_t>(status);
    make_keys(&list_, 1.0f);
    if (list_.size > k) select_top_k(&list_, k, /*keep_ties=*/false);
    if (list_.size <= tuning::kInsertionSize) {
      insertion_sort();
    } else {
      sort_by_key(&list_);
    }
    float *scores = params_.scores + request * k, *log_probs = params_.log_probs + request * k;
    int64_t* tokens = params_.tokens + request * k;
    int64_t* beams = params_.beams + request * k;
    for (int64_t i = 0; i < list_.size; ++i) {
      const int64_t at = list_.token[i];
      scores[i] = list_.value[i];
      log_probs[i] = params_.row_log_probs(rows.begin)[at];
      tokens[i] = params_.row_tokens(rows.begin)[at];
      beams[i] = at / params_.row_candidates;
    }
    for (int64_t i = list_.size; i < k; ++i) {
      scores[i] = minus_infinity();
      log_probs[i] = minus_infinity();
      tokens[i] = 0;
      beams[i] = 0;
    }
  }

 private:
  // The list's "token" is the place in the scratch of the request's rows: at ties in the order of
  // beam, then token.
  void gather(const LogSoftmaxTopKParams::RowRange& rows) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float* scores = params_.row_scores(row);
      const int64_t size = *params_.row_count(row);
      const uint32_t first = static_cast<uint32_t>((row - rows.begin) * params_.row_candidates);
      for (int64_t i = 0; i < size; ++i) {
        list_.value[list_.size] = scores[i];
        list_.token[list_.size++] = first + static_cast<uint32_t>(i);
      }
    }
  }

  // Stable, by key, descending.
  void insertion_sort() {
    for (int64_t i = 1; i < list_.size; ++i) {
      const uint32_t key = list_.key[i], token = list_.token[i];
      const float value = list_.value[i];
      int64_t at = i;
      for (; at > 0 && list_.key[at - 1] < key; --at) {
        list_.key[at] = list_.key[at - 1];
        list_.token[at] = list_.token[at - 1];
        list_.value[at] = list_.value[at - 1];
      }
      list_.key[at] = key;
      list_.token[at] = token;
      list_.value[at] = value;
    }
  }

  const LogSoftmaxTopKParams& params_;
  CandidateList list_;
};

// Rows [begin, end): each to its part of the scratch. `workspace` has sampling_workspace_bytes() of
// the vocabulary, aligned to 64.
void log_softmax_top_k_rows(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                            void* workspace);

// Requests [begin, end), after all of their rows. `workspace` has sampling_workspace_bytes(size)
// for `size` candidates, as many as the rows of a request can have.
void log_softmax_top_k_requests(const LogSoftmaxTopKParams& params, int64_t begin, int64_t end,
                                int64_t size, void* workspace);

}  // namespace lmdecode::LMD_SIMD::beam
