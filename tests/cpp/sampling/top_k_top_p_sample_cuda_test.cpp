// The emulated CUDA kernel of top_k_top_p_sample against the CPU's bits, in every layout.
#include <iostream>

#include "check.h"
#include "emulated_sample.h"

namespace lmdecode::sampling::test {
namespace {

int64_t cases_run = 0, launches_run = 0;

bool compare(const SampleCase& c, const SamplingLaunchPlan& plan, uint64_t schedule,
             const SampleResult& expected) {
  ++launches_run;
  std::string what;
  try {
    const SampleResult result = run_emulated(c, plan, schedule);
    if (result == expected) return true;
    what = test::difference(c, expected, result);
  } catch (const std::exception& error) {
    what = error.what();
  }
  std::cout << c.describe() << "\n  cluster " << plan.cluster_size << " threads " << plan.threads
            << " slice " << plan.slice << " cached " << plan.cached << " clusters " << plan.clusters
            << " rank_chunk " << plan.rank_chunk << " schedule " << schedule << what << std::endl;
  return false;
}

void run_cases(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab,
               int schedules) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    Random random(seed * 7919 + 1);
    const int64_t vocab = min_vocab + random.below(max_vocab - min_vocab + 1);
    const SampleCase c = random_case(seed, vocab > 2000 ? 2 : 1 + random.below(4), vocab);
    const SampleResult expected = run_cpu(c);
    ++cases_run;
    for (int s = 0; s < schedules; ++s) {
      const uint64_t schedule =
          schedules == 6 ? static_cast<uint64_t>(s) : (seed + static_cast<uint64_t>(s)) % 6;
      const bool same = compare(c, random_plan(random, c), schedule, expected);
      CHECK(same);
      if (!same) return;
    }
  }
}

TEST(small_rows_on_all_schedules) { run_cases(1, 60, 1, 70, 6); }
TEST(small_rows) { run_cases(1000, 400, 1, 70, 2); }
TEST(rows_about_a_power_of_two) { run_cases(2000, 60, 127, 129, 2); }
TEST(rows_of_1000) { run_cases(3000, 60, 1000, 1003, 1); }
TEST(rows_of_5000) { run_cases(4000, 24, 4999, 5003, 1); }
TEST(rows_of_20000) { run_cases(5000, 4, 19997, 20011, 1); }

TEST(more_than_500_cases) {
  std::cout << cases_run << " cases, " << launches_run << " launches" << std::endl;
  CHECK(check::filtered || (cases_run > 500 && launches_run > 1000));
}

// A bin of masses holds what the masses are, in their order, and sums up without a carry.
TEST(bins_of_masses) {
  Random random(7);
  for (int i = 0; i < 200000; ++i) {
    TokenWeight weight;
    weight.probabilities = i % 4 == 0;
    weight.max = static_cast<float>(10.0 * random.normal());
    weight.factor = exponent_factor(random.any_of({1.0f, 0.3f, 7.0f, 1e4f, 1e-30f}));
    weight.fraction_bits = static_cast<int>(30 + random.below(14));
    const auto any_logit = [&] {
      if (weight.probabilities) return static_cast<float>(std::exp2(-50.0 * random.uniform()));
      const double depth = random.uniform() * (random.chance(0.5) ? 50.0 : 1e-3);
      return static_cast<float>(weight.max - depth / weight.factor);
    };
    const float a = any_logit();
    const auto binned = [&](float logit) {
      return weight.probabilities ? cuda_kernels::binned_probability(weight, logit)
                                  : cuda_kernels::binned_weight(weight, logit);
    };
    const cuda_kernels::BinnedMass mass = binned(a);
    CHECK(uint64_t{mass.amount} << cuda_kernels::mass_shift(mass.bin) == weight.mass(a));
    CHECK(mass.bin < uint32_t{1} << cuda_tuning::kDigitBits);
    CHECK((mass.amount >> cuda_kernels::kLowAmountBits) * cuda_kernels::kMostBinned <= 0xffffffff);
    const float next = value_of_key(order_key(a) + 1 + static_cast<uint32_t>(random.below(9)));
    if (next <= weight.max || weight.probabilities) CHECK(binned(next).bin >= mass.bin);
    if (check::failures) return;
  }
  CHECK(((uint64_t{1} << cuda_kernels::kLowAmountBits) - 1) * cuda_kernels::kMostBinned <=
        0xffffffff);
}

// A row of f32 logits, logit_of(token), with no filter but what is set afterwards.
template <class LogitOf>
SampleCase plain_case(uint64_t seed, int64_t vocab, LogitOf logit_of) {
  SampleCase c = random_case(seed, 1, vocab);
  TopKTopPSampleParams& p = c.params;
  p.dtype = DType::kFloat32;
  p.dialect = static_cast<Dialect>(0);
  p.logits_vocab_stride = 1;
  p.logits_row_stride = vocab;
  c.logits = Buffer<unsigned char>(4 * vocab);
  p.logits = c.logits.data();
  for (int64_t i = 0; i < vocab; ++i) {
    const float logit = logit_of(i);
    std::memcpy(c.logits.data() + 4 * i, &logit, 4);
  }
  p.top_k = {};
  p.min_p = {};
  p.top_p = {};
  p.top_p.value = 1.0f;
  p.temperature = {};
  p.temperature.value = 1.0f;
  return c;
}

// The last tokens of top-p have logits made equal by temperature, on both sides of a bin's edge.
TEST(classes_at_the_edges_of_bins) {
  int straddled = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const int64_t vocab = 100 + random.below(100);
    const float temperature = random.any_of({0.7f, 0.9f, 1.3f, 1.9f});
    const double exponent = -(static_cast<double>(random.below(100)) + 0.5) / 32;
    const float edge = static_cast<float>(exponent / exponent_factor(temperature));
    SampleCase c = plain_case(seed, vocab, [&](int64_t i) {
      const auto offset = static_cast<uint32_t>(random.below(16));
      return i == 0 ? 0.0f : value_of_key(order_key(edge) - 8 + offset);
    });
    c.params.temperature.value = temperature;
    const double mass = std::exp2(exponent) * static_cast<double>(vocab - 1);
    c.params.top_p.value = static_cast<float>((1 + mass * random.uniform()) / (1 + mass));
    const TokenWeight weight{0.0f, exponent_factor(temperature), 43};
    const float bottom = class_bottom(edge, temperature);
    straddled += cuda_kernels::mass_bin(weight, bottom) != cuda_kernels::mass_bin(weight, edge);
    const bool same = compare(c, random_plan(random, c), seed % 6, run_cpu(c));
    CHECK(same);
    if (!same) return;
  }
  CHECK(straddled > 10);
}

// Weights that are as large as the noise, so that all tokens may win.
TEST(scores_that_nearly_tie) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Random random(seed);
    const int64_t vocab = 20 + random.below(200), position = random.below(1000);
    SampleCase c = plain_case(seed, vocab, [&](int64_t i) {
      return static_cast<float>(
          std::log(token_noise(static_cast<int64_t>(seed), position, static_cast<uint32_t>(i))));
    });
    TopKTopPSampleParams& p = c.params;
    p.q = nullptr;
    p.has_seed = true;
    p.seed = {};
    p.seed.value = static_cast<int64_t>(seed);
    p.position = {};
    p.position.value = position;
    const bool same = compare(c, random_plan(random, c), seed % 6, run_cpu(c));
    CHECK(same);
    if (!same) return;
  }
}

// A launch as the host plans it, on a device that would have 132 multiprocessors.
TEST(planned_launches) {
  const SamplingDevice device{132, 227 * 1024, 228 * 1024, 8};
  for (uint64_t seed = 6000; seed < 6006; ++seed) {
    const SampleCase c = random_case(seed, 2, 33000 + static_cast<int64_t>(seed % 7));
    const int element_bytes = c.params.dtype == DType::kFloat32 ? 4 : 2;
    const SamplingLaunchPlan plan = plan_sampling_launch(2, c.params.vocab, element_bytes,
                                                         sizeof(cuda_kernels::RowStorage), device);
    CHECK(plan.cluster_size > 1);
    CHECK(compare(c, plan, seed % 6, run_cpu(c)));
  }
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
