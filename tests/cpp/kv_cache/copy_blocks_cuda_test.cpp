// The CUDA kernel of copy_blocks_, emulated, against vectors copied one by one, in every schedule.
#include <iostream>

#include "check.h"
#include "kv_cache/copy_blocks_kernel.cuh"
#include "reorder_case.h"

namespace lmdecode::kv_cache::test {
namespace {

constexpr int64_t kBlocks = 7;

// A pool of random layout in a buffer of exactly the size that its strides span.
struct Pool {
  BlockPool pool;
  std::vector<unsigned char> memory;

  explicit Pool(Random& random) {
    pool.num_blocks = kBlocks;
    pool.heads = random.below(5);
    pool.block_size = 1 + random.below(9);
    pool.vector_bytes = random.any_of<int64_t>({0, 1, 2, 6, 8, 16, 24, 32, 33});
    const int64_t gap = random.chance(40) ? random.any_of<int64_t>({1, 2, 8, 16}) : 0;
    if (random.chance(50)) {  // [N, H, P, D], else [N, P, H, D]
      pool.position_stride = pool.vector_bytes + gap;
      pool.head_stride = pool.position_stride * pool.block_size;
      pool.block_stride = pool.head_stride * pool.heads;
    } else {
      pool.head_stride = pool.vector_bytes + gap;
      pool.position_stride = pool.head_stride * pool.heads;
      pool.block_stride = pool.position_stride * pool.block_size;
    }
    const int64_t bytes = pool.heads == 0 ? 0 : pool.block_stride * kBlocks - gap;
    for (int64_t i = 0; i < bytes; ++i) {
      memory.push_back(static_cast<unsigned char>(random.below(256)));
    }
  }

  std::vector<unsigned char> expected(const std::vector<BlockCopy>& copies) const {
    std::vector<unsigned char> after = memory;
    for (const BlockCopy& copy : copies) {
      if (!pool.has_block(copy.source) || !pool.has_block(copy.target)) continue;
      if (copy.positions < 0 || copy.positions > pool.block_size) continue;
      for (int64_t head = 0; head < pool.heads; ++head) {
        for (int64_t p = 0; p < copy.positions; ++p) {
          const int64_t within = head * pool.head_stride + p * pool.position_stride;
          for (int64_t byte = 0; byte < pool.vector_bytes; ++byte) {
            after[static_cast<size_t>(copy.target * pool.block_stride + within + byte)] =
                memory[static_cast<size_t>(copy.source * pool.block_stride + within + byte)];
          }
        }
      }
    }
    return after;
  }
};

std::vector<BlockCopy> random_copies(Random& random, bool valid) {
  std::vector<BlockCopy> copies;
  for (int32_t target = 3; target < kBlocks; ++target) {
    if (random.chance(30)) continue;
    copies.push_back(
        {static_cast<int32_t>(random.below(3)), target, static_cast<int32_t>(random.below(10))});
    if (valid || random.chance(50)) continue;
    copies.back().source = random.any_of<int32_t>({-1, kBlocks, 1 << 30});
  }
  return copies;
}

void check(uint64_t seed, bool valid, int64_t count) {
  Random random(seed);
  std::vector<Pool> pools;
  for (int64_t i = 0; i < count; ++i) pools.emplace_back(random);
  const std::vector<BlockCopy> copies = random_copies(random, valid);
  std::vector<std::vector<unsigned char>> expected;
  std::vector<BlockPool> described;
  for (Pool& pool : pools) {
    expected.push_back(pool.expected(copies));
    pool.pool.data = pool.memory.data();
    described.push_back(pool.pool);
  }
  const CopyBlocksParams params{described.data(), count, copies.data(),
                                static_cast<int64_t>(copies.size())};
  for (int64_t at = 0; at < params.pool_count;) {
    const CopyBlocksLaunch launch = next_copy_blocks_launch(params, &at);
    if (launch.count == 0) continue;
    const int64_t blocks = copy_blocks_grid(launch, static_cast<int>(1 + random.below(2)));
    emulation::launch(copy_blocks_cuda_kernels::copy_blocks_kernel,
                      dim3(static_cast<unsigned>(blocks)), dim3(32), 1, size_t{0}, seed % 6,
                      launch);
  }
  for (size_t i = 0; i < pools.size(); ++i) CHECK(pools[i].memory == expected[i]);
}

TEST(random_pools_and_copies) {
  for (uint64_t seed = 0; seed < 400; ++seed) check(seed, true, 1 + static_cast<int64_t>(seed % 3));
}

TEST(copies_out_of_range_are_left_out) {
  for (uint64_t seed = 0; seed < 200; ++seed) check(seed + 1000, false, 2);
}

TEST(more_pools_than_a_launch_takes) { check(7, true, 2 * kPoolsPerLaunch + 5); }

TEST(units_are_as_wide_as_the_layout_allows) {
  alignas(16) static unsigned char memory[64];
  BlockPool pool;
  pool.data = memory;
  pool.num_blocks = pool.heads = pool.block_size = 1;
  pool.vector_bytes = pool.position_stride = pool.head_stride = pool.block_stride = 32;
  const BlockCopy copy{0, 0, 1};
  const auto unit = [&] {
    int64_t at = 0;
    return next_copy_blocks_launch({&pool, 1, &copy, 1}, &at).unit_bytes[0];
  };
  CHECK_EQ(unit(), 16);
  pool.data += 8;
  CHECK_EQ(unit(), 8);
  pool.position_stride = 36;
  CHECK_EQ(unit(), 4);
  pool.vector_bytes = 31;
  CHECK_EQ(unit(), 1);
}

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
