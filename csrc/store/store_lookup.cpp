// Finding the longest stored prefix.
#include <algorithm>

#include "store/store_engine.h"

namespace lmdecode::store {

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

std::optional<std::vector<uint32_t>> Hit::plane_crcs(size_t part) const {
  const std::lock_guard lock(checked_->mutex);
  return checked_->plane_crcs[part];
}

void Hit::keep_plane_crcs(size_t part, const std::vector<uint32_t>& crcs) {
  const std::lock_guard lock(checked_->mutex);
  checked_->plane_crcs[part] = crcs;
}

Hit StoreEngine::lookup(const Scope& scope, std::span<const int32_t> tokens) {
  PrefixKeys keys = keys_of(root(scope), tokens);
  Lock lock(mutex_);
  check_usable();
  refresh();
  const PrefixChain chain = prefixes_.longest(keys);
  ++(chain.parts.empty() ? stats_.misses : stats_.hits);
  if (!chain.parts.empty()) touch(chain.parts.back().first);
  return hit_of(chain, tokens);
}

Hit StoreEngine::peek(const Scope& scope, std::span<const int32_t> tokens) {
  PrefixKeys keys = keys_of(root(scope), tokens);
  const Lock lock(mutex_);
  check_usable();
  refresh();
  return hit_of(prefixes_.longest(keys), tokens);
}

Hit StoreEngine::hit_of(const PrefixChain& chain, std::span<const int32_t> tokens) {
  Hit hit;
  if (chain.parts.empty()) return hit;
  ++prefixes_[chain.parts.back().first].leases;
  hit.engine_ = shared_from_this();
  hit.tokens_.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(chain.num_tokens));
  for (const auto& [id, take] : chain.parts) {
    hit.parts_.push_back({prefixes_[id], id, take});
  }
  hit.checked_ = std::make_unique<Hit::Checked>();
  hit.checked_->plane_crcs.resize(hit.parts_.size());
  return hit;
}

void StoreEngine::release(const HitPart& part) {
  const Lock lock(mutex_);
  if (!prefixes_.holds(part.id, part.sequence)) return;
  Entry& entry = prefixes_[part.id];
  if (entry.leases > 0) --entry.leases;
}

void StoreEngine::pin(const Hit& hit, bool pinned) {
  Lock lock(mutex_);
  require_writer();
  for (const HitPart& part : hit.parts()) {
    if (!prefixes_.holds(part.id, part.sequence)) continue;
    Entry& entry = prefixes_[part.id];
    if (entry.pinned == pinned) continue;
    entry.pinned = pinned;
    commits_.add(prefixes_.row_of(entry));
  }
  if (commits_.has_changes()) commits_.commit(lock, commits_.open_number(), survives());
}

}  // namespace lmdecode::store
