// The emulation itself, under ASan + UBSan and under -fsanitize=thread: it catches planted faults.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "common/cuda_intrinsics.cuh"

namespace lmdecode {
namespace {

using check::contains;
using check::error_of;
using emulation::launch;

constexpr int kSchedules = 8;

std::vector<float> random_row(int size, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<float> row(size);
  for (float& value : row) value = float(int(generator() % 2001) - 1000) / 256;  // sums are exact
  return row;
}

// ---- kernels that are right ---------------------------------------------------------------------

struct RowStorage {
  float sum[32];
  unsigned long long best[32];
};

template <bool kBarrier>
__global__ void sum_argmax_kernel(const float* rows, int size, float* sums, int* argmax) {
  RowStorage& storage = cuda::shared_storage<RowStorage>();
  const float* row = rows + std::size_t(blockIdx.x) * size;
  float sum = 0;
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const float value = __ldg(row + i);
    sum += value;
    const unsigned bits = __float_as_uint(value + 0.0f);
    const unsigned key = (bits >> 31) ? ~bits : bits | 0x80000000u;
    best = max(best, (unsigned long long)key << 32 | (0xffffffffu - unsigned(i)));
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(cuda::kFullMask, sum, offset);
    best = max(best, __shfl_down_sync(cuda::kFullMask, best, offset));
  }
  if (cuda::lane_id() == 0) {
    storage.sum[cuda::warp_id()] = sum;
    storage.best[cuda::warp_id()] = best;
  }
  if constexpr (kBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) {
      sum += storage.sum[warp];
      best = max(best, storage.best[warp]);
    }
    sums[blockIdx.x] = sum;
    argmax[blockIdx.x] = int(0xffffffffu - unsigned(best));
  }
}

// Launches it; true if all rows come out right.
template <bool kBarrier>
bool sum_argmax(int rows, int size, int threads, std::uint64_t seed) {
  const std::vector<float> values = random_row(rows * size, 1);
  std::vector<float> sums(rows);
  std::vector<int> argmax(rows);
  launch(sum_argmax_kernel<kBarrier>, rows, threads, 1, sizeof(RowStorage), seed, values.data(),
         size, sums.data(), argmax.data());
  bool right = true;
  for (int r = 0; r < rows; ++r) {
    const auto begin = values.begin() + r * size, end = begin + size;
    right = right && sums[r] == std::accumulate(begin, end, 0.0f) &&
            argmax[r] == std::max_element(begin, end) - begin;
  }
  return right;
}

TEST(block_sum_and_argmax) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    for (const int threads : {32, 128, 1024}) CHECK(sum_argmax<true>(3, 1000, threads, seed));
  }
}

struct HistogramStorage {
  unsigned counts[64];
};

__global__ void histogram_kernel(const unsigned* values, int size, unsigned* counts,
                                 int* warps_with_zero) {
  HistogramStorage& storage = cuda::shared_storage<HistogramStorage>();
  for (unsigned i = threadIdx.x; i < 64; i += blockDim.x) storage.counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    atomicAdd(&storage.counts[values[i] % 64], 1u);
  __syncthreads();
  for (unsigned i = threadIdx.x; i < 64; i += blockDim.x) atomicAdd(counts + i, storage.counts[i]);
  const bool any = __any_sync(cuda::kFullMask, storage.counts[threadIdx.x % 64] == 0);
  if (any && cuda::lane_id() == 0) atomicAdd(warps_with_zero, 1);
}

TEST(histogram_by_atomics_over_two_blocks) {
  std::vector<unsigned> values(2000);
  std::iota(values.begin(), values.end(), 0u);
  for (int seed = 0; seed < kSchedules; ++seed) {
    std::vector<unsigned> counts(64);
    int warps_with_zero = 0;
    launch(histogram_kernel, 2, 96, 1, sizeof(HistogramStorage), seed, values.data(), 2000,
           counts.data(), &warps_with_zero);
    for (int i = 0; i < 64; ++i) CHECK_EQ(counts[i], 2u * (2000 / 64 + (i < 2000 % 64)));
    CHECK_EQ(warps_with_zero, 0);
  }
}

__global__ void warp_kernel(unsigned* out) {
  const int lane = cuda::lane_id();
  const unsigned odd = __ballot_sync(cuda::kFullMask, lane % 2);
  const unsigned third = __match_any_sync(cuda::kFullMask, lane % 3);
  int prefix = 1;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(cuda::kFullMask, prefix, offset);
    if (lane >= offset) prefix += other;
  }
  const int in_segment = __shfl_sync(cuda::kFullMask, lane, 1, 8);
  const int down = __shfl_down_sync(cuda::kFullMask, lane, 3, 8);
  const int across = __shfl_xor_sync(cuda::kFullMask, lane, 8, 8);
  unsigned half = 0;
  // Two halves of a warp apart, then together again.
  if (lane < 16)
    half = __reduce_add_sync(0x0000ffffu, unsigned(lane));
  else
    half = __reduce_max_sync(0xffff0000u, unsigned(lane));
  __syncwarp();
  const bool right =
      odd == 0xaaaaaaaau && (third >> lane & 1) && __popc(third) == (lane % 3 == 2 ? 10 : 11) &&
      prefix == lane + 1 && in_segment == lane / 8 * 8 + 1 &&
      down == (lane % 8 + 3 >= 8 ? lane : lane + 3) && across == (lane & 8 ? lane - 8 : lane);
  const int votes = __syncthreads_count(right) + (__syncthreads_and(right) << 16) +
                    (__syncthreads_or(lane == 40) << 17);
  out[threadIdx.x] = unsigned(votes) | (half == (lane < 16 ? 120u : 31u)) << 20;
}

TEST(warp_exchanges_and_votes) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    std::vector<unsigned> out(64);
    launch(warp_kernel, 1, 64, 1, 0, seed, out.data());
    for (const unsigned result : out) CHECK_EQ(result, 64u | 1u << 16 | 1u << 20);
  }
}

__global__ void index_kernel(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
      block * 100 + thread + cuda::cluster_rank() * 10000;
}

TEST(indices_in_three_dimensions) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    std::vector<unsigned> out(4 * 3 * 2 * 40);
    launch(index_kernel, dim3(4, 3, 2), dim3(5, 4, 2), 2, 0, seed, out.data());
    for (unsigned i = 0; i < out.size(); ++i)
      CHECK_EQ(out[i], i / 40 * 100 + i % 40 + i / 40 % 2 * 10000);
  }
}

TEST(bits) {
  CHECK_EQ(__clz(0), 32);
  CHECK_EQ(__clzll(1), 63);
  CHECK_EQ(__ffs(0), 0);
  CHECK_EQ(__ffs(8), 4);
  CHECK_EQ(__popcll(~0ull), 64);
  CHECK_EQ(__umulhi(0x80000000u, 6u), 3u);
  CHECK_EQ(__brev(1u), 0x80000000u);
}

struct ClusterStorage {
  unsigned long long sum;
  unsigned long long total;
};

// Blocks add up parts of a row; block 0 gathers through distributed memory, all read its total.
template <bool kStay>
__global__ void cluster_sum_kernel(const unsigned* values, int size, unsigned long long* out) {
  ClusterStorage& storage = cuda::shared_storage<ClusterStorage>();
  if (threadIdx.x == 0) storage.sum = 0;
  __syncthreads();
  const unsigned stride = blockDim.x * cuda::cluster_size();
  const unsigned row = blockIdx.x / cuda::cluster_size();
  for (int i = int(cuda::cluster_rank() * blockDim.x + threadIdx.x); i < size; i += int(stride)) {
    atomicAdd(&storage.sum, (unsigned long long)(values[i] + row));
  }
  cuda::cluster_sync();
  if (cuda::cluster_rank() == 0 && threadIdx.x == 0) {
    storage.total = 0;
    for (unsigned rank = 0; rank < cuda::cluster_size(); ++rank) {
      storage.total += cuda::map_shared_rank(&storage, rank)->sum;
    }
  }
  cuda::cluster_sync();
  if (threadIdx.x == 0) out[blockIdx.x] = cuda::map_shared_rank(&storage, 0)->total;
  if constexpr (kStay) cuda::cluster_sync();  // block 0 must not leave before it has been read
}

template <bool kStay>
bool cluster_sum(std::uint64_t seed) {
  std::vector<unsigned> values(500);
  std::iota(values.begin(), values.end(), 0u);
  std::vector<unsigned long long> out(12);
  launch(cluster_sum_kernel<kStay>, 12, 64, 4, sizeof(ClusterStorage), seed, values.data(), 500,
         out.data());
  bool right = true;
  for (unsigned i = 0; i < 12; ++i) right = right && out[i] == 499u * 500 / 2 + i / 4 * 500;
  return right;
}

TEST(cluster_sum_by_distributed_shared_memory) {
  for (int seed = 0; seed < kSchedules; ++seed) CHECK(cluster_sum<true>(seed));
}

struct PipelineStorage {
  float4 tile[2][64];
};

template <bool kWait>
__global__ void pipeline_kernel(const float* values, int tiles, int size, float* out) {
  PipelineStorage& storage = cuda::shared_storage<PipelineStorage>();
  const auto load = [&](int tile) {
    const int rest = (size - (tile * 256 + int(threadIdx.x) * 4)) * 4;  // bytes
    if (tile < tiles) {
      cuda::copy_async_16(&storage.tile[tile % 2][threadIdx.x],
                          rest > 0 ? values + tile * 256 + threadIdx.x * 4 : values,
                          rest < 0 ? 0 : min(rest, 16));
    }
    cuda::copy_async_commit();
  };
  load(0);
  float sum = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    load(tile + 1);
    if constexpr (kWait) cuda::copy_async_wait<1>();
    __syncthreads();
    const float4 v = storage.tile[tile % 2][63 - threadIdx.x];
    sum += v.x + v.y + v.z + v.w;
    __syncthreads();
  }
  atomicAdd(out, sum);
}

template <bool kWait>
bool pipeline(std::uint64_t seed) {
  const std::vector<float> values = random_row(1200, 5);
  alignas(16) float copy[1200];
  std::copy(values.begin(), values.end(), copy);
  float sum = 0;
  launch(pipeline_kernel<kWait>, 1, 64, 1, sizeof(PipelineStorage), seed, copy, 5, 1197, &sum);
  return sum == std::accumulate(values.begin(), values.begin() + 1197, 0.0f);
}

TEST(copy_async_pipeline_with_a_tail) {
  for (int seed = 0; seed < kSchedules; ++seed) CHECK(pipeline<true>(seed));
}

// ---- planted faults -----------------------------------------------------------------------------

TEST(race_checker_is_active_in_its_build) {
#if defined(LMD_RACE_BUILD)
  CHECK(emulation::race_checker_active());
#else
  CHECK(!emulation::race_checker_active());
#endif
}

// Whether a first schedule gives a wrong result or an error; each must under the race checker.
template <class Run>
void check_caught(Run&& run) {
  int caught = 0;
  for (int seed = 0; seed < kSchedules; ++seed) {
    bool right = false;
    const std::string error = error_of([&] { right = run(std::uint64_t(seed)); });
    caught += !error.empty() || !right;
    if (emulation::race_checker_active())
      CHECK(contains(error, "race") || contains(error, "nobody wrote"));
  }
  CHECK(caught > 0);
}

TEST(missing_barrier_is_caught) {
  check_caught([](std::uint64_t seed) { return sum_argmax<false>(1, 1000, 256, seed); });
}

TEST(missing_wait_for_a_copy_is_caught) {
  int wrong = 0;
  for (int seed = 0; seed < kSchedules; ++seed) wrong += !pipeline<false>(seed);
  CHECK(wrong > 0);
}

struct Counter {
  int value;
};

__global__ void increment_kernel(int* out) {
  Counter& counter = cuda::shared_storage<Counter>();
  if (threadIdx.x == 0) counter.value = 0;
  __syncthreads();
  const int old = counter.value;
  cuda::schedule_point();
  counter.value = old + 1;
  __syncthreads();
  if (threadIdx.x == 0) *out = counter.value;
}

TEST(increment_without_atomic_is_caught) {
  check_caught([](std::uint64_t seed) {
    int out = 0;
    launch(increment_kernel, 1, 64, 1, sizeof(Counter), seed, &out);
    return out == 64;
  });
}

struct Broadcast {
  int value;
};

// The second value may overwrite the first before all have read it.
__global__ void reuse_kernel(int* out) {
  Broadcast& shared = cuda::shared_storage<Broadcast>();
  int sum = 0;
  for (int round = 1; round <= 2; ++round) {
    if (threadIdx.x == 0) shared.value = round;
    __syncthreads();
    sum += shared.value;
  }
  out[threadIdx.x] = sum;
}

TEST(missing_barrier_before_reuse_is_caught) {
  check_caught([](std::uint64_t seed) {
    std::vector<int> out(64);
    launch(reuse_kernel, 1, 64, 1, sizeof(Broadcast), seed, out.data());
    return std::all_of(out.begin(), out.end(), [](int sum) { return sum == 3; });
  });
}

__global__ void divergent_barrier_kernel() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_against_warp_kernel() {
  if (threadIdx.x == 5)
    __syncthreads();
  else
    __syncwarp();
}
__global__ void early_exit_kernel(int* out) {
  if (threadIdx.x >= 40) return;  // counts as arrived
  const int arrived = __syncthreads_count(1);
  if (threadIdx.x == 0) *out = arrived;
}
__global__ void exited_lane_kernel() {
  if (threadIdx.x == 7) return;
  __syncwarp();
}
__global__ void wrong_mask_kernel() { __ballot_sync(0xfffffffeu, 1); }
__global__ void mixed_exchange_kernel() {
  if (threadIdx.x % 2)
    __any_sync(cuda::kFullMask, 1);
  else
    __shfl_sync(cuda::kFullMask, 1, 0);
}
__global__ void outside_mask_kernel() {
  if (threadIdx.x < 16) __shfl_xor_sync(0xffffu, 1, 16);
}
__global__ void spin_kernel(int* flag) {
  while (atomicAdd(flag, 0) == 0) {
  }
}
__global__ void throwing_kernel() {
  if (threadIdx.x == 3) throw std::runtime_error("from inside");
  __syncthreads();
}
__global__ void storage_kernel() { cuda::shared_storage<RowStorage>().sum[0] = 1; }

TEST(divergence_and_deadlock_are_reported) {
  for (int seed = 0; seed < kSchedules; ++seed) {
    const auto error = [&](auto kernel) {
      return error_of([&] { launch(kernel, 1, 64, 1, 16, seed); });
    };
    CHECK(contains(error(divergent_barrier_kernel), "waits at line"));
    CHECK(contains(error(barrier_against_warp_kernel), "deadlock"));
    const std::string exited = error(exited_lane_kernel);
    CHECK(contains(exited, "which has exited") || contains(exited, "exits while lane"));
    CHECK(contains(error(wrong_mask_kernel), "leaves out lane 0"));
    CHECK(contains(error(mixed_exchange_kernel), "meets lane"));
    CHECK(contains(error(outside_mask_kernel), "outside its mask"));
    CHECK(contains(error(throwing_kernel), "from inside"));
    CHECK(contains(error(storage_kernel), "the launch gave 16"));
    int arrived = 0;
    launch(early_exit_kernel, 1, 64, 1, 0, seed, &arrived);
    CHECK_EQ(arrived, 40);
    CHECK(sum_argmax<true>(1, 100, 64, seed));  // nothing of the failures stays behind
  }
}

TEST(endless_spinning_is_reported) {
  int flag = 0;
  CHECK(contains(error_of([&] { launch(spin_kernel, 1, 2, 1, 0, 0, &flag); }), "no progress"));
}

TEST(wrong_launches_are_refused) {
  CHECK(contains(error_of([] { launch(storage_kernel, 1, 1025, 1, 0, 0); }), "1 to 1024"));
  CHECK(contains(error_of([] { launch(storage_kernel, 3, 32, 2, 0, 0); }),
                 "multiple of cluster_size"));
}

struct Small {
  int values[3];
};

// Past the struct, as a wrong index would, by bytes, which the compiler cannot see.
__global__ void past_the_end_kernel(int offset) {
  char* bytes = reinterpret_cast<char*>(&cuda::shared_storage<Small>());
  if (threadIdx.x == 1) bytes[offset] = 1;
  __syncthreads();
}

// In a child process: ASan ends it. True if an error came out.
template <class Run>
bool fails_in_child(Run&& run) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    _exit(error_of(run).empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status != 0;
}

TEST(access_outside_shared_memory_is_reported) {
  const auto run = [](int offset) {
    return fails_in_child([&] { launch(past_the_end_kernel, 1, 32, 1, sizeof(Small), 0, offset); });
  };
  CHECK(run(sizeof(Small)));
  CHECK(run(-1));
  CHECK(!run(sizeof(Small) - 1));
}

TEST(reading_a_block_that_left_is_reported) {
  CHECK(!fails_in_child([] {
    if (!cluster_sum<true>(0)) throw std::runtime_error("wrong");
  }));
  CHECK(fails_in_child([] {
    if (!cluster_sum<false>(0)) throw std::runtime_error("wrong");
  }));
}

TEST(speed) {
  for (const int threads : {256, 1024}) {
    for (const int seed : {0, 4}) {
      const auto start = std::chrono::steady_clock::now();
      constexpr int kRuns = 100;
      for (int i = 0; i < kRuns; ++i) CHECK(sum_argmax<true>(1, 8192, threads, seed));
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      std::printf("  %d threads over 8192 floats, seed %d: %.0f us\n", threads, seed,
                  seconds / kRuns * 1e6);
    }
  }
}

}  // namespace
}  // namespace lmdecode

CHECK_MAIN()
