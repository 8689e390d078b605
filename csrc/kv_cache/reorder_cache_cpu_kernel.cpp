// Compiled once for each CPU capability, with LMD_SIMD naming it.
#include <cstring>

#include "kv_cache/kv_cache_tuning.h"
#include "kv_cache/reorder_job.h"
#include "simd/stream_copy.h"

namespace lmdecode::LMD_SIMD::kv_cache {

using namespace lmdecode::kv_cache;

namespace {

// Bytes at regular distances.
struct Run {
  unsigned char* data;
  int64_t stride;
};

template <int kBytes>
void copy_run_of(Run to, Run from, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    memcpy(to.data + i * to.stride, from.data + i * from.stride, kBytes);
}

void copy_run(Run to, Run from, int64_t count, int64_t bytes, bool stream) {
  switch (bytes) {
    case 1:
      return copy_run_of<1>(to, from, count);
    case 2:
      return copy_run_of<2>(to, from, count);
    case 4:
      return copy_run_of<4>(to, from, count);
    case 8:
      return copy_run_of<8>(to, from, count);
    case 16:
      return copy_run_of<16>(to, from, count);
    default:
      break;
  }
  for (int64_t i = 0; i < count; ++i) {
    unsigned char* const target = to.data + i * to.stride;
    const unsigned char* const source = from.data + i * from.stride;
    if (stream) {
      stream_copy(target, source, bytes);
    } else {
      memcpy(target, source, static_cast<size_t>(bytes));
    }
  }
}

// All copies of one part: `count` segments of `bytes`, the first at `offset` in every row.
void reorder_part(const ReorderJob& job, const CacheRows& rows, int64_t offset, int64_t count,
                  int64_t bytes, unsigned char* temporary) {
  const int64_t stride = rows.dims > 0 ? rows.stride[rows.dims - 1] : 0;
  unsigned char* const data = rows.data + offset;
  const bool is_long = job.cold != nullptr && bytes >= tuning::kStreamSegmentBytes;
  const Run packed{temporary, bytes};
  for (int32_t i = 0; i < job.copy_count; ++i) {
    const RowCopy copy = job.copies[i];
    if (copy.to == kTemporaryRow) {
      copy_run(packed, {data + copy.from * rows.row_stride, stride}, count, bytes, false);
    } else {
      const Run to{data + copy.to * rows.row_stride, stride};
      const Run from =
          copy.from == kTemporaryRow ? packed : Run{data + copy.from * rows.row_stride, stride};
      copy_run(to, from, count, bytes, is_long && job.cold[i] != 0);
    }
  }
}

}  // namespace

void reorder_cache_parts(const ReorderJob& job, int64_t begin, int64_t end) {
  alignas(kCacheLine) unsigned char temporary[tuning::kPartBytes];
  int64_t tensor = job.count - 1;
  while (job.tensors[tensor].first_part > begin) --tensor;
  for (int64_t part = begin; part < end; ++part) {
    while (tensor + 1 < job.count && job.tensors[tensor + 1].first_part <= part) ++tensor;
    const ReorderParts& t = job.tensors[tensor];
    int64_t index = part - t.first_part;
    const int64_t piece = index % t.pieces * t.piece_bytes;
    index /= t.pieces;
    int64_t offset = piece;
    int64_t count = 1;
    if (t.rows.dims > 0) {
      const int last = t.rows.dims - 1;
      const int64_t first = index % t.runs * t.run;
      index /= t.runs;
      count = t.rows.size[last] - first < t.run ? t.rows.size[last] - first : t.run;
      offset += first * t.rows.stride[last];
      for (int d = last - 1; d >= 0; --d) {
        offset += index % t.rows.size[d] * t.rows.stride[d];
        index /= t.rows.size[d];
      }
    }
    const int64_t left = t.rows.segment_bytes - piece;
    reorder_part(job, t.rows, offset, count, left < t.piece_bytes ? left : t.piece_bytes,
                 temporary);
  }
  stream_fence();
}

}  // namespace lmdecode::LMD_SIMD::kv_cache
