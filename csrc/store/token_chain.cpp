#include "store/token_chain.h"

#include <algorithm>
#include <bit>

#include "store/bytes.h"

namespace lmdecode::store {

static_assert(std::endian::native == std::endian::little, "token ids are hashed as they lie");

Digest root_key(const std::string& fingerprint, uint32_t chunk_tokens, const Scope& scope) {
  ByteWriter fields;
  fields.counted(std::string("lmdecode.store.root.1")).counted(fingerprint).u32(chunk_tokens);
  fields.counted(scope.salt).counted(scope.context);
  return Sha256().update(fields.bytes().data(), fields.bytes().size()).finish();
}

Digest chain_key(const Digest& parent, uint64_t num_tokens, std::span<const int32_t> tokens) {
  const uint64_t counts[2] = {num_tokens, tokens.size()};
  Sha256 hash;
  hash.update("lmdecode.chain.1", 16).update(parent.data(), parent.size());
  hash.update(counts, sizeof(counts)).update(tokens.data(), tokens.size_bytes());
  return hash.finish();
}

std::span<const int32_t> PrefixKeys::chunk(size_t index) const {
  const size_t begin = index * chunk_tokens_;
  return tokens_.subspan(begin, std::min<size_t>(chunk_tokens_, tokens_.size() - begin));
}

const Digest& PrefixKeys::operator[](size_t index) {
  while (keys_.size() <= index) {
    const size_t next = keys_.size();
    const auto tokens = chunk(next);
    keys_.push_back(
        chain_key(next == 0 ? root_ : keys_.back(), next * chunk_tokens_ + tokens.size(), tokens));
  }
  return keys_[index];
}

Digest prefix_key(const Digest& root, std::span<const int32_t> tokens, uint32_t chunk_tokens) {
  return PrefixKeys(root, tokens, chunk_tokens).whole();
}

uint64_t tenant_id(const std::string& salt) {
  ByteWriter fields;
  fields.counted(std::string("lmdecode.store.tenant.1")).counted(salt);
  const Digest digest = Sha256().update(fields.bytes().data(), fields.bytes().size()).finish();
  return ByteReader(digest, "digest").u64();
}

}  // namespace lmdecode::store
