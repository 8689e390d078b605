// CRC-32C (Castagnoli, RFC 3720): folded by AVX-512 carry-less products, or three streams of the
// crc32 instruction, where the machine has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lmdecode::store {

// Continues a checksum: crc32c(b, crc32c(a)) is that of a followed by b.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

// Copies, and returns crc32c(source, size, crc), in one pass where the machine can. streamed: past
// the caches where that is possible, for what is not read soon; see
// finish_streamed_copies().
uint32_t copy_crc32c(void* target, const void* source, size_t size, uint32_t crc, bool streamed);

using Crc32c = uint32_t (*)(const void* data, size_t size, uint32_t crc);

uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc);
// Those for which build and machine have the instructions, the fastest first.
std::vector<Crc32c> crc32c_accelerated();

}  // namespace lmdecode::store
