// The bookkeeping of block tables: random histories under sanitizers, with what must hold after
// each step.
#include "kv_cache/block_table.h"

#include <algorithm>
#include <vector>

#include "check.h"
#include "reorder_case.h"

namespace lmdecode::kv_cache::test {
namespace {

struct Table {
  std::vector<int32_t> blocks, lengths, ref_counts, free_blocks, counters;
  std::vector<BlockCopy> copies;
  BlockTable table;
  int64_t rows = 1;  // in use

  explicit Table(Random& random) {
    const int64_t max_rows = 1 + random.below(6);
    table.max_blocks = 1 + random.below(5);
    table.num_blocks = static_cast<int32_t>(random.below(20));
    table.block_size = static_cast<int32_t>(1 + random.below(5));
    blocks.assign(static_cast<size_t>(max_rows * table.max_blocks), kNoBlock);
    lengths.assign(static_cast<size_t>(max_rows), 0);
    ref_counts.assign(static_cast<size_t>(table.num_blocks), 0);
    for (int32_t b = 0; b < table.num_blocks; ++b) free_blocks.push_back(b);
    counters = {table.num_blocks, 0, 0};
    copies.resize(static_cast<size_t>(max_rows));
    table.row_stride = table.max_blocks;
    table.blocks = blocks.data();
    table.lengths = lengths.data();
    table.ref_counts = ref_counts.data();
    table.free_blocks = free_blocks.data();
    table.counters = counters.data();
    table.rows = max_rows;
  }

  void append(Random& random) {
    std::vector<int64_t> tokens(lengths.size());
    for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
      tokens[row] = random.below(
          std::min<int64_t>(7, table.max_blocks * table.block_size - lengths[row] + 1));
    }
    IntegerRows given;
    given.data = tokens.data();
    const std::vector<int32_t> before = lengths, refs = ref_counts, ids = blocks;
    append_to_block_table(table, given, copies.data());
    if (counters[kMissingBlocks] > 0) {
      CHECK(lengths == before);
      CHECK(ref_counts == refs);
      CHECK(blocks == ids);
      return;
    }
    for (size_t row = 0; row < lengths.size(); ++row) {
      CHECK_EQ(lengths[row], before[row] + tokens[row]);
      if (tokens[row] == 0) continue;
      for (int64_t p = before[row]; p < lengths[row]; ++p) {  // written to, so of this row alone
        const int32_t block = table.row(static_cast<int64_t>(row))[p / table.block_size];
        CHECK_EQ(ref_counts[static_cast<size_t>(block)], 1);
      }
    }
    for (int32_t i = 0; i < counters[kBlockCopies]; ++i) {
      for (int32_t j = 0; j < counters[kBlockCopies]; ++j) {
        CHECK(copies[static_cast<size_t>(i)].source != copies[static_cast<size_t>(j)].target);
      }
    }
  }

  void reorder(Random& random) {
    Map map(static_cast<size_t>(random.below(table.rows + 1)));
    for (int64_t& parent : map) parent = random.below(rows);
    if (map.empty()) map.push_back(0);
    ParentRows parents;
    parents.data = map.data();
    parents.rows = static_cast<int32_t>(map.size());
    const std::vector<int32_t> before = lengths, ids = blocks;
    reorder_block_table(table, rows, parents);
    rows = parents.rows;
    for (size_t row = 0; row < map.size(); ++row) {
      const size_t parent = static_cast<size_t>(map[row]);
      CHECK_EQ(lengths[row], before[parent]);
      const int64_t at = static_cast<int64_t>(row) * table.max_blocks;
      CHECK(std::equal(blocks.begin() + at, blocks.begin() + at + table.max_blocks,
                       ids.begin() + map[row] * table.max_blocks));
    }
  }

  void check() const {
    std::vector<int32_t> uses(ref_counts.size());
    for (size_t row = 0; row < lengths.size(); ++row) {
      if (static_cast<int64_t>(row) >= rows) CHECK_EQ(lengths[row], 0);
      for (int64_t b = 0; b < table.max_blocks; ++b) {
        const int32_t block = table.row(static_cast<int64_t>(row))[b];
        const bool used = b < table.blocks_for(lengths[row]);
        CHECK_EQ(used, block != kNoBlock);
        if (used) ++uses[static_cast<size_t>(block)];
      }
    }
    CHECK(uses == ref_counts);
    std::vector<int32_t> free(free_blocks.begin(), free_blocks.begin() + counters[kFreeBlocks]);
    std::sort(free.begin(), free.end());
    CHECK(std::adjacent_find(free.begin(), free.end()) == free.end());
    for (const int32_t block : free) CHECK_EQ(uses[static_cast<size_t>(block)], 0);
    CHECK_EQ(static_cast<int64_t>(free.size()), std::count(uses.begin(), uses.end(), 0));
  }
};

TEST(random_histories) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    Table table(random);
    for (int step = 0; step < 100; ++step) {
      random.chance(60) ? table.append(random) : table.reorder(random);
      table.check();
    }
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
