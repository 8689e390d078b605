// The index of prefixes in memory. For each chunk of a prefix it has the area, the continuations,
// the time of the last use and the expiry; from these it finds the longest stored prefix of given
// tokens. It reads files only through the function it is given. It is not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/address_map.h"
#include "store/index_database.h"
#include "store/slot_layout.h"
#include "store/token_chain.h"

namespace lmdecode::store {

// Location of a prefix: entries, parents first, and the number of tokens of each in the prefix.
struct PrefixChain {
  std::vector<std::pair<EntryId, uint32_t>> parts;
  uint64_t num_tokens = 0;
};

class PrefixIndex {
 public:
  // The tokens of an entry's slot; nothing if unreadable or damaged.
  using ReadTokens = std::function<std::optional<std::vector<int32_t>>(const Entry& entry)>;
  using Drop = std::function<void(EntryId id)>;

  PrefixIndex(const SlotLayout& layout, std::function<int64_t()> now_ms, ReadTokens read_tokens)
      : layout_(layout), now_ms_(std::move(now_ms)), read_tokens_(std::move(read_tokens)) {}

  // --- entries

  Entry& operator[](EntryId id) { return map_[id]; }
  const Entry& operator[](EntryId id) const { return map_[id]; }
  EntryId find(uint64_t num_tokens, const Digest& key) const { return map_.find(num_tokens, key); }
  EntryId root(const Digest& key) { return map_.root(key); }  // added if missing
  EntryId at(uint32_t area) const { return area < by_area_.size() ? by_area_[area] : kNoEntry; }
  EntryId oldest() const { return map_.oldest(); }
  bool holds(EntryId id, uint64_t sequence) const { return map_.holds(id, sequence); }
  uint64_t size() const { return map_.size(); }
  uint32_t areas_end() const;  // one after the last area that an entry lies in
  uint64_t areas_of(uint64_t tenant) const;

  EntryId add(const Entry& entry, EntryId parent);
  void remove(EntryId id);  // nothing continues it
  // Moves a prefix to another slot; its continuations are kept.
  void move(EntryId id, uint32_t area, uint32_t header_crc, uint32_t usable_from,
            uint64_t sequence);
  void set_expiry(EntryId id, int64_t expires_ms);
  // Expiring entries, the soonest first.
  const std::set<std::pair<int64_t, EntryId>>& expiry() const { return expiry_; }

  // --- rows of the durable index

  AreaRow row_of(const Entry& entry) const;
  std::vector<AreaRow> rows() const;  // parents before their continuations
  void reserve(size_t entries, uint32_t areas);
  // Inserts rows, the least recently used first; drops rows without their parent.
  void add_rows(std::span<const AreaRow> rows, const Drop& drop);
  // Applies the changes of another process.
  void follow(std::vector<AreaRow> rows, const Drop& drop);

  // --- use

  // The chain from an entry to its root becomes the most recently used.
  void touch(EntryId leaf) { map_.touch(leaf, now_ms_(), &touched_); }
  // Up to `most` times of last use that the durable index lacks.
  std::vector<UseTime> take_uses(size_t most);
  bool has_uses() const { return !touched_.empty(); }
  void forget_uses() { touched_.clear(); }

  // --- finding

  bool is_alive(const Entry& entry) const;
  PrefixChain longest(PrefixKeys& keys);
  // The child that has all the tokens of a chunk, and maybe more; kNoEntry if there is none.
  EntryId child_with(EntryId parent, PrefixKeys& keys, size_t chunk);

 private:
  using IsUsable = std::function<bool(EntryId, uint32_t num_tokens)>;
  EntryId longest_child(EntryId parent, PrefixKeys& keys, size_t chunk, uint32_t* matched,
                        const IsUsable& is_usable);
  const std::vector<int32_t>* tokens_of(EntryId id);
  bool covers_windows(const PrefixChain& chain) const;
  EntryId insert(const Entry& entry);

  const SlotLayout& layout_;
  const std::function<int64_t()> now_ms_;
  const ReadTokens read_tokens_;
  AddressMap map_;
  std::vector<EntryId> by_area_;
  std::unordered_map<uint64_t, uint64_t> tenant_areas_;
  std::unordered_map<EntryId, std::vector<int32_t>> token_cache_;
  uint64_t cached_tokens_ = 0;
  std::set<std::pair<int64_t, EntryId>> expiry_;
  std::vector<EntryId> touched_;
};

}  // namespace lmdecode::store
