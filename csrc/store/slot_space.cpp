// Evicts expired and least recently used entries.
#include "store/slot_space.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "store/store_error.h"

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

// Evicts wanted leaves, least recently used first. Returns their number.
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

// Evicts `wanted` entries, of one tenant if given. Returns their number.
uint64_t SlotSpace::evict(uint64_t wanted, const uint64_t* tenant, Evicted* evicted) {
  const auto is_wanted = [&](const Entry& entry) {
    if (wanted == 0) return Wanted::kNoMore;
    if (tenant != nullptr && entry.tenant != *tenant) return Wanted::kNo;
    --wanted;
    return Wanted::kYes;
  };
  return evict_while(is_wanted, evicted);
}

// Evicts up to `bytes` of slots last used until a time. Returns the bytes.
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

// Drops expired leaves, and then their parents.
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

// Free areas kept ahead, so that a put into a full store seldom waits for the flush that makes
// evictions durable.
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

// --- a full disk
//
// Slots that are replaced in place need no space. Where slots do need space, evicted ones are first
// returned to the disk; the index has a reserve. Nothing is evicted unless its space is used.

bool SlotSpace::make_room_for_index(IndexDatabase& index, int attempt) {
  if (attempt == 0 && index.recycle_log()) return true;
  // The log is at most as long as the reserve, so the reserve suffices to merge it.
  if (!index_reserve_.release()) return false;
  index.recycle_log();
  return true;
}

void SlotSpace::look_for_space(uint64_t bytes) {
  if (disk_is_full_) {
    const uint64_t there = file_system_.free_bytes(options_.directory);
    if (there / 2 < bytes + index_reserve_.missing()) return;
    disk_is_full_ = false;
    free_areas_.use_all();
  }
  if (!commits_.is_committing() && is_full(index_reserve_.fill())) note_full_disk();
}

void SlotSpace::note_full_disk() {
  disk_is_full_ = true;
  free_areas_.keep_to_used();
}

void SlotSpace::refuse(uint32_t area) {
  can_discard_ = can_discard_ && slabs_->discard(area) != -EOPNOTSUPP;
  free_areas_.refuse(area);
}

// Restores entries whose deletions found no space in the index. `evicted` is in order of eviction:
// children before parents.
void SlotSpace::restore(Evicted evicted) {
  if (!commits_.found_no_space()) return;  // a commit that failed may be on the disk all the same
  std::reverse(evicted.begin(), evicted.end());
  for (const AreaRow& row : evicted) {
    if (!commits_.frees(row.area)) continue;  // a batch before this one deleted it
    const std::span<const AreaRow> one(&row, 1);
    prefixes_.add_rows(one, [&](EntryId id) { drop_subtree(id); });
    const EntryId id = prefixes_.at(row.area);
    if (id == kNoEntry || prefixes_[id].sequence != row.sequence) continue;
    commits_.keep(row.area);
    prefixes_[id].batch = 0;  // durable, as it was
    --stats_.evicted;
  }
}

uint64_t SlotSpace::areas_for_reserve() const {
  return (index_reserve_.missing() + layout_.slot_bytes() - 1) / layout_.slot_bytes();
}

// Refills the reserve of the index.
void SlotSpace::feed_reserve() {
  if (index_reserve_.missing() == 0 || commits_.is_committing()) return;
  if (!is_full(index_reserve_.fill()) || !disk_is_full_) return;
  for (uint64_t left = areas_for_reserve(); left > 0; --left) {
    const uint32_t area = free_areas_.take(now());
    if (area == kNoArea) return;
    refuse(area);
    if (index_reserve_.fill() == 0) return;
  }
}

// False: the file system takes no space back.
bool SlotSpace::discard(const std::vector<uint32_t>& areas) {
  for (const uint32_t area : areas) {
    can_discard_ = can_discard_ && slabs_->discard(area) != -EOPNOTSUPP;
  }
  return can_discard_;
}

void SlotSpace::pool_space(Lock& lock, uint64_t bytes, bool trusts_disk) {
  const auto discard_free = [&] {
    if (discard(free_areas_.listed())) free_areas_.refuse_all();
  };
  discard_free();
  if (!can_discard_) return;
  bytes += index_reserve_.missing();
  uint64_t coming = trusts_disk ? file_system_.free_bytes(options_.directory) : 0;
  Evicted evicted;
  if (coming < bytes) coming += evict_bytes(bytes - coming, INT64_MAX, &evicted);
  if (coming < bytes || (commits_.has_changes() && !commits_.commit(lock))) {
    restore(std::move(evicted));
    return;
  }
  discard_free();
}

std::optional<int64_t> SlotSpace::oldest_use() const {
  for (EntryId id = prefixes_.oldest(); id != kNoEntry; id = prefixes_[id].newer) {
    if (is_evictable(prefixes_[id])) return prefixes_[id].used_ms;
  }
  return std::nullopt;
}

uint64_t SlotSpace::give_space_back(Lock& lock, uint64_t bytes, int64_t used_until_ms) {
  if (!commits_.failure().empty() || !discard(free_areas_.take_space())) return 0;
  uint64_t given = 0;
  // Twice: the first commit makes entries evictable that were not durable before.
  for (int attempt = 0; attempt < 2 && given < bytes; ++attempt) {
    Evicted evicted;
    const uint64_t coming = evict_bytes(bytes - given, used_until_ms, &evicted);
    if (!commits_.has_changes()) break;
    if (!commits_.commit(lock)) {
      restore(std::move(evicted));
      break;
    }
    given += coming;
  }
  discard(free_areas_.take_space());
  return given;
}

void SlotSpace::note_stored(bool is_all, bool lacked_space) {
  if (is_all) {
    no_space_.clear();
  } else if (lacked_space || commits_.found_no_space()) {
    no_space_ = "no space left on the disk of " + options_.directory;
  }
}

// --- the reserve of the index

int IndexReserve::fill() {
  const std::lock_guard lock(mutex_);
  if (held_ >= bytes_) return 0;
  int error = 0;
  const auto file = file_system_.open(path_, OpenMode::kCreate, &error);
  if (file == nullptr) return -error;
  const int64_t size = file->size();
  if (size < 0) return static_cast<int>(size);
  held_ = std::min<uint64_t>(bytes_, static_cast<uint64_t>(size));
  // Not zeros: a file system that compresses would keep no space for them.
  std::vector<uint8_t> content(std::min<uint64_t>(bytes_ - held_, uint64_t{1} << 16));
  uint64_t state = 0x9e3779b97f4a7c15;
  for (uint8_t& byte : content) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<uint8_t>(state >> 56);
  }
  while (held_ < bytes_) {
    const uint64_t most = std::min<uint64_t>(content.size(), bytes_ - held_);
    const int64_t put = file->write(held_, content.data(), most);
    if (put <= 0) return put < 0 ? static_cast<int>(put) : -EIO;
    held_ += static_cast<uint64_t>(put);
  }
  return 0;
}

bool IndexReserve::release() {
  const std::lock_guard lock(mutex_);
  int error = 0;
  const auto file = file_system_.open(path_, OpenMode::kWrite, &error);
  if (file == nullptr || file->size() <= 0 || file->truncate(0) != 0) return false;
  held_ = 0;
  return true;
}

}  // namespace lmdecode::store
