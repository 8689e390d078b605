#include "store/address_map.h"

#include <bit>
#include <cstring>
#include <utility>

namespace lmdecode::store {

namespace {
constexpr size_t kInitialBuckets = 1024;
}

AddressMap::AddressMap() : heads_(kInitialBuckets, kNoEntry) {}

// The keys are SHA-256 digests: any bits of them are spread evenly.
size_t AddressMap::bucket(const Digest& key) const {
  uint64_t hash;
  std::memcpy(&hash, key.data(), sizeof(hash));
  return hash & (heads_.size() - 1);
}

EntryId AddressMap::find(uint64_t num_tokens, const Digest& key) const {
  for (EntryId id = heads_[bucket(key)]; id != kNoEntry; id = entries_[id].next) {
    if (entries_[id].num_tokens == num_tokens && entries_[id].key == key) return id;
  }
  return kNoEntry;
}

void AddressMap::push_front(EntryId id) {
  Entry& entry = entries_[id];
  EntryId& head = heads_[bucket(entry.key)];
  entry.previous = kNoEntry;
  entry.next = head;
  if (head != kNoEntry) entries_[head].previous = id;
  head = id;
}

void AddressMap::grow() {
  heads_.assign(heads_.size() * 2, kNoEntry);
  std::vector<bool> free(entries_.size(), false);
  for (const EntryId id : unused_) free[id] = true;
  for (EntryId id = 0; id < entries_.size(); ++id) {
    if (!free[id]) push_front(id);
  }
}

void AddressMap::reserve(size_t entries) {
  entries_.reserve(entries);
  if (entries > heads_.size() && size_ == 0) heads_.assign(std::bit_ceil(entries), kNoEntry);
}

void AddressMap::clear() { *this = AddressMap(); }

EntryId AddressMap::insert(const Entry& entry) {
  if (size_ >= heads_.size()) grow();
  EntryId id;
  if (unused_.empty()) {
    id = static_cast<EntryId>(entries_.size());
    entries_.push_back(entry);
  } else {
    id = unused_.back();
    unused_.pop_back();
    entries_[id] = entry;
  }
  ++size_;
  push_front(id);
  if (!entry.is_root()) push_newest(id);
  return id;
}

EntryId AddressMap::root(const Digest& key) {
  const EntryId found = find(0, key);
  if (found != kNoEntry) return found;
  Entry entry;
  entry.key = key;
  ++roots_;
  return insert(entry);
}

void AddressMap::link(EntryId id, EntryId parent) {
  Entry& entry = entries_[id];
  entry.parent = parent;
  entry.next_sibling = entries_[parent].first_child;
  if (entry.next_sibling != kNoEntry) entries_[entry.next_sibling].previous_sibling = id;
  entries_[parent].first_child = id;
}

void AddressMap::remove(EntryId id) {
  Entry& entry = entries_[id];
  const EntryId parent = entry.parent;
  if (entry.previous != kNoEntry) {
    entries_[entry.previous].next = entry.next;
  } else {
    heads_[bucket(entry.key)] = entry.next;
  }
  if (entry.next != kNoEntry) entries_[entry.next].previous = entry.previous;
  if (entry.previous_sibling != kNoEntry) {
    entries_[entry.previous_sibling].next_sibling = entry.next_sibling;
  } else if (parent != kNoEntry) {
    entries_[parent].first_child = entry.next_sibling;
  }
  if (entry.next_sibling != kNoEntry) {
    entries_[entry.next_sibling].previous_sibling = entry.previous_sibling;
  }
  if (entry.is_root()) {
    --roots_;
  } else {
    unlink_from_use(id);
  }
  entry = Entry();
  unused_.push_back(id);
  --size_;
  if (parent != kNoEntry && entries_[parent].is_root() &&
      entries_[parent].first_child == kNoEntry) {
    remove(parent);
  }
}

bool AddressMap::holds(EntryId id, uint64_t sequence) const {
  return id < entries_.size() && !entries_[id].is_root() && entries_[id].sequence == sequence;
}

void AddressMap::unlink_from_use(EntryId id) {
  Entry& entry = entries_[id];
  (entry.older != kNoEntry ? entries_[entry.older].newer : oldest_) = entry.newer;
  (entry.newer != kNoEntry ? entries_[entry.newer].older : newest_) = entry.older;
}

void AddressMap::push_newest(EntryId id) {
  Entry& entry = entries_[id];
  entry.newer = kNoEntry;
  entry.older = newest_;
  (newest_ != kNoEntry ? entries_[newest_].newer : oldest_) = id;
  newest_ = id;
}

void AddressMap::touch(EntryId leaf, int64_t now_ms, std::vector<EntryId>* newly) {
  for (EntryId id = leaf; id != kNoEntry && !entries_[id].is_root(); id = entries_[id].parent) {
    entries_[id].used_ms = now_ms;
    if (!std::exchange(entries_[id].used_is_newer, true)) newly->push_back(id);
    unlink_from_use(id);
    push_newest(id);
  }
}

}  // namespace lmdecode::store
