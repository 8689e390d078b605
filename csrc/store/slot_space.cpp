// Making room: what has expired goes, and what was used least recently.
#include "store/slot_space.h"

#include <algorithm>

namespace lmdecode::store {

namespace {
constexpr uint32_t kMaxAreas = UINT32_MAX - 1;
constexpr uint64_t kReserveFraction = 64;  // of all areas
}  // namespace

uint32_t SlotSpace::capacity() const {
  return static_cast<uint32_t>(
      std::min<uint64_t>(options_.capacity_bytes / layout_.slot_bytes(), kMaxAreas));
}

void SlotSpace::free_entry(EntryId id) {
  const uint32_t area = prefixes_[id].area;
  prefixes_.remove(id);
  if (options_.readonly) return;
  commits_.add_free(area, now());
#if defined(LMD_PLANT_NO_QUARANTINE)  // tests plant it to see that it is noticed
  free_areas_.add_freed(area, now(), now());
#else
  commits_.free(area);
#endif
}

void SlotSpace::drop_subtree(EntryId id) {
  while (prefixes_[id].first_child != kNoEntry) drop_subtree(prefixes_[id].first_child);
  free_entry(id);
}

void SlotSpace::take_freed(const std::vector<uint32_t>& areas) {
  const int64_t time = now();
  for (const uint32_t area : areas) {
    if (holds_ > 0) {
      held_.push_back(area);
    } else if (area < capacity()) {
      free_areas_.add_freed(area, time, time);
    }
  }
}

void SlotSpace::end_hold() {
  if (--holds_ > 0) return;
  const int64_t time = now();
  for (const uint32_t area : std::exchange(held_, {})) free_areas_.add_freed(area, time, time);
}

bool SlotSpace::is_evictable(const Entry& entry) const {
  return entry.first_child == kNoEntry && !entry.pinned && entry.leases == 0 &&
         commits_.is_durable(entry.batch);
}

// Leaves, the least recently used first, as long as they are wanted. Returns how many it freed.
uint64_t SlotSpace::evict_while(const IsWanted& is_wanted, Evicted* evicted) {
  uint64_t freed = 0;
  for (EntryId id = prefixes_.oldest(); id != kNoEntry;) {
    const Entry& entry = prefixes_[id];
    const EntryId newer = entry.newer;
    if (is_evictable(entry)) {
      const Wanted wanted = is_wanted(entry);
      if (wanted == Wanted::kNoMore) break;
      if (wanted == Wanted::kYes) {
        if (evicted != nullptr) evicted->push_back(prefixes_.row_of(entry));
        free_entry(id);
        ++freed;
      }
    }
    id = newer;
  }
  stats_.evicted += freed;
  return freed;
}

// So many, of one tenant if one is named.
uint64_t SlotSpace::evict(uint64_t wanted, const uint64_t* tenant, Evicted* evicted) {
  const auto is_wanted = [&](const Entry& entry) {
    if (wanted == 0) return Wanted::kNoMore;
    if (tenant != nullptr && entry.tenant != *tenant) return Wanted::kNo;
    --wanted;
    return Wanted::kYes;
  };
  return evict_while(is_wanted, evicted);
}

// So many bytes of slots, of entries that were not used later. Returns how many there were.
uint64_t SlotSpace::evict_bytes(uint64_t bytes, int64_t used_until_ms, Evicted* evicted) {
  uint64_t freed = 0;
  const auto is_wanted = [&](const Entry& entry) {
    if (freed >= bytes || entry.used_ms > used_until_ms) return Wanted::kNoMore;
    freed += layout_.image_bytes(entry.count, entry.usable_from);
    return Wanted::kYes;
  };
  evict_while(is_wanted, evicted);
  return freed;
}

// Entries past their time that nothing continues, and then what they continued.
uint64_t SlotSpace::drop_expired() {
  uint64_t dropped = 0;
  const int64_t time = now();
  const auto& expiry = prefixes_.expiry();
  for (auto next = expiry.begin(); next != expiry.end() && next->first <= time;) {
    const EntryId id = next->second;
    const Entry& entry = prefixes_[id];
    // A child may not outlive its parent: its time was carried up when it was made.
    if (entry.leases > 0 || entry.pinned || entry.first_child != kNoEntry) {
      ++next;
      continue;
    }
    free_entry(id);
    ++dropped;
    next = expiry.begin();
  }
  stats_.expired += dropped;
  return dropped;
}

// Free areas that a store likes to have: not every put of a full one should wait for a flush before
// its own, which makes the deletions durable.
uint64_t SlotSpace::reserve() const { return capacity() / kReserveFraction; }

void SlotSpace::keep_reserve() {
  if (disk_is_full_) return;
  const uint64_t coming = free_areas_.total() + commits_.num_freed() + held_.size();
  if (coming < reserve()) evict(reserve() - coming, nullptr);
}

std::vector<uint32_t> SlotSpace::allocate(Lock& lock, uint64_t wanted, uint64_t tenant,
                                          uint64_t quota) {
  const uint64_t allowed = quota / layout_.slot_bytes();
  const auto owned = [&] { return prefixes_.areas_of(tenant); };
  Evicted evicted;
  if (const uint64_t needed = owned() + wanted; needed > allowed) {
    evict(needed - allowed, &tenant, &evicted);
  }
  wanted = std::min(wanted, allowed - std::min(allowed, owned()));
  // Twice: the first commit makes entries evictable that were not durable before.
  for (int attempt = 0; attempt < 2 && free_areas_.total() < wanted; ++attempt) {
    drop_expired();
    const uint64_t coming = free_areas_.total() + commits_.num_freed();
    const uint64_t ahead = disk_is_full_ ? areas_for_reserve() : reserve();
    if (coming < wanted) evict(wanted - coming + ahead, nullptr, &evicted);
    if (!commits_.has_changes()) break;
    if (!commits_.commit(lock)) {
      restore(std::move(evicted));
      break;
    }
    evicted.clear();
  }
  feed_reserve();
  std::vector<uint32_t> areas;
  while (areas.size() < wanted) {
    const uint32_t area = free_areas_.take(now());
    if (area == kNoArea) break;
    areas.push_back(area);
  }
  return areas;
}

}  // namespace lmdecode::store
