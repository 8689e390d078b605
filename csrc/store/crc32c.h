// CRC-32C (Castagnoli, RFC 3720): folded by AVX-512 carry-less products, or three streams of the
// crc32 instruction, where the machine has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmdecode::store {

// Continues a checksum: crc32c(b, crc32c(a)) is the checksum of a followed by b.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

// Copies, and returns crc32c(source, size, crc), in one pass where the machine can. streamed: past
// the caches where that is possible, for data that is not read soon; see finish_streamed_copies().
// Each byte of the source is read once: it may change meanwhile.
uint32_t copy_crc32c(void* target, const void* source, size_t size, uint32_t crc, bool streamed);

// The same into rows of row_bytes, target_stride apart; size counts whole rows. Requires
// can_copy_rows(row_bytes).
uint32_t copy_rows_crc32c(void* target, size_t row_bytes, ptrdiff_t target_stride,
                          const void* source, size_t size, uint32_t crc, bool streamed);
bool can_copy_rows(size_t row_bytes);

using Crc32c = uint32_t (*)(const void* data, size_t size, uint32_t crc);

uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc);
// The implementations that build and machine support, the fastest first.
std::vector<Crc32c> crc32c_accelerated();

}  // namespace lmdecode::store
