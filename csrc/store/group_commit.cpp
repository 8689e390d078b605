#include "store/group_commit.h"

#include <algorithm>
#include <iterator>

namespace lmdecode::store {

namespace {

template <class T>
void prepend(std::vector<T> first, std::vector<T>* to) {
  first.insert(first.end(), std::make_move_iterator(to->begin()),
               std::make_move_iterator(to->end()));
  *to = std::move(first);
}

constexpr std::chrono::milliseconds kMostPatience{2};

}  // namespace

bool GroupCommit::commit(Lock& lock, uint64_t batch, Survives what) {
  using std::chrono::steady_clock;
  if (batch == open_number_) {
    ++joined_;
    gathered_.notify_one();
  }
  const bool syncs = what == Survives::kPowerLoss;
  while (!survives(batch, what)) {
    if (failed_ >= batch || !failure_.empty() || index_ == nullptr) return false;
    if (is_committing_ || is_gathering_) {
      changed_.wait(lock);
      continue;
    }
    if (joined_ < last_joined_) {
      is_gathering_ = true;
      gathered_.wait_for(lock, patience_, [&] { return joined_ >= last_joined_; });
      is_gathering_ = false;
      if (index_ == nullptr) {
        changed_.notify_all();
        return false;
      }
    }
    last_joined_ = std::exchange(joined_, 0);
    const auto begin = steady_clock::now();
    is_committing_ = true;
    Batch taken = std::exchange(open_, {});
    const uint64_t number = open_number_++;
    if (syncs) taken.changes.uses = take_uses_();  // of areas that the durable index has
    SlabFiles& slabs = *slabs_;
    IndexDatabase& index = *index_;
    lock.unlock();
    // Slots are durable before the index refers to them.
    const int error = syncs ? slabs.sync() : 0;
    std::string reason;
    CommitResult result = CommitResult::kFailed;
    if (error != 0) {
      reason = "fdatasync of the slots failed with errno " + std::to_string(-error);
    } else {
      result = index.commit(taken.changes, what, &reason);
      for (int attempt = 0; result == CommitResult::kDiskFull && make_room_(index, attempt);
           ++attempt) {
        result = index.commit(taken.changes, what, &reason);
      }
    }
    // On a full disk, commit session tokens first: a session cannot be resumed without them.
    bool has_saved_sessions = false;
    if (result == CommitResult::kDiskFull && !taken.changes.sessions.empty()) {
      IndexBatch sessions;
      sessions.sessions = taken.changes.sessions;
      const CommitResult saved = index.commit(sessions, what, &reason);
      has_saved_sessions = saved == CommitResult::kDone;
      if (saved == CommitResult::kFailed) result = saved;
    }
    lock.lock();
    is_committing_ = false;
    patience_ = std::min<steady_clock::duration>((steady_clock::now() - begin) / 2, kMostPatience);
    found_no_space_ = result == CommitResult::kDiskFull;
    if (has_saved_sessions) {
      taken.changes.sessions.clear();
      sessions_committed_ = number;
    }
    if (result == CommitResult::kDone) {
      written_ = sessions_committed_ = number;
      written_freed_.insert(written_freed_.end(), taken.freed.begin(), taken.freed.end());
      if (syncs) {
        committed_ = number;
        ++commits_;
        release_(std::exchange(written_freed_, {}));
      }
    } else {
      failed_ = number;
      // After a failed flush the disk's content is unknown: only reading is safe. A full disk is
      // another matter: nothing was written, and the changes go with the next batch.
      if (result == CommitResult::kFailed && failure_.empty()) failure_ = reason;
      take_back(std::move(taken));
    }
    changed_.notify_all();
  }
  return true;
}

const AreaRow* GroupCommit::freeing_row(uint32_t area) const {
  const auto& rows = open_.changes.areas;
  const auto last = std::find_if(rows.rbegin(), rows.rend(),
                                 [&](const AreaRow& row) { return row.area == area; });
  return last == rows.rend() || last->count != 0 ? nullptr : &*last;
}

void GroupCommit::keep(uint32_t area) {
  const AreaRow* const row = freeing_row(area);
  if (row == nullptr) return;
  auto& rows = open_.changes.areas;
  rows.erase(rows.begin() + (row - rows.data()));
  std::erase(open_.freed, area);
}

void GroupCommit::take_back(Batch batch) {
  prepend(std::move(batch.changes.areas), &open_.changes.areas);
  prepend(std::move(batch.changes.sessions), &open_.changes.sessions);
  prepend(std::move(batch.freed), &open_.freed);
}

}  // namespace lmdecode::store
