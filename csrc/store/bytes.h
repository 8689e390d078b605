// Little-endian fields in byte strings, for hashes, slot headers and exchanged files.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "store/sha256.h"
#include "store/store_error.h"

namespace lmdecode::store {

class ByteWriter {
 public:
  ByteWriter& u32(uint32_t value) { return fixed(value); }
  ByteWriter& u64(uint64_t value) { return fixed(value); }
  ByteWriter& raw(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
    return *this;
  }
  ByteWriter& digest(const Digest& digest) { return raw(digest.data(), digest.size()); }
  // Length first: no field can end in the next one.
  ByteWriter& counted(std::span<const uint8_t> bytes) {
    return u64(bytes.size()).raw(bytes.data(), bytes.size());
  }
  ByteWriter& counted(const std::string& text) {
    return u64(text.size()).raw(text.data(), text.size());
  }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  template <class T>
  ByteWriter& fixed(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) bytes_.push_back(static_cast<uint8_t>(value >> 8 * i));
    return *this;
  }
  std::vector<uint8_t> bytes_;
};

// Throws StoreError kDamaged instead of reading past the end.
class ByteReader {
 public:
  ByteReader(std::span<const uint8_t> bytes, const char* what) : bytes_(bytes), what_(what) {}

  uint32_t u32() { return fixed<uint32_t>(); }
  uint64_t u64() { return fixed<uint64_t>(); }
  std::span<const uint8_t> raw(uint64_t size) {
    if (size > bytes_.size()) {
      throw StoreError(ErrorKind::kDamaged, std::string(what_) + " ends too early");
    }
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  Digest digest() {
    Digest value;
    std::memcpy(value.data(), raw(value.size()).data(), value.size());
    return value;
  }
  std::span<const uint8_t> counted() { return raw(u64()); }
  bool empty() const { return bytes_.empty(); }

 private:
  template <class T>
  T fixed() {
    const auto bytes = raw(sizeof(T));
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(bytes[i]) << 8 * i;
    return value;
  }
  std::span<const uint8_t> bytes_;
  const char* what_;
};

}  // namespace lmdecode::store
