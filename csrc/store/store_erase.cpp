// Erasing: gone from lookups first, durably, with a mark that the slots are to be overwritten; then
// overwritten; then free. A loss of power between the two is made good when the store is opened.
#include <algorithm>
#include <cerrno>
#include <set>

#include "store/store_engine.h"

namespace lmdecode::store {

// All that continues an entry, and the entry, children first.
void StoreEngine::collect_subtree(EntryId id, std::vector<EntryId>* found) const {
  for (EntryId child = prefixes_[id].first_child; child != kNoEntry;
       child = prefixes_[child].next_sibling) {
    collect_subtree(child, found);
  }
  found->push_back(id);
}

// Entries behind `parent` that hold the beginning of the tokens alone, or all of them and more.
void StoreEngine::collect_along(EntryId parent, std::span<const int32_t> tokens,
                                std::vector<EntryId>* found) {
  for (EntryId id = prefixes_[parent].first_child; id != kNoEntry;
       id = prefixes_[id].next_sibling) {
    const auto stored = read_tokens(prefixes_[id]);
    if (!stored.has_value()) continue;  // damaged: a miss already
    const size_t shared = std::min(stored->size(), tokens.size());
    if (!std::equal(tokens.begin(), tokens.begin() + static_cast<int64_t>(shared),
                    stored->begin())) {
      continue;
    }
    if (stored->size() >= tokens.size()) {
      collect_subtree(id, found);
      continue;
    }
    collect_along(id, tokens.subspan(stored->size()), found);
    found->push_back(id);
  }
}

// Overwrites the slots of entries that are gone, and lets them be used again.
void StoreEngine::overwrite(Lock& lock, const std::vector<uint32_t>& areas) {
  if (areas.empty()) return;
  const std::vector<uint8_t> zeros(slot_bytes_);
  lock.unlock();
  int error = 0;
  for (const uint32_t area : areas) {
    if (error == 0) error = slabs_->write(area, zeros.data(), zeros.size());
  }
  if (error == 0) error = slabs_->sync();
  lock.lock();
  if (error != 0) throw_errno(-error, "erase: cannot overwrite slots in", options_.directory);
  for (const uint32_t area : areas) {
    AreaRow row;
    row.area = area;
    row.sequence = ++sequence_;
    row.used_ms = now();
    commits_.add(row);
    commits_.free(area);
  }
  if (!commits_.commit(lock)) {
    throw StoreError(ErrorKind::kInputOutput, "erase: cannot be made durable", EIO);
  }
}

uint64_t StoreEngine::erase(const Scope& scope, const std::vector<int32_t>* tokens,
                            const std::string* session) {
  const Digest root_of_scope = root(scope);
  const uint64_t tenant = tenant_id(scope.salt);
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  if (!commits_.failure().empty()) {
    throw StoreError(ErrorKind::kUnusable, "erase: the store no longer writes");
  }
  // What is erased lies in the index as it is in memory.
  if (commits_.has_changes() && !commits_.commit(lock)) {
    throw StoreError(ErrorKind::kInputOutput, "erase: cannot be made durable", EIO);
  }
  wait_for_commit(lock);
  std::vector<EntryId> found;
  std::set<EntryId> needed;
  std::vector<SessionRow> gone;
  std::vector<int32_t> of_session;
  if (session != nullptr) {
    const auto row = index_->read_session(root_of_scope, *session);
    if (!row.has_value()) {
      throw std::invalid_argument("erase: there is no session '" + *session + "'");
    }
    of_session = row->tokens;
    tokens = &of_session;
    gone.push_back({.root = root_of_scope, .name = *session});
  }
  for (const SessionRow& row : index_->list_sessions()) {
    if (tokens == nullptr) {
      if (row.tenant == tenant) gone.push_back({.root = row.root, .name = row.name});
      continue;
    }
    if (row.root != root_of_scope || (session != nullptr && row.name == *session)) continue;
    const auto other = index_->read_session(row.root, row.name);
    if (!other.has_value()) continue;
    const bool begins_so = other->tokens.size() >= tokens->size() &&
                           std::equal(tokens->begin(), tokens->end(), other->tokens.begin());
    if (session == nullptr && begins_so) continue;
    PrefixKeys keys = keys_of(root_of_scope, other->tokens);
    for (const auto& [id, take] : prefixes_.longest(keys).parts) needed.insert(id);
  }
  if (tokens == nullptr) {
    const std::vector<AreaRow> rows = prefixes_.rows();
    for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
      if (row->tenant == tenant) found.push_back(prefixes_.at(row->area));
    }
  } else if (const EntryId first = prefixes_.find(0, root_of_scope);
             first != kNoEntry && !tokens->empty()) {
    collect_along(first, *tokens, &found);
  }
  std::vector<uint32_t> areas;
  for (const EntryId id : found) {
    if (needed.contains(id) || prefixes_[id].first_child != kNoEntry) continue;
    AreaRow row;
    row.area = prefixes_[id].area;
    row.sequence = ++sequence_;
    row.used_ms = now();
    row.pinned = true;  // to be overwritten
    prefixes_.remove(id);
    commits_.add(row);
    areas.push_back(row.area);
  }
  for (SessionRow& row : gone) {
    sessions_.erase({row.root, row.name});
    row.removed = true;
    commits_.add(row);
  }
  if (commits_.has_changes() && !commits_.commit(lock)) {
    throw StoreError(ErrorKind::kInputOutput, "erase: cannot be made durable", EIO);
  }
  overwrite(lock, areas);
  wait_for_commit(lock);
  index_->compact();
  return areas.size();
}

}  // namespace lmdecode::store
