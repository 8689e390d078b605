// The emulated CUDA kernel of reorder_cache_ against copies of elements, by any map.
#include <iostream>

#include "check.h"
#include "kv_cache/reorder_cache_kernel.cuh"
#include "reorder_case.h"

namespace lmdecode::kv_cache::test {
namespace {

int64_t launches_run = 0;

ParentRows parent_rows(const Map& map, std::vector<int64_t>& wide, std::vector<int32_t>& narrow,
                       Random& random) {
  ParentRows parents;
  parents.rows = static_cast<int32_t>(map.size());
  parents.is_int32 = random.chance(50);
  parents.stride = 1 + random.below(2);
  const size_t size = (map.size() - 1) * static_cast<size_t>(parents.stride) + 1;
  wide.assign(size, -1);
  narrow.assign(size, -1);
  for (size_t row = 0; row < map.size(); ++row) {
    wide[row * static_cast<size_t>(parents.stride)] = map[row];
    narrow[row * static_cast<size_t>(parents.stride)] = static_cast<int32_t>(map[row]);
  }
  parents.data = parents.is_int32 ? static_cast<const void*>(narrow.data()) : wide.data();
  return parents;
}

// "" where every byte is as expected, or what went wrong.
std::string run(const Map& map, const std::vector<Cache>& caches, int threads, int multiprocessors,
                uint64_t schedule, Random& random) {
  std::vector<std::vector<unsigned char>> expected;
  std::vector<CacheRows> rows;
  for (const Cache& cache : caches) {
    expected.push_back(cache.expected(map));
    rows.push_back(cache.rows());
  }
  std::vector<int64_t> wide;
  std::vector<int32_t> narrow;
  ReorderCacheParams params;
  params.tensors = rows.data();
  params.count = static_cast<int64_t>(rows.size());
  params.parents = parent_rows(map, wide, narrow, random);
  try {
    for (int64_t at = 0; at < params.count;) {
      const ReorderLaunch launch = next_reorder_launch(params, &at, threads);
      if (launch.count == 0) continue;
      emulation::launch(reorder_cuda::reorder_cache_kernel,
                        dim3(static_cast<unsigned>(reorder_blocks(launch, multiprocessors))),
                        dim3(static_cast<unsigned>(threads)), 1,
                        reorder_shared_bytes(params.parents.rows), schedule, launch);
      ++launches_run;
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  for (size_t i = 0; i < caches.size(); ++i) {
    if (caches[i].bytes != 0 &&
        std::memcmp(caches[i].memory.get(), expected[i].data(), expected[i].size()) != 0) {
      return "wrong bytes";
    }
  }
  return "";
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

std::vector<Cache> random_caches(Random& random, int64_t rows, int64_t count) {
  std::vector<Cache> caches;
  while (count-- > 0) caches.push_back(random_cache(random, rows, false));
  return caches;
}

void check(const Map& map, const std::vector<Cache>& caches, int threads, int multiprocessors,
           uint64_t schedule, Random& random) {
  const std::string wrong = run(map, caches, threads, multiprocessors, schedule, random);
  if (!wrong.empty()) {
    std::cout << "map " << text(map) << " schedule " << schedule << " threads " << threads << ": "
              << wrong << std::endl;
  }
  CHECK(wrong.empty());
}

TEST(every_map_to_four_rows) {
  Random random(1);
  for (int64_t rows = 1; rows <= 4; ++rows) {
    every_map(rows, [&](const Map& map) {
      for (uint64_t schedule = 0; schedule < 6; ++schedule) {
        check(map, random_caches(random, rows, 1), 32, 1, schedule, random);
      }
    });
  }
}

TEST(random_maps_to_twelve_rows) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Random random(seed + 100);
    const int64_t rows = 1 + random.below(12);
    const std::vector<Cache> caches = random_caches(random, rows, 1 + random.below(3));
    check(random_map(random, rows), caches, random.any_of({32, 64}),
          static_cast<int>(1 + random.below(3)), seed % 6, random);
  }
}

TEST(more_rows_than_threads) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed + 2000);
    const int64_t rows = 33 + random.below(100);
    check(random_map(random, rows), random_caches(random, rows, 1), 32, 1, seed % 6, random);
  }
}

TEST(more_tensors_than_a_launch_takes) {
  Random random(3);
  const Map map{1, 2, 0, 2, 4};
  check(map, random_caches(random, 5, 2 * kTensorsPerLaunch + 3), 32, 2, 3, random);
}

TEST(parents_out_of_range_leave_their_row) {
  Random random(4);
  for (const Map& map : {Map{-1, 0, 1}, Map{3, 0, 1}, Map{2, 3, 0}, Map{1, 0, -7}, Map{9, 9, 9},
                         Map{(int64_t{1} << 31) - 1, 0, -(int64_t{1} << 31)}}) {
    for (uint64_t schedule = 0; schedule < 6; ++schedule) {
      check(map, random_caches(random, 3, 2), 32, 1, schedule, random);
    }
  }
}

TEST(units_are_as_wide_as_the_layout_allows) {
  CacheRows rows;
  rows.row_stride = 1 << 20;
  rows.segment_bytes = 256;
  rows.dims = 1;
  rows.size[0] = 10;
  rows.stride[0] = 8192;
  CHECK_EQ(make_reorder_columns(rows).unit_bytes, 16);
  CHECK_EQ(make_reorder_columns(rows).units, 160);
  rows.data += 4;
  CHECK_EQ(make_reorder_columns(rows).unit_bytes, 4);
  rows.stride[0] = 8194;
  CHECK_EQ(make_reorder_columns(rows).unit_bytes, 2);
  rows.segment_bytes = 255;
  CHECK_EQ(make_reorder_columns(rows).unit_bytes, 1);
}

TEST(rows_that_fit) {
  for (const int64_t bytes : {0, 7, 8, 48 * 1024, 99 * 1024, 227 * 1024}) {
    const int64_t rows = max_reorder_rows(bytes);
    if (rows > 0) CHECK(reorder_shared_bytes(rows) <= static_cast<size_t>(bytes));
  }
  CHECK(max_reorder_rows(48 * 1024) > 2000);
}

TEST(launches) { std::cout << launches_run << " launches" << std::endl; }

#else

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t schedule = 0; schedule < 6; ++schedule) {
    Random random(schedule);
    std::vector<Cache> caches;
    do {
      caches.clear();
      caches.push_back(random_cache(random, 5, false));
    } while (caches[0].rows().segment_bytes == 0 || caches[0].bytes < 200);
    noticed += !run({1, 2, 0, 2, 4}, caches, 64, 1, schedule, random).empty();
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
