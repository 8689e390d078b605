// The CUDA kernel of merge_attention_states, emulated, against the definition in double precision.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/merge_attention_states_kernel.cuh"
#include "check.h"

namespace lmdecode::attention {
namespace {

template <class T>
void store(T* to, float value) {
  if constexpr (std::is_same_v<T, float>) {
    *to = value;
  } else {
    to->bits = std::is_same_v<T, Half> ? emulation::f16_of(value) : emulation::bf16_of(value);
  }
}

template <class T>
void check_rows(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  std::normal_distribution<float> normal;
  MergeAttentionStatesParams p;
  p.sequences = 1 + below(2);
  p.heads = 1 + below(3);
  p.tokens = 1 + below(4);
  p.size = below(3) == 0 ? 8 * (1 + below(40)) : 1 + below(70);  // whole vectors, or any
  const int64_t gap = 1 + below(2), of_head = p.tokens * p.size;
  std::vector<T> outs[2];
  std::vector<float> lses[2];
  for (int i = 0; i < 2; ++i) {
    outs[i].resize(static_cast<size_t>(p.rows() * p.size * gap));
    for (T& value : outs[i]) store(&value, normal(random));
    for (int64_t row = 0; row < p.rows(); ++row) {
      lses[i].push_back(below(4) == 0 ? -std::numeric_limits<float>::infinity()
                                      : normal(random) * 4.0f);
      if (lses[i].back() < -1e9f) {  // not read
        for (int64_t at = 0; at < p.size * gap; ++at) {
          store(&outs[i][static_cast<size_t>(row * p.size * gap + at)], std::nanf(""));
        }
      }
    }
    p.states[i] = {outs[i].data(),
                   lses[i].data(),
                   {p.heads * of_head * gap, of_head * gap, p.size * gap, gap},
                   {p.heads * p.tokens, p.tokens, 1, 0}};
  }
  std::vector<T> out(static_cast<size_t>(p.rows() * p.size));
  std::vector<float> lse(static_cast<size_t>(p.rows()));
  p.out = out.data();
  p.lse = lse.data();
  p.out_strides = {p.heads * of_head, of_head, p.size, 1};
  p.lse_strides = {p.heads * p.tokens, p.tokens, 1, 0};
  emulation::launch(cuda_kernels::merge_attention_states_kernel<T>,
                    dim3(static_cast<unsigned>(1 + below(2))), dim3(64), 1, 0, seed % 6, p);
  for (int64_t row = 0; row < p.rows(); ++row) {
    double weight[2], sum = 0.0;
    for (int i = 0; i < 2; ++i) {
      weight[i] = std::exp(static_cast<double>(lses[i][static_cast<size_t>(row)]));
      sum += weight[i];
    }
    const double want_lse = std::log(sum);
    const double got_lse = static_cast<double>(lse[static_cast<size_t>(row)]);
    CHECK(got_lse == want_lse || std::fabs(got_lse - want_lse) < 1e-5);
    for (int64_t at = 0; at < p.size; ++at) {
      double want = 0.0;
      for (int i = 0; i < 2; ++i) {
        if (weight[i] == 0.0) continue;
        const size_t place = static_cast<size_t>((row * p.size + at) * gap);
        want += weight[i] / sum * static_cast<double>(to_float(outs[i][place]));
      }
      const double got = static_cast<double>(to_float(out[static_cast<size_t>(row * p.size + at)]));
      const double ulp = std::is_same_v<T, float> ? 2e-7 : std::is_same_v<T, Half> ? 6e-4 : 5e-3;
      CHECK(std::fabs(got - want) <= ulp * (1.0 + std::fabs(want)));
    }
  }
}

TEST(float32) {
  for (uint64_t seed = 0; seed < 200; ++seed) check_rows<float>(seed);
}
TEST(float16) {
  for (uint64_t seed = 0; seed < 200; ++seed) check_rows<Half>(seed);
}
TEST(bfloat16) {
  for (uint64_t seed = 0; seed < 200; ++seed) check_rows<BFloat16>(seed);
}

}  // namespace
}  // namespace lmdecode::attention

CHECK_MAIN()
