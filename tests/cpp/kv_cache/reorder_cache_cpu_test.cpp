// The CPU kernels of reorder_cache_ at every level, the order of copies, arithmetic of layouts.
#include <algorithm>
#include <iostream>
#include <string>

#include "check.h"
#include "kv_cache/reorder_parts.h"
#include "reorder_case.h"
#include "simd/cpu_capability.h"

namespace lmdecode::kv_cache::test {
namespace {

std::vector<RowCopy> order(const Map& map) {
  std::vector<int32_t> parents(map.begin(), map.end()), readers(map.size());
  for (size_t row = 0; row < map.size(); ++row) {
    if (map[row] != static_cast<int64_t>(row)) ++readers[static_cast<size_t>(map[row])];
  }
  const int32_t rows = static_cast<int32_t>(map.size());
  std::vector<RowCopy> copies(static_cast<size_t>(max_row_copies(rows)));
  copies.resize(
      static_cast<size_t>(order_row_copies(parents.data(), rows, readers.data(), copies.data())));
  return copies;
}

// Right, and no copy too many: one a moved row and one a cycle.
bool is_good_order(const Map& map) {
  const std::vector<RowCopy> copies = order(map);
  Map content(map.size());
  int64_t moved = 0, saved = 0, temporary = -1;
  for (size_t row = 0; row < map.size(); ++row) {
    content[row] = static_cast<int64_t>(row);
    moved += map[row] != static_cast<int64_t>(row);
  }
  for (const RowCopy copy : copies) {
    const int64_t value =
        copy.from == kTemporaryRow ? temporary : content[static_cast<size_t>(copy.from)];
    if (copy.to == kTemporaryRow) {
      ++saved;
      temporary = value;
    } else {
      content[static_cast<size_t>(copy.to)] = value;
    }
  }
  return content == map && static_cast<int64_t>(copies.size()) == moved + saved;
}

// Of two rows and more.
int64_t cycles(const Map& map) {
  int64_t count = 0;
  for (size_t row = 0; row < map.size(); ++row) {
    size_t at = row, length = 0, lowest = row;
    do {
      at = static_cast<size_t>(map[at]);
      lowest = std::min(lowest, at);
    } while (at != row && ++length < map.size());
    count += at == row && lowest == row && length > 0;
  }
  return count;
}

TEST(order_of_every_map_to_six_rows) {
  for (int64_t rows = 0; rows <= 6; ++rows) {
    if (rows == 0) {
      CHECK(order({}).empty());
      continue;
    }
    every_map(rows, [](const Map& map) { CHECK(is_good_order(map)); });
  }
}

TEST(order_of_larger_maps) {
  Random random(1);
  for (int i = 0; i < 3000; ++i) CHECK(is_good_order(random_map(random, 7 + random.below(200))));
}

TEST(the_temporary_is_for_true_cycles_alone) {
  const auto saved = [](const Map& map) {
    int64_t count = 0;
    for (const RowCopy copy : order(map)) count += copy.to == kTemporaryRow;
    return count;
  };
  CHECK_EQ(saved({1, 0}), 1);
  CHECK_EQ(saved({1, 2, 0, 4, 3}), 2);
  CHECK_EQ(saved({1, 0, 0}), 1);
  CHECK_EQ(saved({0, 0, 1, 2}), 0);
  every_map(5, [&](const Map& map) { CHECK_EQ(saved(map), cycles(map)); });
}

TEST(cold_targets_are_those_that_were_not_read) {
  const std::vector<RowCopy> copies = order({1, 2, 2, 4, 3, 0});
  const std::vector<uint8_t> cold =
      find_cold_copies(copies.data(), static_cast<int32_t>(copies.size()), 6);
  for (size_t i = 0; i < copies.size(); ++i) CHECK_EQ(cold[i] != 0, copies[i].to == 5);
}

// ---- kernels

using Parts = void (*)(const ReorderJob&, int64_t, int64_t);

void reorder(Parts parts, const std::vector<Cache>& caches, const Map& map, bool stream,
             Random& random) {
  const std::vector<RowCopy> copies = order(map);
  std::vector<ReorderParts> tensors;
  int64_t total = 0;
  for (const Cache& cache : caches) {
    const CacheRows rows = cache.rows();
    if (rows.segment_bytes == 0) continue;
    tensors.push_back(cut_into_parts(rows, total));
    total += part_count(tensors.back());
  }
  if (total == 0) return;
  ReorderJob job;
  job.tensors = tensors.data();
  job.count = static_cast<int64_t>(tensors.size());
  job.copies = copies.data();
  job.copy_count = static_cast<int32_t>(copies.size());
  const std::vector<uint8_t> cold =
      find_cold_copies(copies.data(), job.copy_count, static_cast<int32_t>(map.size()));
  if (stream) job.cold = cold.data();
  const int64_t cut = random.below(total + 1);  // as if two threads had it
  if (cut < total) parts(job, cut, total);
  if (cut > 0) parts(job, 0, cut);
}

void run_cases(Parts parts, int count, bool large) {
  for (int seed = 0; seed < count; ++seed) {
    Random random(static_cast<uint64_t>(seed) * 7919 + large);
    const int64_t rows = 1 + random.below(9);
    const Map map = random_map(random, rows);
    std::vector<Cache> caches;
    std::vector<std::vector<unsigned char>> expected;
    for (int64_t i = 1 + random.below(3); i > 0; --i) {
      caches.push_back(random_cache(random, rows, large));
      expected.push_back(caches.back().expected(map));
    }
    reorder(parts, caches, map, random.chance(50), random);
    for (size_t i = 0; i < caches.size(); ++i) {
      const bool same =
          caches[i].bytes == 0 ||
          std::memcmp(caches[i].memory.get(), expected[i].data(), expected[i].size()) == 0;
      if (!same) std::cout << "seed " << seed << " map " << text(map) << std::endl;
      CHECK(same);
    }
  }
}

TEST(kernel_default) {
  run_cases(&default_::kv_cache::reorder_cache_parts, 3000, false);
  run_cases(&default_::kv_cache::reorder_cache_parts, 100, true);
}

#if defined(LMD_HAS_AVX2)
TEST(kernel_avx2) {
  if (max_cpu_capability() < CpuCapability::kAvx2) return;
  run_cases(&avx2::kv_cache::reorder_cache_parts, 3000, false);
  run_cases(&avx2::kv_cache::reorder_cache_parts, 100, true);
}
#endif
#if defined(LMD_HAS_AVX512)
TEST(kernel_avx512) {
  if (max_cpu_capability() < CpuCapability::kAvx512) return;
  run_cases(&avx512::kv_cache::reorder_cache_parts, 3000, false);
  run_cases(&avx512::kv_cache::reorder_cache_parts, 100, true);
}
#endif

// ---- layouts

StridedTensor dense(std::vector<int64_t> sizes, int64_t element_bytes, unsigned char* data) {
  StridedTensor tensor{data, element_bytes, {}};
  int64_t stride = element_bytes;
  for (size_t d = sizes.size(); d-- > 0;) {
    tensor.dims.insert(tensor.dims.begin(), {sizes[d], stride});
    stride *= sizes[d];
  }
  return tensor;
}

TEST(segments_are_as_long_as_the_layout_allows) {
  CacheRows rows;
  CHECK(make_cache_rows(dense({32, 8, 1024, 128}, 2, nullptr), 0, -1, 0, &rows));
  CHECK_EQ(rows.dims, 0);
  CHECK_EQ(rows.segment_bytes, 8 * 1024 * 256);
  CHECK(make_cache_rows(dense({32, 8, 1024, 128}, 2, nullptr), 0, 2, 300, &rows));
  CHECK_EQ(rows.dims, 1);
  CHECK_EQ(rows.segment_bytes, 300 * 256);
  CHECK_EQ(rows.size[0], 8);
  CHECK_EQ(rows.stride[0], 1024 * 256);
  CHECK(make_cache_rows(dense({1024, 32, 128}, 2, nullptr), 1, 0, 1000, &rows));
  CHECK_EQ(rows.segment_bytes, 256);
  CHECK_EQ(rows.size[0], 1000);
  CHECK_EQ(rows.row_stride, 256);
  CHECK(make_cache_rows(dense({4, 8, 6, 2}, 4, nullptr), 3, -1, 0, &rows));  // the last dimension
  CHECK_EQ(rows.segment_bytes, 4);
  CHECK_EQ(rows.dims, 1);
  CHECK_EQ(rows.size[0], 4 * 8 * 6);
  CHECK(make_cache_rows(dense({4, 8, 6, 2}, 4, nullptr), 0, 2, 0, &rows));  // no position
  CHECK_EQ(rows.segment_bytes, 0);
  StridedTensor sparse{nullptr, 1, {}};
  for (int64_t d = 0, stride = 1; d < 8; ++d) sparse.dims.push_back({2, stride *= 3});
  CHECK(!make_cache_rows(sparse, 0, -1, 0, &rows));
  sparse.dims.pop_back();
  CHECK(make_cache_rows(sparse, 0, -1, 0, &rows));
  CHECK_EQ(rows.dims, 6);
}

TEST(overlap_of_elements) {
  CHECK(elements_are_apart(dense({3, 4, 5}, 2, nullptr)));
  CHECK(elements_are_apart({nullptr, 2, {{5, 6}, {3, 2}}}));
  CHECK(elements_are_apart({nullptr, 2, {{1, 0}, {3, 2}}}));
  CHECK(elements_are_apart({nullptr, 2, {{0, 0}, {3, 0}}}));
  CHECK(!elements_are_apart({nullptr, 2, {{2, 0}, {3, 2}}}));  // expanded
  CHECK(!elements_are_apart({nullptr, 2, {{5, 4}, {3, 2}}}));  // sliding windows
}

TEST(shared_bytes_as_counted) {
  Random random(5);
  int64_t pairs = 0, shared = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<unsigned char> memory(4000);
    std::vector<int> owner(memory.size());
    bool meet = false;
    StridedTensor both[2];
    for (StridedTensor& tensor : both) {
      const Cache cache = random_cache(random, 2, false);
      if (cache.bytes > 1500) continue;
      tensor = cache.tensor;
      if (&tensor == &both[1] && random.chance(60)) {  // views of one buffer
        tensor = both[0];
        for (StridedDim& dim : tensor.dims)
          dim.size = dim.size > 1 ? dim.size - random.below(2) : dim.size;
      }
      tensor.data = memory.data() + random.below(300);
      if (tensor.is_empty()) continue;
      Cache at;
      at.tensor = tensor;
      at.batch_dim = -1;
      at.each_element([&](int64_t offset) {
        for (int64_t byte = 0; byte < tensor.element_bytes; ++byte) {
          int& who = owner[static_cast<size_t>(tensor.data - memory.data() + offset + byte)];
          meet |= who == 1 && &tensor == &both[1];
          who = 1;
        }
      });
    }
    shared += meet;
    if (both[0].data == nullptr || both[1].data == nullptr) continue;
    ++pairs;
    CHECK_EQ(tensors_share_bytes(both[0], both[1]), meet);
    CHECK_EQ(tensors_share_bytes(both[1], both[0]), meet);
  }
  std::cout << shared << " of " << pairs << " pairs share bytes" << std::endl;
}

TEST(keys_beside_values_share_nothing) {
  std::vector<unsigned char> memory(2 * 3 * 2 * 5 * 4);
  StridedTensor keys = dense({3, 2, 5, 4}, 1, memory.data());  // of [3, keys or values, 5, 4]
  keys.dims.erase(keys.dims.begin() + 1);
  StridedTensor values = keys;
  values.data += 20;
  CHECK(!tensors_share_bytes(keys, values));
  values.data -= 1;
  CHECK(tensors_share_bytes(keys, values));
}

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
