#include "store/group_commit.h"

#include <iterator>

namespace lmdecode::store {

namespace {

template <class T>
void prepend(std::vector<T> first, std::vector<T>* to) {
  first.insert(first.end(), std::make_move_iterator(to->begin()),
               std::make_move_iterator(to->end()));
  *to = std::move(first);
}

}  // namespace

bool GroupCommit::commit(Lock& lock, uint64_t batch) {
  while (committed_ < batch) {
    if (failed_ >= batch || !failure_.empty() || index_ == nullptr) return false;
    if (is_committing_) {
      changed_.wait(lock);
      continue;
    }
    is_committing_ = true;
    Batch taken = std::exchange(open_, {});
    const uint64_t number = open_number_++;
    taken.changes.uses = take_uses_();
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
    is_committing_ = false;
    if (result == CommitResult::kDone) {
      committed_ = number;
      ++commits_;
      release_(taken.freed);
    } else {
      failed_ = number;
      // After a failed flush nobody knows what is on disk: only reading is safe. A full disk is
      // another matter: nothing was written, and the changes go with the next batch.
      if (result == CommitResult::kFailed && failure_.empty()) failure_ = reason;
      take_back(std::move(taken));
    }
    changed_.notify_all();
  }
  return true;
}

void GroupCommit::take_back(Batch batch) {
  prepend(std::move(batch.changes.areas), &open_.changes.areas);
  prepend(std::move(batch.changes.sessions), &open_.changes.sessions);
  prepend(std::move(batch.freed), &open_.freed);
}

}  // namespace lmdecode::store
