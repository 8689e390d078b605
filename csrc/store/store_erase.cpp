// Erasing: gone from lookups first, durably, with a mark that the slots are to be overwritten; then
// overwritten; then free. A loss of power between the two is made good when the store is opened.
#include <algorithm>
#include <cerrno>
#include <set>

#include "store/store_engine.h"

namespace lmdecode::store {

namespace {

[[noreturn]] void fail_to_commit() {
  throw StoreError(ErrorKind::kInputOutput, "erase: cannot be made durable", EIO);
}

bool begin_with(const std::vector<int32_t>& tokens, const std::vector<int32_t>& beginning) {
  return tokens.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), tokens.begin());
}

// The tokens of a session, or the given tokens; nothing: erase everything.
std::optional<std::vector<int32_t>> erased_tokens(IndexDatabase& index, const Digest& root,
                                                  const std::vector<int32_t>* tokens,
                                                  const std::string* session) {
  if (session == nullptr) return tokens == nullptr ? std::nullopt : std::optional(*tokens);
  auto row = index.read_session(root, *session);
  if (!row.has_value()) {
    throw std::invalid_argument("erase: there is no session '" + *session + "'");
  }
  return std::move(row->tokens);
}

// Tokens of the remaining sessions with the same root.
std::vector<std::vector<int32_t>> other_sessions(IndexDatabase& index, const Digest& root,
                                                 const std::vector<int32_t>& tokens,
                                                 const std::string* session) {
  std::vector<std::vector<int32_t>> others;
  for (const SessionRow& row : index.list_sessions()) {
    if (row.root != root || (session != nullptr && row.name == *session)) continue;
    try {
      auto other = index.read_session(row.root, row.name);
      if (other.has_value() && (session != nullptr || !begin_with(other->tokens, tokens))) {
        others.push_back(std::move(other->tokens));
      }
    } catch (const StoreError&) {
      // Damaged tokens need nothing.
    }
  }
  return others;
}

}  // namespace

// Recognises slots of one prefix by their headers: slots with part of its beginning, with all of
// it, or with its continuations. Ask for parents before children.
class StoreEngine::ErasedSlots {
 public:
  ErasedSlots(const Digest& root, const std::vector<int32_t>& tokens, uint32_t chunk_tokens)
      : tokens_(tokens), keys_(root, tokens_, chunk_tokens), chunk_tokens_(chunk_tokens) {}
  ErasedSlots(const ErasedSlots&) = delete;
  ErasedSlots& operator=(const ErasedSlots&) = delete;

  // tokens: reads them if needed; nothing if unreadable: the slot may hold any.
  template <class Tokens>
  bool hold(uint64_t num_tokens, uint32_t count, const Digest& key, const Digest& parent,
            const Tokens& tokens) {
    const uint64_t begin = num_tokens - count;
    if (!inside_.contains(parent)) {
      if (begin >= tokens_.size() || keys_.before(begin / chunk_tokens_) != parent) return false;
      const std::optional<std::vector<int32_t>> stored = tokens();
      const auto from = tokens_.begin() + static_cast<int64_t>(begin);
      if (stored.has_value() &&
          std::mismatch(from, tokens_.end(), stored->begin(), stored->end()).first !=
              from + static_cast<int64_t>(std::min<uint64_t>(count, tokens_.size() - begin))) {
        return false;
      }
      if (num_tokens < tokens_.size()) return true;
    }
    inside_.insert(key);
    return true;
  }
  bool hold(const SlotHeader& header) {
    return hold(header.num_tokens, header.count, header.key, header.parent,
                [&] { return std::optional(header.tokens); });
  }

 private:
  const std::vector<int32_t> tokens_;
  PrefixKeys keys_;
  const uint32_t chunk_tokens_;
  std::set<Digest> inside_;  // keys of entries that hold all the tokens
};

// Collects the erased descendants of `parent`, children before parents.
void StoreEngine::collect_erased(EntryId parent, ErasedSlots& slots, std::vector<EntryId>* found) {
  for (EntryId id = prefixes_[parent].first_child; id != kNoEntry;
       id = prefixes_[id].next_sibling) {
    const Entry& entry = prefixes_[id];
    if (!slots.hold(entry.num_tokens, entry.count, entry.key, prefixes_[parent].key,
                    [&] { return read_tokens(entry); })) {
      continue;
    }
    collect_erased(id, slots, found);
    found->push_back(id);
  }
}

// Removes free slots that still hold erased or evicted content of the prefix from the queues, and
// returns them. slots null: every free slot.
std::vector<uint32_t> StoreEngine::take_stale(Lock& lock, ErasedSlots* slots) {
  std::vector<uint32_t> areas = space_.free_areas().listed();
  if (slots != nullptr) {
    lock.unlock();
    std::vector<SlotHeader> headers;
    std::vector<uint32_t> unknown;  // not readable, or not whole: they may hold anything
    StagingBuffer staging;
    for (const uint32_t area : areas) {
      const auto bytes = staging.resized(layout_.header_bytes(layout_.chunk_tokens));
      std::fill(bytes.begin(), bytes.end(), uint8_t{0});
      const int error = slabs_->read(area, 0, bytes.data(), bytes.size());
      try {
        if (error != 0 && error != -ENODATA) {  // the file may end within the longest header
          unknown.push_back(area);
        } else if (std::any_of(bytes.begin(), bytes.end(),
                               [](uint8_t byte) { return byte != 0; })) {
          headers.push_back(decode_header(layout_, bytes));
          headers.back().area = area;
        }
      } catch (const StoreError&) {
        unknown.push_back(area);
      }
    }
    lock.lock();
    std::stable_sort(headers.begin(), headers.end(), [](const SlotHeader& a, const SlotHeader& b) {
      return a.num_tokens < b.num_tokens;
    });
    areas = std::move(unknown);
    for (const SlotHeader& header : headers) {
      if (slots->hold(header)) areas.push_back(static_cast<uint32_t>(header.area));
    }
  }
  std::erase_if(areas, [&](uint32_t area) { return !space_.free_areas().remove(area); });
  return areas;
}

// Overwrites unreferenced slots, then frees them.
void StoreEngine::overwrite(Lock& lock, const std::vector<uint32_t>& areas) {
  if (areas.empty()) return;
  const std::vector<uint8_t> zeros(slot_bytes_);
  lock.unlock();
  int error = 0;
  for (const uint32_t area : areas) {
    if (error != 0) break;
    error = slabs_->write(area, zeros.data(), zeros.size());
    if (is_full(error)) error = slabs_->discard(area);  // it never had its whole space
  }
  if (error == 0) error = slabs_->sync();
  lock.lock();
  if (error != 0) throw_errno(-error, "erase: cannot overwrite slots in", options_.directory);
  for (const uint32_t area : areas) {
    commits_.add_free(area, now());
    commits_.free(area);
  }
  if (!commits_.commit(lock)) fail_to_commit();
}

// Waits until nothing is left to commit: the index then matches memory.
void StoreEngine::settle(Lock& lock) {
  require_writer();
  if (!commits_.failure().empty()) {
    throw StoreError(ErrorKind::kUnusable, "erase: the store no longer writes");
  }
  if (space_.is_held()) throw StoreError(ErrorKind::kUnusable, "erase: a backup is being made");
  while (commits_.has_changes() || commits_.is_committing()) {
    if (commits_.has_changes() && !commits_.commit(lock)) fail_to_commit();
    wait_for_commit(lock);
  }
}

uint64_t StoreEngine::erase(const Scope& scope, const std::vector<int32_t>* tokens,
                            const std::string* session) {
  const Digest of_scope = root(scope);
  const uint64_t tenant = tenant_id(scope.salt);
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  settle(lock);
  const auto erased = erased_tokens(*index_, of_scope, tokens, session);
  std::vector<EntryId> found;
  std::set<EntryId> needed;
  std::vector<SessionRow> gone;
  std::optional<ErasedSlots> slots;
  if (erased.has_value()) {
    if (session != nullptr) gone.push_back({.root = of_scope, .name = *session});
    for (const std::vector<int32_t>& other : other_sessions(*index_, of_scope, *erased, session)) {
      PrefixKeys keys = keys_of(of_scope, other);
      for (const auto& [id, take] : prefixes_.longest(keys).parts) {
        if (take == prefixes_[id].count) needed.insert(id);  // entries that it uses in part may go
      }
    }
    slots.emplace(of_scope, *erased, layout_.chunk_tokens);
    const EntryId first = prefixes_.find(0, of_scope);
    if (first != kNoEntry && !erased->empty()) collect_erased(first, *slots, &found);
  } else {
    for (const SessionRow& row : index_->list_sessions()) {
      if (row.tenant == tenant) gone.push_back({.root = row.root, .name = row.name});
    }
    const std::vector<AreaRow> rows = prefixes_.rows();
    for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
      if (row->tenant == tenant) found.push_back(prefixes_.at(row->area));
    }
  }
  std::vector<uint32_t> areas;
  const auto mark = [&](uint32_t area) {
    commits_.add_free(area, now(), /*erased=*/true);
    areas.push_back(area);
  };
  for (const EntryId id : found) {
    if (needed.contains(id) || prefixes_[id].first_child != kNoEntry) continue;
    const uint32_t area = prefixes_[id].area;
    prefixes_.remove(id);
    mark(area);
  }
  const uint64_t num_entries = areas.size();
  for (SessionRow& row : gone) {
    sessions_.erase({row.root, row.name});
    row.removed = true;
    commits_.add(row);
  }
  if (!erased.has_value() || !erased->empty()) {
    for (const uint32_t area : take_stale(lock, slots.has_value() ? &*slots : nullptr)) mark(area);
  }
  if (commits_.has_changes() && !commits_.commit(lock)) fail_to_commit();
  overwrite(lock, areas);
  wait_for_commit(lock);
  index_->empty_log();
  return num_entries;
}

std::vector<bool> StoreEngine::erases(const Scope& scope, const std::vector<int32_t>* tokens,
                                      const std::string* session,
                                      const std::vector<std::vector<uint8_t>>& headers) {
  const Digest of_scope = root(scope);
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  settle(lock);
  const auto erased = erased_tokens(*index_, of_scope, tokens, session);
  std::vector<bool> result(headers.size(), !erased.has_value());
  if (!erased.has_value() || erased->empty()) return result;
  std::set<Digest> needed;
  for (const std::vector<int32_t>& other : other_sessions(*index_, of_scope, *erased, session)) {
    PrefixKeys keys = keys_of(of_scope, other);
    for (size_t chunk = 0; chunk < keys.size(); ++chunk) needed.insert(keys[chunk]);
  }
  std::vector<std::pair<SlotHeader, size_t>> known;
  for (size_t i = 0; i < headers.size(); ++i) {
    try {
      known.emplace_back(decode_header(layout_, headers[i]), i);
    } catch (const StoreError&) {
      result[i] = true;  // damaged: of no use to anybody
    }
  }
  std::stable_sort(known.begin(), known.end(), [](const auto& a, const auto& b) {
    return a.first.num_tokens < b.first.num_tokens;
  });
  ErasedSlots slots(of_scope, *erased, layout_.chunk_tokens);
  for (const auto& [header, i] : known) {
    result[i] = slots.hold(header) && !needed.contains(header.key);
  }
  return result;
}

std::vector<Digest> StoreEngine::roots(const Scope& scope) {
  const uint64_t tenant = tenant_id(scope.salt);
  Lock lock(mutex_);
  check_usable();
  refresh();
  wait_for_commit(lock);
  std::set<Digest> found{root(scope)};
  for (const SessionRow& row : index_->list_sessions()) {
    if (row.tenant == tenant) found.insert(row.root);
  }
  for (const AreaRow& row : prefixes_.rows()) {
    if (row.tenant == tenant && row.num_tokens == row.count) found.insert(row.parent);
  }
  return {found.begin(), found.end()};
}

}  // namespace lmdecode::store
