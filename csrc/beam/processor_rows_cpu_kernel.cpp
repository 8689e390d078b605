// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include "beam/log_softmax_top_k.h"
#include "beam/log_softmax_top_k_cpu_kernel.h"
#include "beam/processor_edits.h"
#include "sampling/sampling_workspace.h"

namespace lmdecode::LMD_SIMD::beam {

using namespace lmdecode::beam;
using lmdecode::sampling::sampling_workspace_capacity;
using lmdecode::sampling::SamplingWorkspace;
using lmdecode::sampling::split_sampling_workspace;

namespace {

template <class T>
class ProcessedRowCandidates {
 public:
  // maxima, values: scratch for the vocabulary's size; values may be the row that run() reads.
  ProcessedRowCandidates(const LogSoftmaxTopKParams& params, CandidateList list, float* maxima,
                         float* values, TokenEdits* edits)
      : params_(params),
        list_(list),
        maxima_(maxima),
        values_(values),
        edits_(*edits),
        n_(params.vocab),
        k_(params.row_candidates),
        fraction_bits_(mass_fraction_bits(params.vocab)) {}

  // As RowCandidates::run().
  void run(const T* x, const RowProcessors& processors, int64_t row, const T* next) {
    list_.size = 0;
    const float beam_score = params_.beam_scores[row * params_.beam_scores_stride];
    if (processors.has_trie) return run_allowed(x, processors, row, beam_score, next);
    uint8_t status = beam_score_status(beam_score);
    if (status == 0 && is_alive(beam_score)) status = find(x, processors, beam_score, next);
    write_row(params_, row, list_, status, [&](uint32_t token) {
      if (written_) return values_[token];
      const TokenEdit* edit = edits_.find(token);
      return edit != nullptr ? edit->log_prob : score_.log_prob(to_float(x[token]));
    });
  }

 private:
  void run_allowed(const T* x, const RowProcessors& processors, int64_t row, float beam_score,
                   const T* next) {
    uint32_t status = beam_score_status(beam_score);
    const bool allows_any = processors.allowed_tokens.size > 0 || processors.forced_token >= 0;
    if (status == 0 && beam_score > kRealBeamScoreBound && allows_any) {
      status = find_allowed(x, processors, beam_score, next);
    }
    write_row(params_, row, list_, status | kRowHasTrie, [&](uint32_t token) {
      return processors.forced_token >= 0 ? processors.forced_log_prob()
                                          : allowed_log_prob(x, processors, token);
    });
  }

  // Lists the best of the allowed tokens.
  uint8_t find_allowed(const T* x, const RowProcessors& processors, float beam_score,
                       const T* next) {
    edits_.collect(processors);
    const RowMax row = scan_max(x, n_);
    if (row.has_nan) return kBeamStatusNan;
    if (!(row.max > minus_infinity())) return kBeamStatusEmpty;
    const float top = row.max + 0.0f;
    const bool infinite = top == plus_infinity();
    const uint64_t total =
        infinite ? static_cast<uint64_t>(count_from(x, n_, top))
                 : scan_row(x, n_, top, fraction_bits_, plus_infinity(), &list_, next).total;
    score_ = CandidateScore::of_row(top, total, infinite ? 0 : fraction_bits_, beam_score);
    const auto list = [&](int64_t token, float log_prob) {
      if (!(log_prob > minus_infinity()) || list_.size == n_) return;
      list_.value[list_.size] = ProcessedScore{log_prob, beam_score}(log_prob);
      list_.token[list_.size++] = static_cast<uint32_t>(token);
    };
    const bool forced = processors.forced_token >= 0;
    for (int64_t i = 0; i < processors.allowed_tokens.size; ++i) {
      const int64_t token = processors.allowed_tokens[i];
      if (token < 0 || token >= n_) continue;
      const float log_prob = allowed_log_prob(x, processors, static_cast<uint32_t>(token));
      if (log_prob != log_prob) return kBeamStatusNan;
      if (!forced) list(token, log_prob);
    }
    if (forced) list(processors.forced_token, processors.forced_log_prob());
    if (list_.size > k_) {
      make_keys(&list_, 1.0f);
      select_top_k(&list_, k_, /*keep_ties=*/false);
    }
    return 0;
  }

  // The processed log-probability of a token that the trie allows.
  float allowed_log_prob(const T* x, const RowProcessors& processors, uint32_t token) {
    const TokenEdit* edit = edits_.find(token);
    const float log_prob = processors.adjusted(score_.log_prob(to_float(x[token])), token,
                                               edit == nullptr ? 0 : edit->occurrences,
                                               edit != nullptr && edit->repeated);
    if (log_prob != log_prob) return log_prob;
    const bool banned = (edit != nullptr && edit->banned) || !processors.allows(token);
    return banned ? minus_infinity() : log_prob;
  }

  uint8_t find(const T* x, const RowProcessors& processors, float beam_score, const T* next) {
    edits_.collect(processors);
    const bool forced = processors.forced_token >= 0;
    const int64_t wanted = k_ + edits_.size();
    const int64_t groups_for_candidates = k_ * tuning::kGroupsPerCandidate;
    const int64_t groups_for_edits = wanted * tuning::kGroupsPerEdit;
    const GroupMaxima groups = scan_groups(
        x, n_, groups_for_edits > groups_for_candidates ? groups_for_edits : groups_for_candidates,
        maxima_);
    if (groups.row.has_nan) return kBeamStatusNan;
    if (!(groups.row.max > minus_infinity())) return kBeamStatusEmpty;
    const float top = groups.row.max + 0.0f;
    const bool infinite = top == plus_infinity();
    for (int64_t i = 0; i < edits_.size(); ++i) edits_[i].logit = to_float(x[edits_[i].token]);

    written_ = processors.bias.data != nullptr || processors.token_bitmask.data != nullptr ||
               infinite || forced || wanted * tuning::kTokensPerEdit > n_;
    const float threshold = written_ ? plus_infinity() : threshold_beside_edits(groups.size);
    const uint64_t total =
        infinite ? static_cast<uint64_t>(count_from(x, n_, top))
                 : scan_row(x, n_, top, fraction_bits_, threshold, &list_, next).total;
    score_ = CandidateScore::of_row(top, total, infinite ? 0 : fraction_bits_, beam_score);
    if (!process_edits(processors)) return kBeamStatusNan;
    if (!written_) {
      keep_best_edited(x, threshold);
      return 0;
    }
    // A forced token leaves nothing to look at but whether the bias made a NaN.
    if ((!forced || processors.bias.data != nullptr) && !write_values(x, processors))
      return kBeamStatusNan;
    if (forced) {
      const uint32_t token = static_cast<uint32_t>(processors.forced_token);
      const float log_prob = processors.forced_log_prob();
      values_[token] = log_prob;
      list_.value[0] = ProcessedScore{log_prob, beam_score}(log_prob);
      list_.token[0] = token;
      list_.size = 1;
    } else {
      for (int64_t i = 0; i < edits_.size(); ++i) values_[edits_[i].token] = edits_[i].log_prob;
      choose_from_values(beam_score);
    }
    return 0;
  }

  // A logit that at least k tokens reach which no edit touches, or the lowest of a candidate.
  float threshold_beside_edits(int64_t maxima) {
    int64_t rank = k_;
    while (true) {
      const float bound = threshold_of(maxima_, maxima, rank);
      int64_t edited = 0;
      for (int64_t i = 0; i < edits_.size(); ++i) edited += edits_[i].logit >= bound;
      if (rank >= k_ + edited || bound == lowest_candidate()) return bound;
      rank = k_ + edited;
    }
  }

  // Processes the edited tokens; false if one becomes NaN.
  bool process_edits(const RowProcessors& processors) {
    bool is_number = true;
    for (int64_t i = 0; i < edits_.size(); ++i) {
      TokenEdit& edit = edits_[i];
      const float log_prob = processors.adjusted(score_.log_prob(edit.logit), edit.token,
                                                 edit.occurrences, edit.repeated);
      is_number &= log_prob == log_prob;
      const bool allowed = !edit.banned && processors.allows(edit.token);
      edit.log_prob = allowed ? log_prob : minus_infinity();
    }
    return is_number;
  }

  float score_of(const TokenEdit& edit) const {
    return ProcessedScore{edit.log_prob, static_cast<float>(score_.beam_score)}(edit.log_prob);
  }

  // Puts edits into the list from `begin` on, which ascends by token.
  template <class Wanted>
  int64_t insert_edits(int64_t begin, Wanted wanted) {
    const int64_t before = list_.size;
    for (int64_t i = 0; i < edits_.size(); ++i) {
      if (!wanted(edits_[i])) continue;
      int64_t at = list_.size++;
      for (; at > begin && list_.token[at - 1] > edits_[i].token; --at) {
        list_.token[at] = list_.token[at - 1];
        list_.value[at] = list_.value[at - 1];
      }
      list_.token[at] = edits_[i].token;
      list_.value[at] = score_of(edits_[i]);
    }
    return list_.size - before;
  }

  // keep_best(), where the list still holds the tokens' own logits, with the edited tokens at their
  // new scores.
  void keep_best_edited(const T* x, float threshold) {
    score_list(score_, &list_);
    for (int64_t i = 0; i < list_.size; ++i) {
      TokenEdit* edit = edits_.find(list_.token[i]);
      if (edit == nullptr) continue;
      edit->listed = true;
      list_.value[i] = score_of(*edit);
    }
    uint32_t cut = kMinusInfinityKey + 1;
    const auto cut_list = [&] {
      if (list_.size < k_) return;
      make_keys(&list_, 1.0f);
      cut = select_top_k(&list_, k_, /*keep_ties=*/false);
    };
    cut_list();
    // Edits below the threshold that came up, a repetition penalty below 1 has such.
    const int64_t risen = insert_edits(0, [&](const TokenEdit& edit) {
      const float score = score_of(edit);
      return !edit.listed && score > minus_infinity() && order_key(score) >= cut;
    });
    if (risen > 0) cut_list();
    const float below = value_of_key(order_key(threshold) - 1);
    if (list_.size < k_ || cut <= kMinusInfinityKey || order_key(score_(below)) < cut) return;
    // As in keep_best(); edits tie by their new scores, and not by their logits.
    keep_from(&list_, cut + 1, list_.size);
    const int64_t above = list_.size;
    collect_first(x, n_, lowest_value(score_, cut), lowest_value(score_, cut + 1),
                  k_ - above + edits_.size(), &list_);
    int64_t size = above;
    for (int64_t i = above; i < list_.size; ++i) {
      if (edits_.find(list_.token[i]) != nullptr) continue;
      list_.token[size] = list_.token[i];
      list_.value[size++] = value_of_key(cut);
    }
    list_.size = size;
    insert_edits(above, [&](const TokenEdit& edit) { return order_key(score_of(edit)) == cut; });
    if (list_.size > k_) list_.size = k_;
  }

  // Writes the log-probabilities after the bias and the bitmask; false where a NaN came of it.
  bool write_values(const T* x, const RowProcessors& processors) {
    const TensorRow<float> bias = processors.bias;
    const TensorRow<int32_t> bitmask = processors.token_bitmask;
    const F32 infinity = splat(plus_infinity()), none = splat(minus_infinity());
    const F32 share = splat(score_.log_prob(plus_infinity()));
    const U32 lane_bits = shift_left_one(iota_u32());
    uint32_t nan = 0;
    for (int64_t i = 0; i < n_; i += kLanes) {
      const int lanes = n_ - i < kLanes ? static_cast<int>(n_ - i) : kLanes;
      F32 a = lanes == kLanes ? load(x + i) : load_part(x + i, lanes, minus_infinity());
      if (score_.infinite) {
        a = select(a == infinity, share, none);
      } else {
        a = subtract_f64(a, score_.max, score_.log_sum);
      }
      if (bias.data != nullptr) a = a + load_bias(bias, i, lanes);
      nan |= bits(is_nan(a, a));
      if (bitmask.data != nullptr) {
        const uint32_t allowed = static_cast<uint32_t>(bitmask[i / 32]) >> (i % 32);
        a = select((splat_u32(allowed) & lane_bits) == splat_u32(0), none, a);
      }
      store(values_ + i, a + splat(0.0f));  // never -0.0; values_ has room for whole vectors
    }
    return nan == 0;
  }

  static F32 load_bias(const TensorRow<float>& bias, int64_t i, int lanes) {
    if (bias.stride == 1) {
      const float* p = bias.data + i;
      return lanes == kLanes ? load(p) : load_part(p, lanes, 0.0f);
    }
    alignas(64) float lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = l < lanes ? bias[i + l] : 0.0f;
    return load(lane);
  }

  void choose_from_values(float beam_score) {
    const GroupMaxima groups = scan_groups(values_, n_, k_ * tuning::kGroupsPerCandidate, maxima_);
    if (!(groups.row.max > minus_infinity())) return;
    float threshold = threshold_of(maxima_, groups.size, k_);
    int64_t no_limit = INT64_MAX;
    collect(values_, n_, &threshold, &no_limit, &list_, sampling::NoEdits{}, [](CandidateList*) {});
    const ProcessedScore score{groups.row.max, beam_score};
    score_list(score, &list_);
    keep_best(values_, n_, k_, threshold, score, &list_);
  }

  const LogSoftmaxTopKParams& params_;
  CandidateList list_;
  float *maxima_, *values_;
  TokenEdits& edits_;
  const int64_t n_, k_;
  const int fraction_bits_;
  CandidateScore score_{};  // of the row at hand, before processors
  bool written_ = false;    // values_ holds the processed row
};

template <class T>
void run_rows(const LogSoftmaxTopKParams& params, const LogitsProcessors& processors,
              int64_t max_edits, int64_t begin, int64_t end, void* workspace) {
  const SamplingWorkspace w = split_sampling_workspace(workspace, params.vocab);
  const CandidateList list = list_in(w);
  float* maxima = reinterpret_cast<float*>(w.spare_key);  // the searches here leave it alone
  TokenEdits edits(w.row + sampling_workspace_capacity(params.vocab), max_edits, params.vocab);
  const T* logits = static_cast<const T*>(params.logits);
  const auto processors_of = [&](int64_t row) {
    return processors_of_row(processors, params.request_of(row), row, params.vocab);
  };
  if (params.logits_vocab_stride == 1) {
    ProcessedRowCandidates<T> candidates(params, list, maxima, w.row, &edits);
    for (int64_t row = begin; row < end; ++row)
      candidates.run(logits + params.logits_of(row), processors_of(row), row,
                     row + 1 < end ? logits + params.logits_of(row + 1) : nullptr);
    return;
  }
  ProcessedRowCandidates<float> candidates(params, list, maxima, w.row, &edits);
  for (int64_t row = begin; row < end; ++row) {
    if (is_alive(params.beam_scores[row * params.beam_scores_stride])) {
      gather_row(logits + params.logits_of(row), params.vocab, params.logits_vocab_stride, w.row);
    }
    candidates.run(w.row, processors_of(row), row, nullptr);
  }
}

}  // namespace

// Rows [begin, end): each to its part of the scratch. `workspace` has sampling_workspace_bytes() of
// the vocabulary, followed by TokenEdits::bytes(max_edits, vocab); aligned to 64.
void log_softmax_top_k_processed_rows(const LogSoftmaxTopKParams& params,
                                      const LogitsProcessors& processors, int64_t max_edits,
                                      int64_t begin, int64_t end, void* workspace) {
  with_element_type(params.dtype, [&](auto element) {
    run_rows<decltype(element)>(params, processors, max_edits, begin, end, workspace);
  });
}

}  // namespace lmdecode::LMD_SIMD::beam
