// The layout of the launch of top_k_top_p_sample on devices of several sizes.
#include "sampling/sampling_launch_plan.h"

#include "check.h"

namespace lmdecode::sampling {
namespace {

constexpr size_t kFixed = 35 * 1024;
const SamplingDevice kHopper{132, 227 * 1024, 228 * 1024, 8};
const SamplingDevice kAmpere{108, 163 * 1024, 164 * 1024, 1};
const SamplingDevice kSmall{10, 99 * 1024, 100 * 1024, 1};

SamplingLaunchPlan plan(int64_t batch, int64_t vocab, int element_bytes,
                        const SamplingDevice& device) {
  return plan_sampling_launch(batch, vocab, element_bytes, kFixed, device);
}

TEST(every_token_has_a_block_and_every_limit_holds) {
  for (const SamplingDevice& device : {kHopper, kAmpere, kSmall, SamplingDevice{}}) {
    for (const int64_t batch :
         {int64_t{1}, int64_t{3}, int64_t{64}, int64_t{100000}, int64_t{1} << 33}) {
      for (int64_t vocab = 1; vocab < int64_t{1} << 31; vocab = vocab * 5 / 2 + 1) {
        for (const int bytes : {2, 4}) {
          const SamplingLaunchPlan p = plan(batch, vocab, bytes, device);
          CHECK(p.cluster_size >= 1 && p.cluster_size <= device.max_cluster_size);
          CHECK_EQ(p.cluster_size & (p.cluster_size - 1), 0);
          CHECK(p.slice * p.cluster_size >= vocab);
          CHECK(p.cached >= 0 && p.cached <= p.slice);
          CHECK(p.shared_bytes <= static_cast<size_t>(device.shared_bytes_per_block));
          CHECK_EQ(p.shared_bytes, kFixed + sampling_cache_bytes(p.cached, bytes));
          CHECK(p.threads >= 32 && p.threads <= cuda_tuning::kMaxThreads);
          CHECK_EQ(p.threads & (p.threads - 1), 0);
          CHECK(p.clusters >= 1 && p.clusters <= batch);
          CHECK(p.clusters * p.cluster_size < int64_t{1} << 31);
        }
      }
    }
  }
}

TEST(no_shared_memory_to_spare_means_no_cache) {
  const SamplingDevice tiny{1, static_cast<int64_t>(kFixed), static_cast<int64_t>(kFixed), 1};
  const SamplingLaunchPlan p = plan(1, 1000, 4, tiny);
  CHECK_EQ(p.cached, 0);
  CHECK_EQ(p.shared_bytes, kFixed);
}

TEST(rows_of_language_models_stay_in_shared_memory_of_a_cluster) {
  for (const int64_t vocab : {32000, 50257, 128256, 151936, 262144}) {
    for (const int bytes : {2, 4}) {
      for (const int64_t batch : {1, 64, 512}) {
        const SamplingLaunchPlan p = plan(batch, vocab, bytes, kHopper);
        CHECK_EQ(p.cached, p.slice);
      }
    }
  }
  // Two blocks at a time on each multiprocessor.
  CHECK(plan(512, 128256, 4, kHopper).shared_bytes <= 113 * 1024);
  CHECK(plan(512, 151936, 4, kHopper).shared_bytes <= 113 * 1024);
  // 4 MiB are more than a cluster holds: the rest is read again.
  const SamplingLaunchPlan large = plan(8, 1 << 20, 4, kHopper);
  CHECK_EQ(large.cluster_size, 8);
  CHECK(large.cached > 0 && large.cached < large.slice);
}

TEST(small_rows_and_large_batches_are_not_split) {
  CHECK_EQ(plan(1, 1000, 4, kHopper).cluster_size, 1);
  CHECK_EQ(plan(1024, 8000, 4, kHopper).cluster_size, 1);
  CHECK_EQ(plan(1, 128256, 4, kHopper).cluster_size, 8);
  CHECK_EQ(plan(1, 128256, 4, kAmpere).cluster_size, 1);
}

TEST(empty_cache_takes_no_room) {
  CHECK_EQ(sampling_cache_bytes(0, 4), size_t{0});
  CHECK_EQ(sampling_cache_bytes(1, 2), size_t{32});
  CHECK_EQ(sampling_cache_bytes(8, 2), size_t{32});
  CHECK_EQ(sampling_cache_bytes(9, 2), size_t{48});
}

}  // namespace
}  // namespace lmdecode::sampling

CHECK_MAIN()
