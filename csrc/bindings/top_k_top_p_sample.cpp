// top_k_top_p_sample on either device, and its variant that writes to given tensors.
#include "sampling/top_k_top_p_sample.h"

#include <cmath>

#include "bindings/device.h"

namespace lmdecode::sampling {
namespace {

constexpr const char* kOp = "top_k_top_p_sample";

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

TopKTopPSampleParams sample_params(const SampleArguments& a) {
  TopKTopPSampleParams p;
  check_rank(kOp, "logits", a.logits, 2, "[batch, vocab]");
  p.dtype = float_dtype(kOp, "logits", a.logits);
  p.batch = a.logits.size(0);
  p.vocab = a.logits.size(1);
  if (p.vocab < 1 || p.vocab >= (int64_t{1} << 31)) {
    fail(kOp, "logits has shape ", shape_text(a.logits),
         "; expected a vocabulary of 1 to 2^31 - 1 tokens");
  }
  p.logits = a.logits.const_data_ptr();
  p.logits_row_stride = a.logits.stride(0);
  p.logits_vocab_stride = a.logits.stride(1);
  const Arguments arguments(kOp, "logits", a.logits);
  const auto rows = [&]<class T>(const char* name, T value, const OptionalTensor& tensor) {
    if (!tensor) return PerRow<T>{value, nullptr, 0};
    const T* const data = arguments.strided<const T>(name, *tensor, {p.batch});
    return PerRow<T>{value, data, tensor->stride(0)};
  };
  p.top_k = rows("top_k", a.top_k, a.top_k_rows);
  p.top_p = rows("top_p", static_cast<float>(a.top_p), a.top_p_rows);
  p.min_p = rows("min_p", static_cast<float>(a.min_p), a.min_p_rows);
  p.temperature = rows("temperature", static_cast<float>(a.temperature), a.temperature_rows);
  if (a.q) {
    p.q = arguments.strided<const float>("q", *a.q, {p.batch, p.vocab});
    if (a.seed) fail(kOp, "q and seed were both given; expected one source of noise");
    p.q_row_stride = a.q->stride(0);
    p.q_vocab_stride = a.q->stride(1);
  }
  if (!(a.eps >= 0.0) || !std::isfinite(static_cast<float>(a.eps)))
    fail(kOp, "eps is ", a.eps, "; expected a number >= 0, finite in float32");
  p.eps = static_cast<float>(a.eps);
  if (a.int_seed >= 0 && (a.seed || a.q)) {
    fail(kOp, "int_seed and ", a.seed ? "seed" : "q",
         " were both given; expected one source of noise");
  }
  p.has_seed = a.seed.has_value() || a.int_seed >= 0;
  p.seed = rows("seed", a.int_seed, a.seed);
  p.position = rows("position", a.int_position, a.position);
  if (a.dialect < 0 || a.dialect >= kDialectCount) {
    fail(kOp, "dialect is ", a.dialect, "; expected 0 to ", kDialectCount - 1);
  }
  p.dialect = static_cast<Dialect>(a.dialect);
  return p;
}

// kept_logits is written while logits and q are still read.
void set_outputs(const SampleArguments& a, const SampleOutputs& out, TopKTopPSampleParams* p) {
  const Arguments arguments(kOp, "logits", a.logits);
  p->index = arguments.contiguous<int64_t>("index", out.index, {p->batch});
  p->kept_count = arguments.contiguous<int32_t>("kept_count", out.kept_count, {p->batch});
  p->status = arguments.contiguous<uint8_t>("status", out.status, {p->batch});
  p->kept_logits =
      arguments.contiguous<float>("kept_logits", out.kept_logits, {p->batch, p->vocab});
  p->logprob = arguments.contiguous<float>("logprob", out.logprob, {p->batch});
  if (!out.kept_logits) return;
  check_apart(kOp, "kept_logits", *out.kept_logits, "logits", a.logits);
  if (a.q) check_apart(kOp, "kept_logits", *out.kept_logits, "q", *a.q);
}

void run(const TopKTopPSampleParams& params, const OnDevice& device) {
  if constexpr (kIsCuda) {
    top_k_top_p_sample_cuda(params, device.stream());
  } else {
    top_k_top_p_sample_cpu(params);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample(
    const Tensor& logits, int64_t top_k, const std::optional<Tensor>& top_k_rows, double top_p,
    const std::optional<Tensor>& top_p_rows, double min_p, const std::optional<Tensor>& min_p_rows,
    double temperature, const std::optional<Tensor>& temperature_rows,
    const std::optional<Tensor>& q, const std::optional<Tensor>& seed,
    const std::optional<Tensor>& position, double eps, bool return_logits, bool return_logprob,
    int64_t dialect, int64_t int_seed, int64_t int_position) {
  const SampleArguments arguments{
      logits,           top_k, top_k_rows, top_p,    top_p_rows, min_p,   min_p_rows, temperature,
      temperature_rows, q,     seed,       position, eps,        dialect, int_seed,   int_position};
  TopKTopPSampleParams p = sample_params(arguments);
  const OnDevice device(logits);
  const Tensor index = new_tensor(logits, {p.batch}, ScalarType::Long);
  const Tensor kept_count = new_tensor(logits, {p.batch}, ScalarType::Int);
  const Tensor status = new_tensor(logits, {p.batch}, ScalarType::Byte);
  p.index = data_of<int64_t>(index);
  p.kept_count = data_of<int32_t>(kept_count);
  p.status = data_of<uint8_t>(status);
  Tensor kept, logprob;  // undefined, None in Python, where not asked for
  if (return_logits) {
    kept = new_tensor(logits, {p.batch, p.vocab}, ScalarType::Float);
    p.kept_logits = data_of<float>(kept);
  }
  if (return_logprob) {
    logprob = new_tensor(logits, {p.batch}, ScalarType::Float);
    p.logprob = data_of<float>(logprob);
  }
  run(p, device);
  return {index, kept, logprob, kept_count, status};
}

void sample_out(const Tensor& logits, int64_t top_k, const std::optional<Tensor>& top_k_rows,
                double top_p, const std::optional<Tensor>& top_p_rows, double min_p,
                const std::optional<Tensor>& min_p_rows, double temperature,
                const std::optional<Tensor>& temperature_rows, const std::optional<Tensor>& q,
                const std::optional<Tensor>& seed, const std::optional<Tensor>& position,
                double eps, int64_t dialect, int64_t int_seed, int64_t int_position, Tensor index,
                std::optional<Tensor> kept_logits, std::optional<Tensor> logprob, Tensor kept_count,
                Tensor status) {
  const SampleArguments arguments{
      logits,           top_k, top_k_rows, top_p,    top_p_rows, min_p,   min_p_rows, temperature,
      temperature_rows, q,     seed,       position, eps,        dialect, int_seed,   int_position};
  TopKTopPSampleParams p = sample_params(arguments);
  set_outputs(arguments, {index, kept_logits, logprob, kept_count, status}, &p);
  const OnDevice device(logits);
  run(p, device);
}

}  // namespace
}  // namespace lmdecode::sampling

LMD_OPS(m) {
  m.impl("top_k_top_p_sample", TORCH_BOX(&lmdecode::sampling::sample));
  m.impl("top_k_top_p_sample.out", TORCH_BOX(&lmdecode::sampling::sample_out));
}
