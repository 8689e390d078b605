// Keys: a SHA-256 chain over the tokens of a prefix, chunk by chunk, from a root that covers the
// configuration, the tenant and whatever else the keys and values depend on.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "store/sha256.h"

namespace lmdecode::store {

// What two prefixes must share before their tokens are looked at. Byte strings, any content.
struct Scope {
  std::string salt;     // the tenant: one never hits what another stored
  std::string context;  // other inputs that the KV depends on: encoder input, images, adapters
};

// SHA-256 of tagged, length-prefixed fields.
Digest root_key(const std::string& fingerprint, uint32_t chunk_tokens, const Scope& scope);

// Key of the prefix of `num_tokens` tokens whose last ones are `tokens`; `parent` is the key of the
// prefix before them.
Digest chain_key(const Digest& parent, uint64_t num_tokens, std::span<const int32_t> tokens);

// Key of a whole prefix: full chunks, then what is left.
Digest prefix_key(const Digest& root, std::span<const int32_t> tokens, uint32_t chunk_tokens);

// What quotas and listings go by; tells nothing of the salt.
uint64_t tenant_id(const std::string& salt);

}  // namespace lmdecode::store
