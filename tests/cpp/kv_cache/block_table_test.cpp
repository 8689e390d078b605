// Random histories of block tables under sanitizers, with what must hold after each step.
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
  std::vector<int64_t> dropped;  // leading blocks that a row has let go of
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
    dropped.resize(static_cast<size_t>(max_rows));
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
    const std::vector<int32_t> before = lengths, refs = ref_counts, ids = blocks, all = counters;
    const int64_t missing = missing_blocks(table, given);
    CHECK(lengths == before && ref_counts == refs && blocks == ids && counters == all);
    append_to_block_table(table, given, copies.data());
    CHECK_EQ(missing, static_cast<int64_t>(counters[kMissingBlocks]));
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

  size_t any_row(Random& random) const { return static_cast<size_t>(random.below(rows)); }

  void drop(Random& random) {
    const size_t row = any_row(random);
    // The block that is written to next stays.
    const int64_t first = random.below(lengths[row] / table.block_size + 1);
    const std::vector<int32_t> before = lengths;
    drop_leading_blocks(table, static_cast<int64_t>(row), first);
    CHECK(lengths == before);
    dropped[row] = std::max(dropped[row], first);
  }

  void truncate(Random& random) {
    const size_t row = any_row(random);
    const int64_t length = random.below(lengths[row] + 1);
    // As their callers do, so that a block that has been let go of is not written to.
    if (length > 0 && length / table.block_size < dropped[row]) return;
    truncate_row(table, static_cast<int64_t>(row), length);
    CHECK_EQ(static_cast<int64_t>(lengths[row]), length);
    if (length == 0) dropped[row] = 0;
  }

  Map reorder(Random& random) {
    Map map(static_cast<size_t>(random.below(table.rows + 1)));
    for (int64_t& parent : map) parent = random.below(rows);
    if (map.empty()) map.push_back(0);
    ParentRows parents;
    parents.data = map.data();
    parents.rows = static_cast<int32_t>(map.size());
    const std::vector<int32_t> before = lengths, ids = blocks;
    const std::vector<int64_t> dropped_before = dropped;
    reorder_block_table(table, rows, parents);
    rows = parents.rows;
    std::fill(dropped.begin(), dropped.end(), 0);
    for (size_t row = 0; row < map.size(); ++row) {
      dropped[row] = dropped_before[static_cast<size_t>(map[row])];
    }
    for (size_t row = 0; row < map.size(); ++row) {
      const size_t parent = static_cast<size_t>(map[row]);
      CHECK_EQ(lengths[row], before[parent]);
      const int64_t at = static_cast<int64_t>(row) * table.max_blocks;
      CHECK(std::equal(blocks.begin() + at, blocks.begin() + at + table.max_blocks,
                       ids.begin() + map[row] * table.max_blocks));
    }
    return map;
  }

  void empty() {
    for (size_t row = 0; row < lengths.size(); ++row) {
      truncate_row(table, static_cast<int64_t>(row), 0);
      dropped[row] = 0;
    }
  }

  void check() const {
    std::vector<int32_t> uses(ref_counts.size());
    for (size_t row = 0; row < lengths.size(); ++row) {
      if (static_cast<int64_t>(row) >= rows) CHECK_EQ(lengths[row], 0);
      for (int64_t b = 0; b < table.max_blocks; ++b) {
        const int32_t block = table.row(static_cast<int64_t>(row))[b];
        const bool used = b >= dropped[row] && b < table.blocks_for(lengths[row]);
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

// What blocks hold, and what sequences are to hold: each position a number of its own.
class Contents {
 public:
  explicit Contents(const Table& t) : table_(t), texts_(t.lengths.size()) {
    cells_.resize(t.ref_counts.size() * static_cast<size_t>(t.table.block_size), -1);
  }

  void appended() {
    for (int32_t i = 0; i < table_.counters[kBlockCopies]; ++i) {
      const BlockCopy& copy = table_.copies[static_cast<size_t>(i)];
      for (int64_t p = 0; p < copy.positions; ++p) cell(copy.target, p) = cell(copy.source, p);
    }
    for (size_t row = 0; row < texts_.size(); ++row) {
      std::vector<int64_t>& text = texts_[row];
      while (static_cast<int64_t>(text.size()) < table_.lengths[row]) {
        const int64_t at = static_cast<int64_t>(text.size()), size = table_.table.block_size;
        text.push_back(next_++);
        cell(table_.table.row(static_cast<int64_t>(row))[at / size], at % size) = text.back();
      }
    }
  }
  void reordered(const Map& parents) {
    std::vector<std::vector<int64_t>> texts(texts_.size());
    for (size_t row = 0; row < parents.size(); ++row) {
      texts[row] = texts_[static_cast<size_t>(parents[row])];
    }
    texts_ = texts;
  }
  void truncated() {
    for (size_t row = 0; row < texts_.size(); ++row) {
      texts_[row].resize(static_cast<size_t>(table_.lengths[row]));
    }
  }
  void check() {
    const int64_t size = table_.table.block_size;
    for (size_t row = 0; row < texts_.size(); ++row) {
      const int64_t length = static_cast<int64_t>(texts_[row].size());
      for (int64_t at = table_.dropped[row] * size; at < length; ++at) {
        const int32_t block = table_.table.row(static_cast<int64_t>(row))[at / size];
        CHECK_EQ(cell(block, at % size), texts_[row][static_cast<size_t>(at)]);
      }
    }
  }

 private:
  int64_t& cell(int32_t block, int64_t position) {
    return cells_[static_cast<size_t>(block * table_.table.block_size + position)];
  }

  const Table& table_;
  std::vector<std::vector<int64_t>> texts_;
  std::vector<int64_t> cells_;
  int64_t next_ = 0;
};

TEST(sequences_keep_what_was_written) {
  int64_t reused = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    Table table(random);
    Contents contents(table);
    for (int step = 0; step < 100; ++step) {
      const int64_t choice = random.below(10);
      if (choice < 5) {
        table.append(random);
        if (table.counters[kMissingBlocks] == 0) contents.appended();
      } else if (choice < 7) {
        contents.reordered(table.reorder(random));
      } else if (choice < 9) {
        reused -= table.counters[kFreeBlocks];
        table.drop(random);
        reused += table.counters[kFreeBlocks];
      } else {
        table.truncate(random);
        contents.truncated();
      }
      table.check();
      contents.check();
    }
    table.empty();
    table.check();
    CHECK_EQ(table.counters[kFreeBlocks], table.table.num_blocks);
  }
  CHECK(reused > 400);
}

TEST(random_histories) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    Table table(random);
    for (int step = 0; step < 100; ++step) {
      random.chance(60) ? table.append(random) : void(table.reorder(random));
      table.check();
    }
  }
}

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
