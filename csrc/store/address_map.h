// The address map in memory: hash -> list of entries, with the parent links and the order of use
// that eviction needs.
#pragma once

#include <cstdint>
#include <vector>

#include "store/sha256.h"

namespace lmdecode::store {

using EntryId = uint32_t;
constexpr EntryId kNoEntry = UINT32_MAX;
constexpr uint32_t kNoArea = UINT32_MAX;

// The fields of a stored chunk that memory and the durable index share.
struct Chunk {
  Digest key{};             // hash of all tokens of the prefix
  uint64_t num_tokens = 0;  // computed tokens, all of the prefix
  uint32_t area = kNoArea;  // physical address: the slot
  uint32_t count = 0;       // tokens in the slot
  uint32_t header_crc = 0;  // of the slot's header, which holds the planes' checksums
  uint32_t usable_from = 0;
  uint64_t tenant = 0;
  uint64_t sequence = 0;  // of the change that made it
  int64_t created_ms = 0;
  int64_t used_ms = 0;
  int64_t expires_ms = 0;  // 0: never
  bool pinned = false;
};

// A chunk in memory. A root (num_tokens 0, no area) is the parent of first chunks.
struct Entry : Chunk {
  uint64_t batch = 0;          // of commits; durable once that batch is
  uint32_t leases = 0;         // hits that are held
  bool used_is_newer = false;  // than the index knows

  EntryId previous = kNoEntry, next = kNoEntry;  // in the list of its hash
  EntryId parent = kNoEntry, first_child = kNoEntry;
  EntryId previous_sibling = kNoEntry, next_sibling = kNoEntry;
  EntryId older = kNoEntry, newer = kNoEntry;  // by use

  bool is_root() const { return num_tokens == 0; }
};

class AddressMap {
 public:
  AddressMap();

  // The entry with this count and this hash; kNoEntry: none.
  EntryId find(uint64_t num_tokens, const Digest& key) const;
  // Not linked to a parent yet; the most recently used.
  EntryId insert(const Entry& entry);
  // Returns the root with this key; adds it if missing.
  EntryId root(const Digest& key);
  void link(EntryId id, EntryId parent);
  // It has no children; a root goes with its last child.
  void remove(EntryId id);

  // The chain from an entry to its root becomes the most recently used, parents after children: the
  // least recently used entry is therefore a leaf. Those whose used_is_newer becomes true are added
  // to *newly.
  void touch(EntryId leaf, int64_t now_ms, std::vector<EntryId>* newly);
  EntryId oldest() const { return oldest_; }

  Entry& operator[](EntryId id) { return entries_[id]; }
  const Entry& operator[](EntryId id) const { return entries_[id]; }
  // The entry is the one that had this sequence, not another one in its place.
  bool holds(EntryId id, uint64_t sequence) const;
  size_t size() const { return size_ - roots_; }
  void reserve(size_t entries);
  void clear();

 private:
  size_t bucket(const Digest& key) const;
  void grow();
  void push_front(EntryId id);
  void unlink_from_use(EntryId id);
  void push_newest(EntryId id);

  std::vector<Entry> entries_;
  std::vector<EntryId> unused_;
  std::vector<EntryId> heads_;  // hash address -> first entry of its list
  size_t size_ = 0;
  size_t roots_ = 0;
  EntryId oldest_ = kNoEntry, newest_ = kNoEntry;
};

}  // namespace lmdecode::store
