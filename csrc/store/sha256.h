// SHA-256 (FIPS 180-4), with the SHA extensions of x86 where the machine has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lmdecode::store {

using Digest = std::array<uint8_t, 32>;

// Compresses `blocks` 64-byte blocks into the state of 8 words.
using Sha256Compress = void (*)(uint32_t* state, const uint8_t* data, size_t blocks);

void sha256_compress_portable(uint32_t* state, const uint8_t* data, size_t blocks);
// Null where the build or the machine lacks the instructions.
Sha256Compress sha256_compress_accelerated();

class Sha256 {
 public:
  // The compression function is chosen once; tests name one.
  Sha256();
  explicit Sha256(Sha256Compress compress);

  Sha256& update(const void* data, size_t size);
  // The digest of all updates; the object is spent.
  Digest finish();

 private:
  Sha256Compress compress_;
  uint32_t state_[8];
  uint8_t buffer_[64];
  size_t buffered_ = 0;
  uint64_t total_ = 0;
};

}  // namespace lmdecode::store
