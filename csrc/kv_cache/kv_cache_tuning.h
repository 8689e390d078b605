// Tuning numbers of the KV cache ops on the CPU: they change speed, never a result.
#pragma once

#include <cstdint>

namespace lmdecode::kv_cache::tuning {

// Bytes of a row that a thread carries through all copies before it goes on to the next ones. The
// temporary of this size lies on the thread's stack; a source that several rows read stays in
// cache.
constexpr int64_t kPartBytes = 64 * 1024;
// Short segments are copied in runs that span at most this many bytes of the tensor. Shorter runs
// would hide the stride from the hardware prefetcher.
constexpr int64_t kRunSpanBytes = 256 * 1024;
// A call that moves at least this many bytes uses streaming stores: others would evict the caches,
// and read each line before they write it.
constexpr int64_t kStreamFromBytes = 8 << 20;
// Shorter segments are copied through the caches always.
constexpr int64_t kStreamSegmentBytes = 128;
// Positions of a beam indirection that a thread carries through all copies at a time.
constexpr int64_t kIndirectionBlock = 1024;
// Bytes moved that are worth a thread.
constexpr int64_t kMinTaskBytes = 256 * 1024;

}  // namespace lmdecode::kv_cache::tuning
