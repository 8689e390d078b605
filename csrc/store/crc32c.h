// CRC-32C (Castagnoli, RFC 3720), three streams of the crc32 instruction where the machine has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmdecode::store {

// Continues a checksum: crc32c(b, crc32c(a)) is that of a followed by b.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);

using Crc32c = uint32_t (*)(const void* data, size_t size, uint32_t crc);

uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc);
// Null where the build or the machine lacks the instructions.
Crc32c crc32c_accelerated();

}  // namespace lmdecode::store
