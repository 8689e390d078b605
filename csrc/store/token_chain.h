// Keys: a SHA-256 chain over the tokens of a prefix, chunk by chunk, from a root that covers the
// configuration, the tenant and whatever else the keys and values depend on.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/sha256.h"

namespace lmdecode::store {

// Two prefixes must share these before their tokens are compared. Byte strings, any content.
struct Scope {
  std::string salt;     // the tenant: tenants never share entries
  std::string context;  // other inputs that the KV depends on: encoder input, images, adapters
};

// SHA-256 of tagged, length-prefixed fields.
Digest root_key(const std::string& fingerprint, uint32_t chunk_tokens, const Scope& scope);

// Key of the prefix of `num_tokens` tokens whose last ones are `tokens`; `parent` is the key of the
// prefix before them.
Digest chain_key(const Digest& parent, uint64_t num_tokens, std::span<const int32_t> tokens);

// The keys of some tokens' prefixes: of all that end with a full chunk, and of the whole. Each
// chunk is hashed once, when its key or a later one is first asked for.
class PrefixKeys {
 public:
  PrefixKeys(const Digest& root, std::span<const int32_t> tokens, uint32_t chunk_tokens)
      : root_(root), tokens_(tokens), chunk_tokens_(chunk_tokens) {}

  const Digest& root() const { return root_; }
  std::span<const int32_t> tokens() const { return tokens_; }
  // Chunks; the last one may be short.
  size_t size() const { return (tokens_.size() + chunk_tokens_ - 1) / chunk_tokens_; }
  std::span<const int32_t> chunk(size_t index) const;
  // Key of the prefix that ends with a chunk.
  const Digest& operator[](size_t index);
  const Digest& before(size_t index) { return index == 0 ? root_ : (*this)[index - 1]; }
  const Digest& whole() { return before(size()); }

 private:
  const Digest root_;
  const std::span<const int32_t> tokens_;
  const uint32_t chunk_tokens_;
  std::vector<Digest> keys_;  // of the leading chunks
};

// Key of a whole prefix: full chunks, then the rest.
Digest prefix_key(const Digest& root, std::span<const int32_t> tokens, uint32_t chunk_tokens);

// The tenant's number in quotas and listings; does not reveal the salt.
uint64_t tenant_id(const std::string& salt);

}  // namespace lmdecode::store
