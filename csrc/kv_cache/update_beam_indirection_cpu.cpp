// Blocks of positions to threads: each block goes through all row copies by itself.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "kv_cache/host_row_copies.h"
#include "kv_cache/kv_cache_tuning.h"
#include "kv_cache/update_beam_indirection.h"

namespace lmdecode::kv_cache {
namespace {

struct Job {
  const BeamIndirectionParams& params;
  std::vector<RowCopy> copies;
  std::vector<int64_t> lengths;  // [rows]

  // Positions [begin, end) of every row, fewer than kIndirectionBlock.
  void update_block(int64_t begin, int64_t end) const {
    int32_t temporary[tuning::kIndirectionBlock];
    for (const RowCopy copy : copies) {
      const int32_t* const from = copy.from == kTemporaryRow
                                      ? temporary
                                      : params.table + copy.from * params.row_stride + begin;
      if (copy.to == kTemporaryRow) {
        std::memcpy(temporary, from, static_cast<size_t>(end - begin) * sizeof(int32_t));
        continue;
      }
      const int64_t count = std::min(end, lengths[static_cast<size_t>(copy.to)]) - begin;
      if (count <= 0) continue;
      std::memcpy(params.table + copy.to * params.row_stride + begin, from,
                  static_cast<size_t>(count) * sizeof(int32_t));
    }
    for (size_t row = 0; row < lengths.size(); ++row) {
      if (lengths[row] < begin || lengths[row] >= end) continue;
      params.table[static_cast<int64_t>(row) * params.row_stride + lengths[row]] =
          static_cast<int32_t>(row);
    }
  }
};

}  // namespace

void update_beam_indirection_cpu(const BeamIndirectionParams& params) {
  Job job{params, host_row_copies(params.parents), {}};
  int64_t longest = 0;
  for (int32_t row = 0; row < params.parents.rows; ++row) {
    job.lengths.push_back(params.lengths.at(row));
    longest = std::max(longest, job.lengths.back());
  }
  const int64_t positions = std::min(longest + 1, params.capacity);
  using tuning::kIndirectionBlock;
  const int64_t blocks = (positions + kIndirectionBlock - 1) / kIndirectionBlock;
  const int64_t bytes = static_cast<int64_t>(job.copies.size()) * kIndirectionBlock * 4;
  const int64_t grain = 1 + tuning::kMinTaskBytes / (1 + bytes);
  parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      job.update_block(block * kIndirectionBlock,
                       std::min((block + 1) * kIndirectionBlock, positions));
    }
  });
}

}  // namespace lmdecode::kv_cache
