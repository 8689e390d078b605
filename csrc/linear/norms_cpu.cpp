// Rows to threads.
#include "common/float_mode.h"
#include "common/parallel.h"
#include "linear/linear_tuning.h"
#include "linear/norms.h"
#include "simd/cpu_capability.h"

namespace lmdecode {

#define LMD_DECLARE_LEVEL(level)                                              \
  namespace level {                                                           \
  void layer_norm_rows(const NormParams& params, int64_t begin, int64_t end); \
  void rms_norm_rows(const NormParams& params, int64_t begin, int64_t end);   \
  }
LMD_DECLARE_LEVEL(default_)
#if defined(LMD_HAS_X86_KERNELS)
LMD_DECLARE_LEVEL(avx2)
LMD_DECLARE_LEVEL(avx512)
#define LMD_SELECT(function) \
  select_kernel(&default_::function, &avx2::function, &avx512::function)
#else
#define LMD_SELECT(function) (&default_::function)
#endif
#undef LMD_DECLARE_LEVEL

namespace {

template <class Rows>
void norm(const NormParams& params, const Rows& rows) {
  const double row_nanoseconds =
      1.0 + linear_tuning::kNanosecondsPerNormElement * static_cast<double>(params.size);
  parallel_for(params.rows,
               1 + static_cast<int64_t>(linear_tuning::kMinTaskNanoseconds / row_nanoseconds),
               [&](int64_t begin, int64_t end) {
                 const ScopedIeeeMode ieee;
                 rows(params, begin, end);
               });
}

}  // namespace

void layer_norm_range(const NormParams& params, int64_t begin, int64_t end) {
  LMD_SELECT(layer_norm_rows)(params, begin, end);
}

void rms_norm_range(const NormParams& params, int64_t begin, int64_t end) {
  LMD_SELECT(rms_norm_rows)(params, begin, end);
}

void layer_norm(const NormParams& params) { norm(params, layer_norm_range); }

void rms_norm(const NormParams& params) { norm(params, rms_norm_range); }

#undef LMD_SELECT

}  // namespace lmdecode
