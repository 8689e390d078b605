#include "store/prefix_index.h"

#include <algorithm>

namespace lmdecode::store {

namespace {
constexpr uint64_t kMaxCachedTokens = uint64_t{16} << 20;
}

// ---- entries

EntryId PrefixIndex::insert(const Entry& entry) {
  const EntryId id = map_.insert(entry);
  if (by_area_.size() <= entry.area) by_area_.resize(entry.area + 1, kNoEntry);
  by_area_[entry.area] = id;
  ++tenant_areas_[entry.tenant];
  if (entry.expires_ms != 0) expiry_.insert({entry.expires_ms, id});
  return id;
}

EntryId PrefixIndex::add(const Entry& entry, EntryId parent) {
  const EntryId id = insert(entry);
  map_.link(id, parent);
  return id;
}

void PrefixIndex::remove(EntryId id) {
  const Entry& entry = map_[id];
  by_area_[entry.area] = kNoEntry;
  if (const auto count = tenant_areas_.find(entry.tenant); --count->second == 0) {
    tenant_areas_.erase(count);
  }
  if (entry.expires_ms != 0) expiry_.erase({entry.expires_ms, id});
  if (const auto cached = token_cache_.find(id); cached != token_cache_.end()) {
    cached_tokens_ -= cached->second.size();
    token_cache_.erase(cached);
  }
  map_.remove(id);
}

void PrefixIndex::move(EntryId id, uint32_t area, uint32_t header_crc, uint32_t usable_from,
                       uint64_t sequence) {
  Entry& entry = map_[id];
  by_area_[entry.area] = kNoEntry;
  if (by_area_.size() <= area) by_area_.resize(area + 1, kNoEntry);
  by_area_[area] = id;
  entry.area = area;
  entry.header_crc = header_crc;
  entry.usable_from = usable_from;
  entry.sequence = sequence;
}

void PrefixIndex::set_expiry(EntryId id, int64_t expires_ms) {
  Entry& entry = map_[id];
  if (entry.expires_ms != 0) expiry_.erase({entry.expires_ms, id});
  entry.expires_ms = expires_ms;
  if (expires_ms != 0) expiry_.insert({expires_ms, id});
}

uint32_t PrefixIndex::areas_end() const {
  const auto last =
      std::find_if(by_area_.rbegin(), by_area_.rend(), [](EntryId id) { return id != kNoEntry; });
  return static_cast<uint32_t>(by_area_.rend() - last);
}

uint64_t PrefixIndex::areas_of(uint64_t tenant) const {
  const auto found = tenant_areas_.find(tenant);
  return found == tenant_areas_.end() ? 0 : found->second;
}

// ---- rows of the durable index

AreaRow PrefixIndex::row_of(const Entry& entry) const { return {entry, map_[entry.parent].key}; }

std::vector<AreaRow> PrefixIndex::rows() const {
  std::vector<AreaRow> rows;
  for (const EntryId id : by_area_) {
    if (id != kNoEntry) rows.push_back(row_of(map_[id]));
  }
  std::sort(rows.begin(), rows.end(), [](const AreaRow& a, const AreaRow& b) {
    return a.num_tokens != b.num_tokens ? a.num_tokens < b.num_tokens : a.area < b.area;
  });
  return rows;
}

void PrefixIndex::reserve(size_t entries, uint32_t areas) {
  map_.reserve(entries);
  by_area_.reserve(areas);
}

void PrefixIndex::add_rows(std::span<const AreaRow> rows, const Drop& drop) {
  std::vector<std::pair<EntryId, Digest>> unlinked;
  for (const AreaRow& row : rows) {
    if (at(row.area) != kNoEntry) continue;
    if (row.num_tokens < row.count || map_.find(row.num_tokens, row.key) != kNoEntry) continue;
    Entry entry;
    static_cast<Chunk&>(entry) = row;
    unlinked.push_back({insert(entry), row.parent});
  }
  std::vector<std::pair<EntryId, uint64_t>> orphans;
  for (const auto& [id, parent_key] : unlinked) {
    const uint64_t before = map_[id].num_tokens - map_[id].count;
    const EntryId parent = before == 0 ? map_.root(parent_key) : map_.find(before, parent_key);
    if (parent != kNoEntry) {
      map_.link(id, parent);
    } else {
      orphans.push_back({id, map_[id].sequence});
    }
  }
  for (const auto& [id, sequence] : orphans) {
    if (map_.holds(id, sequence)) drop(id);
  }
}

void PrefixIndex::follow(std::vector<AreaRow> rows, const Drop& drop) {
  for (const AreaRow& row : rows) {
    const EntryId id = row.count == 0 ? kNoEntry : map_.find(row.num_tokens, row.key);
    if (id == kNoEntry) continue;
    if (const EntryId other = at(row.area); other != kNoEntry && other != id) continue;
    move(id, row.area, row.header_crc, row.usable_from, row.sequence);
    set_expiry(id, row.expires_ms);
    map_[id].pinned = row.pinned;
  }
  for (const AreaRow& row : rows) {
    const EntryId id = at(row.area);
    if (id != kNoEntry && map_[id].sequence != row.sequence) drop(id);
  }
  std::erase_if(rows, [](const AreaRow& row) { return row.count == 0; });
  add_rows(rows, drop);
}

// ---- use

std::vector<UseTime> PrefixIndex::take_uses(size_t most) {
  std::vector<UseTime> uses;
  while (!touched_.empty() && uses.size() < most) {
    Entry& entry = map_[touched_.back()];
    touched_.pop_back();
    if (entry.is_root() || !std::exchange(entry.used_is_newer, false)) continue;
    uses.push_back({entry.area, entry.used_ms});
  }
  return uses;
}

// ---- finding

bool PrefixIndex::is_alive(const Entry& entry) const {
  return entry.expires_ms == 0 || entry.expires_ms > now_ms_();
}

// Null where they cannot be read.
const std::vector<int32_t>* PrefixIndex::tokens_of(EntryId id) {
  if (const auto cached = token_cache_.find(id); cached != token_cache_.end()) {
    return &cached->second;
  }
  auto tokens = read_tokens_(map_[id]);
  if (!tokens.has_value()) return nullptr;
  if (cached_tokens_ > kMaxCachedTokens) {
    token_cache_.clear();
    cached_tokens_ = 0;
  }
  cached_tokens_ += tokens->size();
  return &(token_cache_[id] = std::move(*tokens));
}

// The child that shares the most leading tokens with the chunk, at least one, of those that the
// caller can use with so many; its slot may hold more tokens, or others after these.
EntryId PrefixIndex::longest_child(EntryId parent, PrefixKeys& keys, size_t chunk,
                                   uint32_t* matched, const IsUsable& is_usable) {
  EntryId best = kNoEntry;
  *matched = 0;
  const std::span<const int32_t> tokens = keys.chunk(chunk);
  const Digest key = map_[parent].key;
  const uint64_t before = map_[parent].num_tokens;
  // By hash, without reading slots: tails that end at or before the end of the tokens.
  std::unordered_map<uint32_t, Digest> known;
  for (EntryId id = map_[parent].first_child; id != kNoEntry; id = map_[id].next_sibling) {
    const Entry& entry = map_[id];
    if (entry.count > tokens.size() || entry.count <= *matched || !is_alive(entry)) continue;
    auto [found, is_new] = known.try_emplace(entry.count);
    if (is_new) {
      found->second = entry.count == tokens.size()
                          ? keys[chunk]
                          : chain_key(key, before + entry.count, tokens.first(entry.count));
    }
    if (found->second != entry.key || !is_usable(id, entry.count)) continue;
    best = id;
    *matched = entry.count;
  }
  for (EntryId id = map_[parent].first_child; id != kNoEntry && *matched < tokens.size();
       id = map_[id].next_sibling) {
    const Entry& entry = map_[id];
    if (entry.count <= *matched || !is_alive(entry)) continue;
    // Not read in vain: layers with a window lack something at every length within it.
    if (entry.usable_from > std::min<uint64_t>(entry.count, tokens.size())) continue;
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

EntryId PrefixIndex::child_with(EntryId parent, PrefixKeys& keys, size_t chunk) {
  uint32_t matched = 0;
  const EntryId id =
      longest_child(parent, keys, chunk, &matched, [](EntryId, uint32_t) { return true; });
  return matched < keys.chunk(chunk).size() ? kNoEntry : id;
}

// Layers with a window must have all that the next token sees: the last window - 1 tokens.
bool PrefixIndex::covers_windows(const PrefixChain& chain) const {
  const uint64_t window = layout_.shape.widest_window();
  if (window == 0) return true;
  const uint64_t total = chain.num_tokens, needed = total - std::min(total, window - 1);
  uint64_t end = total;
  for (auto part = chain.parts.rbegin(); part != chain.parts.rend() && end > needed; ++part) {
    const uint64_t begin = end - part->second;
    if (map_[part->first].usable_from > total - begin) return false;
    end = begin;
  }
  return true;
}

PrefixChain PrefixIndex::longest(PrefixKeys& keys) {
  PrefixChain chain;
  EntryId at = map_.find(0, keys.root());
  if (at == kNoEntry) return chain;
  const uint32_t full = layout_.chunk_tokens;
  size_t chunk = 0;
  for (; chunk < keys.size() && keys.chunk(chunk).size() == full; ++chunk) {
    const EntryId id = map_.find(uint64_t{full} * (chunk + 1), keys[chunk]);
    if (id == kNoEntry || map_[id].count != full || !is_alive(map_[id])) break;
    chain.parts.push_back({id, full});
    at = id;
  }
  // Where the windows are not covered at one length they may be at a shorter one, stored as a tail.
  for (;; --chunk) {
    const uint64_t position = uint64_t{full} * chunk;
    uint32_t matched = 0;
    // A longer child may lack what the windows need at this length, where a shorter one has it.
    const auto covers = [&](EntryId child, uint32_t count) {
      chain.parts.push_back({child, count});
      chain.num_tokens = position + count;
      const bool is_covered = covers_windows(chain);
      chain.parts.pop_back();
      return is_covered;
    };
    const EntryId id =
        chunk == keys.size() ? kNoEntry : longest_child(at, keys, chunk, &matched, covers);
    if (id != kNoEntry) chain.parts.push_back({id, matched});
    chain.num_tokens = position + matched;
    if (chain.parts.empty() || id != kNoEntry || covers_windows(chain)) return chain;
    at = map_[chain.parts.back().first].parent;
    chain.parts.pop_back();
  }
}

}  // namespace lmdecode::store
