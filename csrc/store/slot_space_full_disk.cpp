// A disk without space. Slots that are replaced in their place need none; where they do, what was
// evicted is given back to the disk first. The index has a reserve. Nothing is evicted whose space
// is not used then.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "store/slot_space.h"
#include "store/store_error.h"

namespace lmdecode::store {

bool SlotSpace::make_room_for_index(IndexDatabase& index, int attempt) {
  if (attempt == 0 && index.recycle_log()) return true;
  // The log is at most as long as the reserve: so is what the file lacks of it.
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

// The deletions of these found no space in the index: the entries are as good as before. They are
// in the order in which they were evicted, what continues an entry before it.
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

// Gives the index back what it took from its reserve.
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

}  // namespace lmdecode::store
