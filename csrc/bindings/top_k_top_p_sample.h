// Arguments of top_k_top_p_sample to kernel parameters: shared by the CPU and the CUDA library.
#pragma once

#include <cmath>

#include "bindings/tensor_checks.h"
#include "common/float_mode.h"
#include "sampling/top_k_top_p_sample.h"

namespace lmdecode::sampling {

struct SampleArguments {
  const Tensor& logits;
  int64_t top_k;
  const std::optional<Tensor>& top_k_rows;
  double top_p;
  const std::optional<Tensor>& top_p_rows;
  double min_p;
  const std::optional<Tensor>& min_p_rows;
  double temperature;
  const std::optional<Tensor>& temperature_rows;
  const std::optional<Tensor>& q;
  const std::optional<Tensor>& seed;
  const std::optional<Tensor>& position;
  double eps;
  int64_t dialect;
  int64_t int_seed;
  int64_t int_position;
};

struct SampleOutputs {
  Tensor index;                       // [batch] int64
  std::optional<Tensor> kept_logits;  // [batch, vocab] f32
  std::optional<Tensor> logprob;      // [batch] f32
  Tensor kept_count;                  // [batch] int32
  Tensor status;                      // [batch] uint8
};

constexpr const char* kSampleOp = "top_k_top_p_sample";

inline PerRow<int64_t> integer_rows(const char* name, int64_t value,
                                    const std::optional<Tensor>& rows, const Tensor& logits) {
  if (!rows) return {value, nullptr, 0};
  check_same_device(kSampleOp, name, *rows, "logits", logits);
  check_shape(kSampleOp, name, *rows, logits.size(0));
  check_dtype(kSampleOp, name, *rows, ScalarType::Long);
  return {value, rows->const_data_ptr<int64_t>(), rows->stride(0)};
}

inline PerRow<float> float_rows(const char* name, double value, const std::optional<Tensor>& rows,
                                const Tensor& logits) {
  if (!rows) return {static_cast<float>(value), nullptr, 0};
  check_same_device(kSampleOp, name, *rows, "logits", logits);
  check_shape(kSampleOp, name, *rows, logits.size(0));
  check_dtype(kSampleOp, name, *rows, ScalarType::Float);
  return {static_cast<float>(value), rows->const_data_ptr<float>(), rows->stride(0)};
}

inline TopKTopPSampleParams sample_params(const SampleArguments& a) {
  TopKTopPSampleParams p;
  check_rank(kSampleOp, "logits", a.logits, 2, "[batch, vocab]");
  p.dtype = float_dtype(kSampleOp, "logits", a.logits);
  p.batch = a.logits.size(0);
  p.vocab = a.logits.size(1);
  if (p.vocab < 1 || p.vocab >= (int64_t{1} << 31)) {
    fail(kSampleOp, "logits has shape ", shape_text(a.logits),
         "; expected a vocabulary of 1 to 2^31 - 1 tokens");
  }
  p.logits = a.logits.const_data_ptr();
  p.logits_row_stride = a.logits.stride(0);
  p.logits_vocab_stride = a.logits.stride(1);
  p.top_k = integer_rows("top_k", a.top_k, a.top_k_rows, a.logits);
  p.top_p = float_rows("top_p", a.top_p, a.top_p_rows, a.logits);
  p.min_p = float_rows("min_p", a.min_p, a.min_p_rows, a.logits);
  p.temperature = float_rows("temperature", a.temperature, a.temperature_rows, a.logits);
  if (a.q) {
    check_same_device(kSampleOp, "q", *a.q, "logits", a.logits);
    check_shape(kSampleOp, "q", *a.q, p.batch, p.vocab);
    check_dtype(kSampleOp, "q", *a.q, ScalarType::Float);
    if (a.seed) fail(kSampleOp, "q and seed were both given; expected one source of noise");
    p.q = a.q->const_data_ptr<float>();
    p.q_row_stride = a.q->stride(0);
    p.q_vocab_stride = a.q->stride(1);
  }
  if (!(a.eps >= 0.0) || !std::isfinite(static_cast<float>(a.eps)))
    fail(kSampleOp, "eps is ", a.eps, "; expected a number >= 0, finite in float32");
  p.eps = static_cast<float>(a.eps);
  if (a.int_seed >= 0 && (a.seed || a.q)) {
    fail(kSampleOp, "int_seed and ", a.seed ? "seed" : "q",
         " were both given; expected one source of noise");
  }
  p.has_seed = a.seed.has_value() || a.int_seed >= 0;
  p.seed = integer_rows("seed", a.int_seed, a.seed, a.logits);
  p.position = integer_rows("position", a.int_position, a.position, a.logits);
  if (a.dialect < 0 || a.dialect >= kDialectCount) {
    fail(kSampleOp, "dialect is ", a.dialect, "; expected 0 to ", kDialectCount - 1);
  }
  p.dialect = static_cast<Dialect>(a.dialect);
  return p;
}

inline void check_output(const char* name, const Tensor& out, ScalarType type,
                         const TopKTopPSampleParams& p, const Tensor& logits, bool is_matrix) {
  check_same_device(kSampleOp, name, out, "logits", logits);
  check_shape(kSampleOp, name, out, p.batch, is_matrix ? p.vocab : -1);
  check_dtype(kSampleOp, name, out, type);
  if (!out.is_contiguous())
    fail(kSampleOp, name, " is not contiguous; expected a contiguous tensor");
}

// kept_logits is written while logits and q are still read.
inline void check_apart(const char* name, const void* data, int64_t row_stride,
                        int64_t vocab_stride, int64_t element_size, const TopKTopPSampleParams& p) {
  if (data == nullptr || p.kept_logits == nullptr || p.batch == 0) return;
  const char* begin = static_cast<const char*>(data);
  const char* end =
      begin + ((p.batch - 1) * row_stride + (p.vocab - 1) * vocab_stride + 1) * element_size;
  const char* out = reinterpret_cast<const char*>(p.kept_logits);
  if (out < end && begin < out + p.batch * p.vocab * static_cast<int64_t>(sizeof(float))) {
    fail(kSampleOp, "kept_logits shares memory with ", name, "; expected a tensor of its own");
  }
}

inline void set_outputs(const SampleOutputs& out, const Tensor& logits, TopKTopPSampleParams* p) {
  check_output("index", out.index, ScalarType::Long, *p, logits, false);
  check_output("kept_count", out.kept_count, ScalarType::Int, *p, logits, false);
  check_output("status", out.status, ScalarType::Byte, *p, logits, false);
  if (out.kept_logits)
    check_output("kept_logits", *out.kept_logits, ScalarType::Float, *p, logits, true);
  if (out.logprob) check_output("logprob", *out.logprob, ScalarType::Float, *p, logits, false);
  p->index = out.index.mutable_data_ptr<int64_t>();
  p->kept_count = out.kept_count.mutable_data_ptr<int32_t>();
  p->status = out.status.mutable_data_ptr<uint8_t>();
  p->kept_logits = out.kept_logits ? out.kept_logits->mutable_data_ptr<float>() : nullptr;
  p->logprob = out.logprob ? out.logprob->mutable_data_ptr<float>() : nullptr;
  check_apart("logits", p->logits, p->logits_row_stride, p->logits_vocab_stride,
              p->dtype == DType::kFloat32 ? 4 : 2, *p);
  check_apart("q", p->q, p->q_row_stride, p->q_vocab_stride, 4, *p);
}

// The functional and the out variant of the op on one device, which `run(params, logits)` launches,
// with the device of the logits selected by Guard.
template <auto run, class Guard>
struct SampleOp {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> call(
      const Tensor& logits, int64_t top_k, const std::optional<Tensor>& top_k_rows, double top_p,
      const std::optional<Tensor>& top_p_rows, double min_p,
      const std::optional<Tensor>& min_p_rows, double temperature,
      const std::optional<Tensor>& temperature_rows, const std::optional<Tensor>& q,
      const std::optional<Tensor>& seed, const std::optional<Tensor>& position, double eps,
      bool return_logits, bool return_logprob, int64_t dialect, int64_t int_seed,
      int64_t int_position) {
    TopKTopPSampleParams p =
        sample_params({logits, top_k, top_k_rows, top_p, top_p_rows, min_p, min_p_rows, temperature,
                       temperature_rows, q, seed, position, eps, dialect, int_seed, int_position});
    const Guard guard(logits);
    SampleOutputs out{new_tensor(logits, {p.batch}, ScalarType::Long), std::nullopt, std::nullopt,
                      new_tensor(logits, {p.batch}, ScalarType::Int),
                      new_tensor(logits, {p.batch}, ScalarType::Byte)};
    Tensor kept, logprob;  // undefined, None in Python, where not asked for
    if (return_logits) kept = new_tensor(logits, {p.batch, p.vocab}, ScalarType::Float);
    if (return_logprob) logprob = new_tensor(logits, {p.batch}, ScalarType::Float);
    if (return_logits) out.kept_logits = kept;
    if (return_logprob) out.logprob = logprob;
    set_outputs(out, logits, &p);
    run(p, logits);
    return {out.index, kept, logprob, out.kept_count, out.status};
  }

  static void call_out(const Tensor& logits, int64_t top_k, const std::optional<Tensor>& top_k_rows,
                       double top_p, const std::optional<Tensor>& top_p_rows, double min_p,
                       const std::optional<Tensor>& min_p_rows, double temperature,
                       const std::optional<Tensor>& temperature_rows,
                       const std::optional<Tensor>& q, const std::optional<Tensor>& seed,
                       const std::optional<Tensor>& position, double eps, int64_t dialect,
                       int64_t int_seed, int64_t int_position, Tensor index,
                       std::optional<Tensor> kept_logits, std::optional<Tensor> logprob,
                       Tensor kept_count, Tensor status) {
    TopKTopPSampleParams p =
        sample_params({logits, top_k, top_k_rows, top_p, top_p_rows, min_p, min_p_rows, temperature,
                       temperature_rows, q, seed, position, eps, dialect, int_seed, int_position});
    set_outputs({index, kept_logits, logprob, kept_count, status}, logits, &p);
    const Guard guard(logits);
    run(p, logits);
  }
};

}  // namespace lmdecode::sampling
