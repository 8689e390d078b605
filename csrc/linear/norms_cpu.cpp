// Rows to threads.
#include "common/parallel_rows.h"
#include "linear/linear_tuning.h"
#include "linear/norms.h"

namespace lmdecode::linear {

namespace {

template <class Rows>
void norm(const NormParams& params, const Rows& rows) {
  const double row_nanoseconds =
      1.0 + tuning::kNanosecondsPerNormElement * static_cast<double>(params.size);
  parallel_rows(
      params.rows, row_nanoseconds, [&](int64_t begin, int64_t end) { rows(params, begin, end); },
      tuning::kTaskNanoseconds);
}

}  // namespace

void layer_norm_range(const NormParams& params, int64_t begin, int64_t end) {
  LMD_SELECT_KERNEL(linear, layer_norm_rows)(params, begin, end);
}

void rms_norm_range(const NormParams& params, int64_t begin, int64_t end) {
  LMD_SELECT_KERNEL(linear, rms_norm_rows)(params, begin, end);
}

void layer_norm(const NormParams& params) { norm(params, layer_norm_range); }

void rms_norm(const NormParams& params) { norm(params, rms_norm_range); }

}  // namespace lmdecode::linear
