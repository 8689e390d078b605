// Finding the longest stored prefix.
#include <algorithm>

#include "store/store_engine.h"

namespace lmdecode::store {

namespace {
constexpr uint64_t kMaxCachedTokens = uint64_t{16} << 20;
}

Hit::~Hit() {
  if (engine_ != nullptr && !parts_.empty()) engine_->release(parts_.back());
}

Hit::Hit(Hit&& other) noexcept { *this = std::move(other); }

Hit& Hit::operator=(Hit&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(tokens_, other.tokens_);
  std::swap(parts_, other.parts_);
  std::swap(checked_, other.checked_);
  return *this;
}

bool StoreEngine::is_alive(const Entry& entry) const {
  return entry.expires_ms == 0 || entry.expires_ms > now();
}

// The tokens of an entry's slot; null where they cannot be read or are not what was written.
const std::vector<int32_t>* StoreEngine::tokens_of(EntryId id) {
  if (const auto cached = token_cache_.find(id); cached != token_cache_.end()) {
    return &cached->second;
  }
  const Entry& entry = map_[id];
  const HitPart part{id,          entry.sequence,   entry.area,       entry.count,
                     entry.count, entry.header_crc, entry.num_tokens, entry.key};
  StagingBuffer staging;
  auto header = read_header(part, staging);
  if (!header.has_value()) return nullptr;
  if (cached_tokens_ > kMaxCachedTokens) {
    token_cache_.clear();
    cached_tokens_ = 0;
  }
  cached_tokens_ += header->tokens.size();
  return &(token_cache_[id] = std::move(header->tokens));
}

// The child that shares the most leading tokens, at least one, of those that the caller can use
// with so many; its slot may hold more tokens, or others after these.
EntryId StoreEngine::longest_child(EntryId parent, std::span<const int32_t> tokens,
                                   uint32_t* matched, const IsUsable& is_usable) {
  EntryId best = kNoEntry;
  *matched = 0;
  const Digest key = map_[parent].key;
  const uint64_t before = map_[parent].num_tokens;
  // By hash, which costs no reading: tails that end where the tokens end, or before.
  std::unordered_map<uint32_t, Digest> keys;
  for (EntryId id = map_[parent].first_child; id != kNoEntry; id = map_[id].next_sibling) {
    const Entry& entry = map_[id];
    if (entry.count > tokens.size() || entry.count <= *matched || !is_alive(entry)) continue;
    auto [found, is_new] = keys.try_emplace(entry.count);
    if (is_new) found->second = chain_key(key, before + entry.count, tokens.first(entry.count));
    if (found->second != entry.key || !is_usable(id, entry.count)) continue;
    best = id;
    *matched = entry.count;
  }
  for (EntryId id = map_[parent].first_child; id != kNoEntry && *matched < tokens.size();
       id = map_[id].next_sibling) {
    const Entry& entry = map_[id];
    if (entry.count <= *matched || !is_alive(entry)) continue;
    const std::vector<int32_t>* stored = tokens_of(id);
    if (stored == nullptr) continue;
    const auto end = std::mismatch(tokens.begin(), tokens.end(), stored->begin(), stored->end());
    const auto common = static_cast<uint32_t>(end.first - tokens.begin());
    if (common > *matched && is_usable(id, common)) {
      best = id;
      *matched = common;
    }
  }
  return best;
}

// Layers with a window must have all that the next token sees: the last window - 1 tokens.
bool StoreEngine::covers_windows(const Chain& chain) const {
  const uint64_t window = layout_.shape.widest_window();
  if (window == 0) return true;
  const uint64_t needed = chain.num_tokens - std::min(chain.num_tokens, window - 1);
  uint64_t end = chain.num_tokens;
  for (auto part = chain.parts.rbegin(); part != chain.parts.rend() && end > needed; ++part) {
    const uint64_t begin = end - part->second;
    if (map_[part->first].sliding_from > std::max(needed, begin) - begin) return false;
    end = begin;
  }
  return true;
}

StoreEngine::Chain StoreEngine::walk(const Digest& root, std::span<const int32_t> tokens) {
  Chain chain;
  EntryId at = map_.find(0, root);
  if (at == kNoEntry) return chain;
  const uint32_t chunk = layout_.chunk_tokens;
  Digest key = root;
  uint64_t position = 0;
  for (; position + chunk <= tokens.size(); position += chunk) {
    const Digest next = chain_key(key, position + chunk, tokens.subspan(position, chunk));
    const EntryId id = map_.find(position + chunk, next);
    if (id == kNoEntry || map_[id].count != chunk || !is_alive(map_[id])) break;
    chain.parts.push_back({id, chunk});
    key = next;
    at = id;
  }
  if (position < tokens.size()) {
    const auto rest = tokens.subspan(position, std::min<uint64_t>(chunk, tokens.size() - position));
    uint32_t matched = 0;
    // A longer child may lack what the windows need at this length, where a shorter one has it.
    const auto covers = [&](EntryId child, uint32_t count) {
      chain.parts.push_back({child, count});
      chain.num_tokens = position + count;
      const bool is_covered = covers_windows(chain);
      chain.parts.pop_back();
      return is_covered;
    };
    const EntryId id = longest_child(at, rest, &matched, covers);
    if (id != kNoEntry) chain.parts.push_back({id, matched});
    position += matched;
  }
  chain.num_tokens = position;
  while (!chain.parts.empty() && !covers_windows(chain)) {
    chain.num_tokens -= chain.parts.back().second;
    chain.parts.pop_back();
  }
  if (!chain.parts.empty()) chain.last = chain.parts.back().first;
  return chain;
}

Hit StoreEngine::lookup(const Scope& scope, std::span<const int32_t> tokens) {
  const Digest root_of_scope = root(scope);
  Lock lock(mutex_);
  check_usable();
  refresh();
  const Chain chain = walk(root_of_scope, tokens);
  ++(chain.parts.empty() ? stats_.misses : stats_.hits);
  if (!chain.parts.empty()) touch(chain.last);
  return hit_of(chain, tokens);
}

Hit StoreEngine::peek(const Scope& scope, std::span<const int32_t> tokens) {
  const Digest root_of_scope = root(scope);
  const Lock lock(mutex_);
  check_usable();
  refresh();
  return hit_of(walk(root_of_scope, tokens), tokens);
}

Hit StoreEngine::hit_of(const Chain& chain, std::span<const int32_t> tokens) {
  Hit hit;
  if (chain.parts.empty()) return hit;
  ++map_[chain.last].leases;
  hit.engine_ = shared_from_this();
  hit.tokens_.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(chain.num_tokens));
  for (const auto& [id, take] : chain.parts) {
    const Entry& entry = map_[id];
    hit.parts_.push_back({id, entry.sequence, entry.area, entry.count, take, entry.header_crc,
                          entry.num_tokens, entry.key});
  }
  hit.checked_ = std::make_unique<Hit::Checked>();
  hit.checked_->plane_crcs.resize(hit.parts_.size());
  return hit;
}

void StoreEngine::release(const HitPart& part) {
  const Lock lock(mutex_);
  if (map_.holds(part.id, part.sequence) && map_[part.id].leases > 0) --map_[part.id].leases;
}

void StoreEngine::pin(const Hit& hit, bool pinned) {
  Lock lock(mutex_);
  require_writer();
  for (const HitPart& part : hit.parts()) {
    if (!map_.holds(part.id, part.sequence) || map_[part.id].pinned == pinned) continue;
    map_[part.id].pinned = pinned;
    open_batch_.changes.areas.push_back(row_of(map_[part.id]));
  }
  if (!options_.relaxed && !open_batch_.changes.empty()) commit(lock, open_number_);
}

}  // namespace lmdecode::store
