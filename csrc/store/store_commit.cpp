// Making changes durable, and making room.
#include <algorithm>
#include <utility>

#include "store/store_engine.h"

namespace lmdecode::store {

namespace {
constexpr size_t kMaxUsesPerCommit = 1024;
constexpr uint64_t kReserveFraction = 64;  // of all areas
}  // namespace

void StoreEngine::stop_writing(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
}

// Waits until the batch is durable; writes it where nobody else does. False: it could not be
// written, and nothing of it may be acknowledged.
bool StoreEngine::commit(Lock& lock, uint64_t batch) {
  while (committed_ < batch) {
    if (failed_ >= batch || !failure_.empty() || index_ == nullptr) return false;
    if (committing_) {
      committed_changed_.wait(lock);
      continue;
    }
    committing_ = true;
    OpenBatch taken = std::exchange(open_batch_, {});
    const uint64_t number = open_number_++;
    while (!touched_.empty() && taken.changes.uses.size() < kMaxUsesPerCommit) {
      const EntryId id = touched_.back();
      touched_.pop_back();
      Entry& entry = map_[id];
      if (entry.is_root() || !std::exchange(entry.used_is_newer, false)) continue;
      taken.changes.uses.push_back({entry.area, entry.used_ms});
    }
    SlabFiles& slabs = *slabs_;
    IndexDatabase& index = *index_;
    lock.unlock();
    // What slots hold is durable before the index refers to it.
    const int error = slabs.sync();
    std::string reason;
    CommitResult result = CommitResult::kFailed;
    if (error != 0) {
      reason = "fdatasync of the slots failed with errno " + std::to_string(-error);
    } else {
      result = index.commit(taken.changes, &reason);
    }
    lock.lock();
    committing_ = false;
    if (result == CommitResult::kDone) {
      committed_ = number;
      ++stats_.commits;
      const int64_t time = now();
      for (const uint32_t area : taken.freed) {
        if (holds_ > 0) {
          held_.push_back(area);
        } else if (area < capacity_areas()) {
          free_areas_.add_freed(area, time, time);
        }
      }
    } else {
      failed_ = number;
      // After a failed flush nobody knows what is on disk: only reading is safe. A full disk is
      // another matter: nothing was written, and the changes go with the next batch.
      if (result == CommitResult::kFailed) stop_writing(reason);
      IndexBatch& next = open_batch_.changes;
      std::vector<AreaRow>& areas = taken.changes.areas;
      areas.insert(areas.end(), next.areas.begin(), next.areas.end());
      std::vector<SessionRow>& sessions = taken.changes.sessions;
      sessions.insert(sessions.end(), next.sessions.begin(), next.sessions.end());
      next.areas = std::move(areas);
      next.sessions = std::move(sessions);
      open_batch_.freed.insert(open_batch_.freed.begin(), taken.freed.begin(), taken.freed.end());
    }
    committed_changed_.notify_all();
  }
  return true;
}

AreaRow StoreEngine::row_of(const Entry& entry) const {
  AreaRow row;
  row.area = entry.area;
  row.sequence = entry.sequence;
  row.num_tokens = entry.num_tokens;
  row.count = entry.count;
  row.sliding_from = entry.sliding_from;
  row.header_crc = entry.header_crc;
  row.tenant = entry.tenant;
  row.created_ms = entry.created_ms;
  row.used_ms = entry.used_ms;
  row.expires_ms = entry.expires_ms;
  row.pinned = entry.pinned;
  row.key = entry.key;
  row.parent = map_[entry.parent].key;
  return row;
}

// The entry, which nothing continues, leaves the map; its area waits for the deletion to be
// durable.
void StoreEngine::free_entry(EntryId id) {
  const uint32_t area = map_[id].area;
  remove_entry(id);
  if (options_.readonly) return;
  AreaRow row;
  row.area = area;
  row.sequence = ++sequence_;
  row.used_ms = now();
  open_batch_.changes.areas.push_back(row);
#if defined(LMD_PLANT_NO_QUARANTINE)  // tests plant it to see that it is noticed
  free_areas_.add_freed(area, row.used_ms, row.used_ms);
#else
  open_batch_.freed.push_back(area);
#endif
}

void StoreEngine::drop_subtree(EntryId id) {
  while (map_[id].first_child != kNoEntry) drop_subtree(map_[id].first_child);
  free_entry(id);
}

bool StoreEngine::is_evictable(const Entry& entry) const {
  return entry.first_child == kNoEntry && !entry.pinned && entry.leases == 0 &&
         entry.batch <= committed_;
}

// The least recently used leaves, of one tenant if one is named. Returns how many it freed.
uint64_t StoreEngine::evict(uint64_t wanted, const uint64_t* tenant) {
  uint64_t freed = 0;
  for (EntryId id = map_.oldest(); id != kNoEntry && freed < wanted;) {
    const Entry& entry = map_[id];
    const EntryId newer = entry.newer;
    if (is_evictable(entry) && (tenant == nullptr || entry.tenant == *tenant)) {
      free_entry(id);
      ++freed;
    }
    id = newer;
  }
  stats_.evicted += freed;
  return freed;
}

// Entries past their time that nothing continues, and then what they continued.
uint64_t StoreEngine::drop_expired() {
  uint64_t dropped = 0;
  const int64_t time = now();
  for (auto next = expiry_.begin(); next != expiry_.end() && next->first <= time;) {
    EntryId id = next->second;
    // A child may not outlive its parent: its time was carried up when it was made.
    if (map_[id].leases > 0 || map_[id].pinned || map_[id].first_child != kNoEntry) {
      ++next;
      continue;
    }
    free_entry(id);
    ++dropped;
    next = expiry_.begin();
  }
  stats_.expired += dropped;
  return dropped;
}

// Free areas that a store likes to have: not every put of a full one should wait for a flush before
// its own, which makes the deletions durable.
uint64_t StoreEngine::reserve() const { return capacity_areas() / kReserveFraction; }

// The deletions go with the next commit, the caller's.
void StoreEngine::keep_reserve() {
  const uint64_t coming = free_areas_.total() + open_batch_.freed.size() + held_.size();
  if (coming < reserve()) evict(reserve() - coming, nullptr);
}

// Up to `wanted` free areas; evicts what it must, and waits until that is durable.
std::vector<uint32_t> StoreEngine::allocate(Lock& lock, uint64_t wanted, uint64_t tenant,
                                            uint64_t quota) {
  const uint64_t allowed = quota / slot_bytes_;
  const auto owned = [&] {
    const auto found = tenant_areas_.find(tenant);
    return found == tenant_areas_.end() ? uint64_t{0} : found->second;
  };
  if (const uint64_t needed = owned() + wanted; needed > allowed) evict(needed - allowed, &tenant);
  wanted = std::min(wanted, allowed - std::min(allowed, owned()));
  // Twice: the first commit makes entries evictable that were not durable before.
  for (int attempt = 0; attempt < 2 && free_areas_.total() < wanted; ++attempt) {
    drop_expired();
    const uint64_t coming = free_areas_.total() + open_batch_.freed.size();
    if (coming < wanted) evict(wanted - coming + reserve(), nullptr);
    if (open_batch_.changes.empty() || !commit(lock, open_number_)) break;
  }
  std::vector<uint32_t> areas;
  while (areas.size() < wanted) {
    const uint32_t area = free_areas_.take(now());
    if (area == kNoArea) break;
    areas.push_back(area);
  }
  return areas;
}

uint64_t StoreEngine::collect() {
  Lock lock(mutex_);
  require_writer();
  const uint64_t dropped = drop_expired();
  if (!open_batch_.changes.empty() && !commit(lock, open_number_)) return dropped;
  wait_for_commit(lock);
  uint32_t used = 0;
  for (uint32_t area = 0; area < by_area_.size(); ++area) {
    if (by_area_[area] != kNoEntry) used = area + 1;
  }
  // Areas that a put has taken, but not published, are in neither list: they stay.
  const uint64_t known = map_.size() + free_areas_.listed().size() + held_.size();
  if (known == free_areas_.used()) slabs_->truncate(used);
  index_->compact();
  return dropped;
}

}  // namespace lmdecode::store
