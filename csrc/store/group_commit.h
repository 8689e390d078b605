// How changes become durable: they gather in one open batch; a thread that needs it durable writes
// it for all. First the slots are flushed, then the durable index is told in one transaction.
// Without the flush a batch survives that the process is killed, and is durable with the next one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "store/index_database.h"
#include "store/slab_files.h"

namespace lmdecode::store {

// All under the owner's mutex; commit() and wait() release it meanwhile.
class GroupCommit {
 public:
  using Lock = std::unique_lock<std::mutex>;
  // Times of use that go with a transaction.
  using TakeUses = std::function<std::vector<UseTime>()>;
  // Areas to write again: their deletion is durable.
  using Release = std::function<void(const std::vector<uint32_t>& areas)>;
  // Makes room for the index on a full disk, without the mutex; false: no other attempt is worth
  // it. Counts the attempts of a commit.
  using MakeRoom = std::function<bool(IndexDatabase& index, int attempt)>;

  GroupCommit(TakeUses take_uses, Release release, MakeRoom make_room)
      : take_uses_(std::move(take_uses)),
        release_(std::move(release)),
        make_room_(std::move(make_room)) {}

  void start(SlabFiles& slabs, IndexDatabase& index) { slabs_ = &slabs, index_ = &index; }
  void stop() { index_ = nullptr; }  // every commit fails from now on

  // --- the open batch

  void add(AreaRow row) { open_.changes.areas.push_back(std::move(row)); }
  void add(SessionRow row) { open_.changes.sessions.push_back(std::move(row)); }
  // An area without an entry; `erased`: it is to be overwritten.
  void add_free(uint32_t area, int64_t time_ms, bool erased = false) {
    AreaRow row;
    row.area = area;
    row.sequence = next_sequence();
    row.used_ms = time_ms;
    row.pinned = erased;
    add(std::move(row));
  }
  // Numbers changes of areas: readers find new ones by it.
  uint64_t next_sequence() { return ++sequence_; }
  uint64_t sequence() const { return sequence_; }
  void follow_sequence(uint64_t newest) { sequence_ = newest; }
  // Nobody writes into the area before the batch is durable.
  void free(uint32_t area) { open_.freed.push_back(area); }
  uint64_t open_number() const { return open_number_; }
  // Changes that are not durable.
  bool has_changes() const { return !open_.changes.empty() || written_ > committed_; }
  // Areas that wait for a durable commit.
  size_t num_freed() const { return open_.freed.size() + written_freed_.size(); }
  // Areas freed by the open batch.
  const std::vector<uint32_t>& freed() const { return open_.freed; }
  bool frees(uint32_t area) const { return freeing_row(area) != nullptr; }
  // The area's last change, which freed it, did not happen.
  void keep(uint32_t area);

  // --- durability

  // Waits until a batch survives this; writes it where nobody else does. False: it could not be
  // written, and nothing of it may be acknowledged.
  bool commit(Lock& lock, uint64_t batch, Survives what);
  bool commit(Lock& lock) { return commit(lock, open_number_, Survives::kPowerLoss); }
  bool survives(uint64_t batch, Survives what) const {
    return batch <= (what == Survives::kKill ? written_ : committed_);
  }
  bool is_durable(uint64_t batch) const { return batch <= committed_; }
  // On a full disk the sessions of a batch may be durable without its entries.
  bool is_session_durable(uint64_t batch) const { return batch <= sessions_committed_; }
  // The last commit found no space for the index.
  bool found_no_space() const { return found_no_space_; }
  // Nobody writes to the durable index when it returns.
  void wait(Lock& lock) {
    changed_.wait(lock, [&] { return !is_committing_; });
  }
  bool is_committing() const { return is_committing_; }
  uint64_t commits() const { return commits_; }
  // Why nothing is written any more, after a flush that failed; empty: it is.
  const std::string& failure() const { return failure_; }

 private:
  struct Batch {
    IndexBatch changes;
    std::vector<uint32_t> freed;
  };
  void take_back(Batch batch);
  // The last one of the area in the open batch, if it frees it.
  const AreaRow* freeing_row(uint32_t area) const;

  const TakeUses take_uses_;
  const Release release_;
  const MakeRoom make_room_;
  SlabFiles* slabs_ = nullptr;
  IndexDatabase* index_ = nullptr;  // the committing thread's while it commits
  Batch open_;
  uint64_t sequence_ = 0;
  uint64_t open_number_ = 1;
  uint64_t committed_ = 0;
  uint64_t written_ = 0;  // at least committed_
  std::vector<uint32_t> written_freed_;
  uint64_t sessions_committed_ = 0;
  uint64_t failed_ = 0;
  uint64_t commits_ = 0;
  bool is_committing_ = false;
  // A committing thread waits briefly for the threads that joined the last commit: they usually
  // come again.
  bool is_gathering_ = false;
  uint32_t joined_ = 0;       // calls that want the open batch to be written
  uint32_t last_joined_ = 0;  // that wanted the batch before it
  std::chrono::steady_clock::duration patience_{};
  bool found_no_space_ = false;
  std::string failure_;
  std::condition_variable changed_;
  std::condition_variable gathered_;
};

}  // namespace lmdecode::store
