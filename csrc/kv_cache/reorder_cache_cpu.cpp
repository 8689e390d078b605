// The order of the copies, and parts of rows to threads.
#include <vector>

#include "common/parallel.h"
#include "kv_cache/host_row_copies.h"
#include "kv_cache/kv_cache_tuning.h"
#include "kv_cache/reorder_cache.h"
#include "kv_cache/reorder_parts.h"

namespace lmdecode::kv_cache {

void reorder_cache_cpu(const ReorderCacheParams& params) {
  const auto parts = LMD_SELECT_KERNEL(kv_cache, reorder_cache_parts);
  using namespace tuning;
  const int32_t rows = params.parents.rows;
  const std::vector<RowCopy> copies = host_row_copies(params.parents);
  ReorderJob job;
  job.copies = copies.data();
  job.copy_count = static_cast<int32_t>(copies.size());
  if (job.copy_count == 0) return;

  std::vector<ReorderParts> tensors;
  tensors.reserve(static_cast<size_t>(params.count));
  int64_t total_parts = 0, bytes = 0;
  for (int64_t i = 0; i < params.count; ++i) {
    const CacheRows& tensor = params.tensors[i];
    if (tensor.segment_bytes == 0) continue;
    tensors.push_back(cut_into_parts(tensor, total_parts));
    total_parts += part_count(tensors.back());
    bytes += tensor.segments() * tensor.segment_bytes * job.copy_count;
  }
  if (total_parts == 0) return;
  job.tensors = tensors.data();
  job.count = static_cast<int64_t>(tensors.size());
  std::vector<uint8_t> cold;
  if (bytes >= kStreamFromBytes) {
    cold = find_cold_copies(copies.data(), job.copy_count, rows);
    job.cold = cold.data();
  }
  const int64_t grain = 1 + kMinTaskBytes / (1 + bytes / total_parts);
  parallel_for(total_parts, grain, [&](int64_t begin, int64_t end) { parts(job, begin, end); });
}

}  // namespace lmdecode::kv_cache
