// The CUDA kernels of a sampler, emulated, against the CPU's: the same bits of all results and of
// the rows' states, for every schedule.
#include <cstdlib>
#include <iostream>
#include <memory>

#include "check.h"
#include "sampler_calls.h"
#include "sampling/sampler_kernel.cuh"
#include "sampling/sampler_levels.h"

namespace lmdecode::sampling::test {
namespace {

using Memory = std::unique_ptr<void, void (*)(void*)>;

Memory aligned(size_t bytes) {
  return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
}

// ---- the same call on the CPU and emulated

struct OnCpu {
  Memory workspace;

  explicit OnCpu(const SamplerLayout& layout) : workspace(nullptr, std::free) {
    SamplerWorkspace unused;
    workspace = aligned(split_sampler_workspace(nullptr, layout, &unused));
  }
  void operator()(const SamplerStepParams& p) const {
    default_::sampling::sampler_step_rows(p, 0, p.batch, workspace.get());
  }
  void operator()(const SamplerVerifyParams& v) const {
    default_::sampling::sampler_verify_rows(v, 0, v.step.batch, workspace.get());
  }
};

struct Emulated {
  unsigned threads, blocks;
  uint64_t schedule;

  void operator()(const SamplerStepParams& p) const {
    launch(p, p,
           {&cuda_kernels::sampler_step_kernel<float>, &cuda_kernels::sampler_step_kernel<Half>,
            &cuda_kernels::sampler_step_kernel<BFloat16>});
  }
  void operator()(const SamplerVerifyParams& v) const {
    launch(v, v.step,
           {&cuda_kernels::sampler_verify_kernel<float>, &cuda_kernels::sampler_verify_kernel<Half>,
            &cuda_kernels::sampler_verify_kernel<BFloat16>});
  }

 private:
  // Kernels in the order of DType.
  template <class Params>
  void launch(const Params& params, const SamplerStepParams& step,
              std::initializer_list<void (*)(Params, char*)> kernels) const {
    SamplerBlockWorkspace workspace;
    const size_t bytes = workspace.split(nullptr, step.layout);
    const Buffer<char> scratch(static_cast<int64_t>(bytes * blocks));
    emulation::launch(kernels.begin()[static_cast<int>(step.dtype)], dim3(blocks), dim3(threads), 1,
                      sizeof(cuda_kernels::RowStorage), schedule, params, scratch.data());
  }
};

StepResult call(const auto& run, const StepCase& c, const Rows& rows) { return step(run, c, rows); }
DraftResult call(const auto& run, const DraftCase& c, const Rows& rows) {
  return verify(run, c, rows);
}

int64_t calls_run = 0;

// From the same rows; these have gone on then.
template <class Case>
bool same_as_cpu(Random& random, const Case& c, Rows* rows, uint64_t seed, uint64_t schedule) {
  const Rows copy = rows->copy(rows->layout);
  const auto expected = call(OnCpu(rows->layout), c, *rows);
  ++calls_run;
  const unsigned blocks = 1 + static_cast<unsigned>(random.below(rows->batch));
  const Emulated emulated{random.any_of({32u, 64u, 128u}), blocks, schedule};
  std::string what = "another result";
  try {
    const auto result = call(emulated, c, copy);
    if (result == expected) return true;
    what = difference(expected, result);
  } catch (const std::exception& error) {
    what = error.what();
  }
  std::cout << "case " << seed << " threads " << emulated.threads << " blocks " << blocks
            << " schedule " << schedule << " vocab " << rows->layout.vocab << ": " << what
            << std::endl;
  CHECK(false);
  return false;
}

void run_lives(uint64_t first_seed, int count, int64_t min_vocab, int64_t max_vocab, int steps) {
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = first_seed + static_cast<uint64_t>(i);
    const int64_t vocab = min_vocab + static_cast<int64_t>(seed) % (max_vocab - min_vocab + 1);
    Random random(seed * 7919 + 1);
    run_life(seed, vocab, steps, [&](const auto& c, Rows* rows, uint64_t s) {
      return same_as_cpu(random, c, rows, s, random.below(6));
    });
  }
}

TEST(small_rows) { run_lives(1, 120, 1, 70, 8); }
TEST(rows_about_a_power_of_two) { run_lives(10000, 20, 126, 130, 6); }
TEST(rows_of_1000) { run_lives(20000, 12, 990, 1030, 5); }
TEST(rows_of_5000) { run_lives(30000, 3, 4990, 5010, 3); }

TEST(more_than_800_calls) {
  std::cout << calls_run << " calls" << std::endl;
  CHECK(check::filtered || calls_run > 800);
}

}  // namespace
}  // namespace lmdecode::sampling::test

CHECK_MAIN()
