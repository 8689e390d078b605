// The emulated CUDA kernel of update_beam_indirection_ against look-ups, by any map.
#include <iostream>

#include "check.h"
#include "kv_cache/update_beam_indirection_kernel.cuh"
#include "reorder_case.h"

namespace lmdecode::kv_cache::test {
namespace {

// A table between gaps, and lengths of either kind, in buffers of exactly their size.
struct Case {
  int64_t rows, capacity, row_stride;
  Map parents;
  std::vector<int64_t> wide_lengths;
  std::vector<int32_t> narrow_lengths, table;
  int64_t all = 0;
  bool one_length, is_int32;

  Case(Random& random, const Map& map, bool valid) : parents(map) {
    rows = static_cast<int64_t>(map.size());
    capacity = random.below(100);
    row_stride = capacity + random.below(3);
    for (int64_t i = 0; i < (rows - 1) * row_stride + capacity; ++i) {
      table.push_back(static_cast<int32_t>(random.below(1 << 30)));
    }
    one_length = random.chance(40);
    is_int32 = random.chance(50);
    all = random.below(capacity + 1);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t length = valid ? random.below(capacity + 1) : random.below(capacity + 9) - 4;
      wide_lengths.push_back(length);
      narrow_lengths.push_back(static_cast<int32_t>(length));
    }
  }

  int64_t length(int64_t row) const {
    return one_length ? all : wide_lengths[static_cast<size_t>(row)];
  }

  std::vector<int32_t> expected() const {
    std::vector<int32_t> after = table;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t parent = parents[static_cast<size_t>(row)];
      if (parent < 0 || parent >= rows || length(row) < 0 || length(row) > capacity) continue;
      for (int64_t position = 0; position < length(row); ++position) {
        after[static_cast<size_t>(row * row_stride + position)] =
            table[static_cast<size_t>(parent * row_stride + position)];
      }
      if (length(row) < capacity) {
        after[static_cast<size_t>(row * row_stride + length(row))] = static_cast<int32_t>(row);
      }
    }
    return after;
  }

  BeamIndirectionParams params() {
    BeamIndirectionParams params;
    params.table = table.data();
    params.row_stride = row_stride;
    params.capacity = capacity;
    params.parents.data = parents.data();
    params.parents.rows = static_cast<int32_t>(rows);
    params.lengths.all = all;
    if (!one_length) {
      params.lengths.rows.data =
          is_int32 ? static_cast<const void*>(narrow_lengths.data()) : wide_lengths.data();
      params.lengths.rows.is_int32 = is_int32;
    }
    return params;
  }
};

// "" where every entry is as expected, or what went wrong. columns: of a block.
std::string run(Case& test, int threads, int columns, uint64_t schedule) {
  const std::vector<int32_t> expected = test.expected();
  const BeamIndirectionParams params = test.params();
  if (params.capacity == 0) return "";
  BeamIndirectionLaunch launch = beam_indirection_launch(params, 1, 227 << 10);
  launch.columns = columns;
  launch.blocks = 1 + static_cast<unsigned>(schedule % 3);
  launch.shared_bytes = static_cast<size_t>(beam_indirection_shared_bytes(test.rows, columns));
  try {
    emulation::launch(beam_indirection_cuda::update_beam_indirection_kernel, dim3(launch.blocks),
                      dim3(static_cast<unsigned>(threads)), 1, launch.shared_bytes, schedule,
                      params, launch);
  } catch (const std::exception& error) {
    return error.what();
  }
  return test.table == expected ? "" : "wrong entries";
}

#if !defined(LMD_PLANT_MISSING_BARRIER)

void check(Random& random, const Map& map, bool valid, int threads, uint64_t schedule) {
  Case test(random, map, valid);
  const std::string wrong = run(test, threads, random.any_of({1, 2, 8, 16, 32}), schedule);
  if (!wrong.empty()) {
    std::cout << "map " << text(map) << " schedule " << schedule << ": " << wrong << std::endl;
  }
  CHECK(wrong.empty());
}

TEST(every_map_to_four_rows) {
  Random random(1);
  for (int64_t rows = 1; rows <= 4; ++rows) {
    every_map(rows, [&](const Map& map) {
      for (uint64_t schedule = 0; schedule < 6; ++schedule) check(random, map, true, 32, schedule);
    });
  }
}

TEST(random_maps) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed + 100);
    const int64_t rows = 1 + random.below(random.chance(10) ? 130 : 12);
    check(random, random_map(random, rows), true, random.any_of({32, 64}), seed % 6);
  }
}

TEST(rows_out_of_range_stay_as_they_are) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed + 3000);
    Map map = random_map(random, 1 + random.below(6));
    for (int64_t& parent : map) {
      if (random.chance(30)) parent = random.any_of<int64_t>({-1, 6, int64_t{1} << 32});
    }
    check(random, map, false, 32, seed % 6);
  }
}

TEST(rows_that_fit) {
  for (const int64_t bytes : {0, 7, 12, 48 * 1024, 99 * 1024, 227 * 1024}) {
    const int64_t rows = max_beam_indirection_rows(bytes);
    CHECK(beam_indirection_shared_bytes(rows, 1) <= bytes);
    CHECK(beam_indirection_shared_bytes(rows + 1, 1) > bytes);
  }
  CHECK(max_beam_indirection_rows(48 * 1024) > 4000);
}

TEST(plans) {
  for (const int64_t rows : {1, 32, 256, 1000, 4000, 19000}) {
    for (const int64_t capacity : {1, 31, 33, 8192}) {
      BeamIndirectionParams params;
      params.parents.rows = static_cast<int32_t>(rows);
      params.capacity = capacity;
      params.lengths.all = capacity / 2;
      const BeamIndirectionLaunch launch = beam_indirection_launch(params, 132, 227 << 10);
      CHECK(launch.shared_bytes <= (227 << 10));
      CHECK(launch.columns > 1 || rows > 4000);
      CHECK(rows > 256 || launch.columns == 32);
      CHECK_EQ(launch.positions, capacity / 2 + 1 > capacity ? capacity : capacity / 2 + 1);
      CHECK(launch.blocks >= 1 && launch.blocks <= 3 * 132);
    }
  }
}

#else

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t schedule = 0; schedule < 6; ++schedule) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      Random random(seed);
      Case test(random, {1, 2, 0, 2, 4}, true);
      noticed += !run(test, 64, 1, schedule).empty();
    }
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
