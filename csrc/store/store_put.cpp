// From tensors to slots: write, publish, commit.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "store/crc32c.h"
#include "store/plane_copy.h"
#include "store/store_engine.h"

namespace lmdecode::store {

namespace {

// On a full disk: new slots, slots of evicted entries, space of evicted entries by the disk's
// count, then by the store's.
constexpr int kAttempts = 4;
constexpr int kPoolAttempt = 2;

// A layer that has the tokens from `first` on serves prefixes of first + window - 1 tokens or more:
// the largest over all layers is the chunk's usable_from.
uint32_t usable_from(const ModelShape& shape, std::span<const TensorPlane> planes,
                     uint64_t num_tokens, uint64_t begin, uint32_t count) {
  uint64_t least = 0;
  for (size_t i = 0; i < planes.size(); ++i) {
    const uint64_t first = num_tokens - planes[i].num_tokens;
    const uint64_t window = shape.window_of(static_cast<uint32_t>(i / 2));
    if (first <= begin || window <= 1) continue;  // a window of 1 needs no other token
    least = std::max(least, std::min<uint64_t>(count, first - begin) + window - 1);
  }
  return static_cast<uint32_t>(std::min<uint64_t>(least, UINT32_MAX));
}

// Fills the slot. 0 or -errno.
int write_step(const SlotLayout& layout, SlabFiles& slabs, const Step& step, uint32_t area,
               uint64_t tenant, std::span<const int32_t> tokens,
               std::span<const TensorPlane> planes, StagingBuffer& staging, uint32_t* header_crc) {
  const auto image = staging.resized(layout.image_bytes(step.count, step.usable_from));
  SlotHeader header;
  header.area = area;
  header.num_tokens = step.begin + step.count;
  header.count = step.count;
  header.usable_from = step.usable_from;
  header.tenant = tenant;
  header.key = step.key;
  header.parent = step.parent;
  const auto chunk = tokens.subspan(step.begin, step.count);
  header.tokens.assign(chunk.begin(), chunk.end());
  const uint64_t end = step.begin + step.count;
  header.plane_crcs.resize(planes.size());
  for (uint32_t i = 0; i < layout.planes_in_slot(step.count, step.usable_from); ++i) {
    const TensorPlane& source = planes[i];
    const PlaneShape of = layout.plane_shape(i, step.count);
    const uint64_t plane_bytes = layout.plane_bytes(i, step.count);
    const uint64_t offset = layout.plane_offset(i, step.count);
    uint8_t* plane = image.data() + offset;
    const uint64_t begin = end - static_cast<uint64_t>(of.tokens);
    const uint64_t first_held = tokens.size() - source.num_tokens;
    const uint64_t first = std::clamp(first_held, begin, end);
    if (first > begin) std::memset(plane, 0, plane_bytes);
    const PlaneStrides strides = layout.plane_strides(i, step.count);
    copy_plane(reinterpret_cast<char*>(plane) + static_cast<int64_t>(first - begin) * strides.token,
               strides,
               source.data + (static_cast<int64_t>(first) - static_cast<int64_t>(first_held)) *
                                 source.strides.token,
               source.strides, of.heads, static_cast<int64_t>(end - first), of.elements,
               of.element_size);
    header.plane_crcs[i] = crc32c(plane, plane_bytes);
    const uint64_t next = layout.plane_offset(i + 1, step.count);
    std::memset(plane + plane_bytes, 0, next - offset - plane_bytes);
  }
  const auto header_bytes = image.first(layout.header_bytes(step.count));
  encode_header(layout, header, header_bytes);
  *header_crc = crc32c(header_bytes.data(), header_bytes.size());
  return slabs.write(area, image.data(), image.size());
}

}  // namespace

void check_token_ids(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    if (token < 0) {
      throw std::invalid_argument("KVStore: token id " + std::to_string(token) +
                                  "; expected 0 or more");
    }
  }
}

void check_planes(const SlotLayout& layout, std::span<const TensorPlane> planes,
                  uint32_t first_layer, uint32_t num_layers, uint64_t num_tokens, bool exactly) {
  const ModelShape& shape = layout.shape;
  const bool has_state = first_layer + num_layers > shape.num_layers;
  if (planes.size() != 2 * size_t{num_layers} - (has_state ? 1 : 0)) {
    throw std::invalid_argument("KVStore: " + std::to_string(planes.size()) +
                                " planes; expected keys and values of " +
                                std::to_string(num_layers - (has_state ? 1 : 0)) + " layers" +
                                (has_state ? " and a state" : ""));
  }
  for (size_t i = 0; i < planes.size(); ++i) {
    const auto layer = static_cast<uint32_t>(first_layer + i / 2);
    const bool is_state = layer == shape.num_layers;
    const uint64_t window = shape.window_of(layer);
    const uint64_t least = window == 0 ? num_tokens : std::min(num_tokens, window - 1);
    const uint64_t most = exactly || is_state ? least : num_tokens;
    if (planes[i].num_tokens < least || planes[i].num_tokens > most) {
      throw std::invalid_argument("KVStore: layer " + std::to_string(layer) + " has " +
                                  std::to_string(planes[i].num_tokens) +
                                  (is_state     ? " states"
                                   : i % 2 == 0 ? " keys"
                                                : " values") +
                                  "; expected " +
                                  (least == most ? "" : std::to_string(least) + " to ") +
                                  std::to_string(most));
    }
  }
}

// Storing a prefix again extends its lifetime and its ancestors'.
void StoreEngine::renew(EntryId id, const PutOptions& options) {
  const int64_t expires_ms = options.ttl_ms == 0 ? 0 : now() + options.ttl_ms;
  for (; id != kNoEntry && !prefixes_[id].is_root(); id = prefixes_[id].parent) {
    Entry& entry = prefixes_[id];
    const bool lives_longer =
        entry.expires_ms != 0 && (expires_ms == 0 || expires_ms > entry.expires_ms);
    const bool is_pinned = options.pin && !entry.pinned;
    if (!lives_longer && !is_pinned) return;
    if (lives_longer) prefixes_.set_expiry(id, expires_ms);
    entry.pinned = entry.pinned || options.pin;
    commits_.add(prefixes_.row_of(entry));
    entry.batch = commits_.open_number();
  }
}

// The chunks to store, parents first. *anchor: the deepest stored entry, or none.
std::vector<Step> StoreEngine::plan(PrefixKeys& keys, std::span<const TensorPlane> planes,
                                    const PutOptions& options, EntryId* anchor) {
  std::vector<Step> steps;
  *anchor = kNoEntry;
  const uint64_t total = keys.tokens().size();
  for (size_t chunk = 0; chunk < keys.size(); ++chunk) {
    const uint64_t begin = uint64_t{layout_.chunk_tokens} * chunk;
    const auto count = static_cast<uint32_t>(keys.chunk(chunk).size());
    const Step step{begin, count, usable_from(layout_.shape, planes, total, begin, count),
                    keys[chunk], keys.before(chunk)};
    EntryId id = prefixes_.find(begin + count, step.key);
    if (id == kNoEntry && count < layout_.chunk_tokens) {
      // A stored entry that continues this one.
      const EntryId parent = prefixes_.find(begin, step.parent);
      if (parent != kNoEntry) id = prefixes_.child_with(parent, keys, chunk);
    }
    if (id != kNoEntry && prefixes_[id].usable_from <= step.usable_from) {
      *anchor = id;
    } else {
      steps.push_back(step);
    }
  }
  if (*anchor != kNoEntry) {
    renew(*anchor, options);
    touch(*anchor);
  }
  return steps;
}

// Drops shorter tails that the new entry covers.
void StoreEngine::drop_superseded(EntryId id, EntryId parent, std::span<const int32_t> tokens) {
  const Entry& entry = prefixes_[id];
  const auto chunk = tokens.subspan(entry.num_tokens - entry.count, entry.count);
  std::unordered_map<uint32_t, Digest> keys;
  for (EntryId sibling = prefixes_[parent].first_child; sibling != kNoEntry;) {
    const Entry& other = prefixes_[sibling];
    const EntryId next = other.next_sibling;
    if (sibling != id && other.count < entry.count && other.leases == 0 && !other.pinned &&
        other.usable_from >= entry.usable_from) {
      auto [found, is_new] = keys.try_emplace(other.count);
      if (is_new) {
        const Entry& before = prefixes_[parent];
        found->second =
            chain_key(before.key, before.num_tokens + other.count, chunk.first(other.count));
      }
      if (found->second == other.key) space_.free_entry(sibling);
    }
    sibling = next;
  }
}

// Puts a written slot into the map and the open batch. False: the area was not needed, or the
// parent is gone.
bool StoreEngine::publish(const Step& step, uint32_t area, uint32_t header_crc, uint64_t tenant,
                          const PutOptions& options, std::span<const int32_t> tokens) {
  const EntryId parent =
      step.begin == 0 ? prefixes_.root(step.parent) : prefixes_.find(step.begin, step.parent);
  if (parent == kNoEntry) return false;
  const int64_t time = now();
  EntryId id = prefixes_.find(step.begin + step.count, step.key);
  if (id != kNoEntry) {
    Entry& entry = prefixes_[id];
    if (entry.usable_from <= step.usable_from) return false;  // another thread was faster
    // The same prefix with more of its windows: its children stay.
    commits_.add_free(entry.area, time);
    commits_.free(entry.area);
    prefixes_.move(id, area, header_crc, step.usable_from, commits_.next_sequence());
    entry.leases = 0;  // hits of the old slot do not know this one
    entry.batch = commits_.open_number();
  } else {
    Entry entry;
    entry.key = step.key;
    entry.num_tokens = step.begin + step.count;
    entry.area = area;
    entry.count = step.count;
    entry.header_crc = header_crc;
    entry.usable_from = step.usable_from;
    entry.tenant = tenant;
    entry.sequence = commits_.next_sequence();
    entry.batch = commits_.open_number();
    entry.created_ms = entry.used_ms = time;
    entry.expires_ms = options.ttl_ms == 0 ? 0 : time + options.ttl_ms;
    entry.pinned = options.pin;
    id = prefixes_.add(entry, parent);
  }
  commits_.add(prefixes_.row_of(prefixes_[id]));
  renew(prefixes_[id].parent, options);
  drop_superseded(id, parent, tokens);
  touch(id);
  ++stats_.puts;
  stats_.bytes_written += layout_.image_bytes(step.count, step.usable_from);
  return true;
}

bool StoreEngine::put_locked(Lock& lock, PrefixKeys& keys, uint64_t tenant,
                             std::span<const TensorPlane> planes, const PutOptions& options) {
  const std::span<const int32_t> tokens = keys.tokens();
  for (int attempt = 0; attempt < kAttempts && commits_.failure().empty(); ++attempt) {
    EntryId anchor;
    const std::vector<Step> steps = plan(keys, planes, options, &anchor);
    if (steps.empty()) return true;
    uint64_t bytes = 0;
    for (const Step& step : steps) bytes += space_.space_of(step.count, step.usable_from);
    if (attempt == 0) space_.look_for_space(bytes);
    if (attempt == 0 && space_.disk_is_full()) ++attempt;
    const uint64_t anchor_sequence = anchor == kNoEntry ? 0 : prefixes_[anchor].sequence;
    if (anchor != kNoEntry) ++prefixes_[anchor].leases;
    if (attempt >= kPoolAttempt) {
      space_.pool_space(lock, bytes, attempt == kPoolAttempt);
      space_.free_areas().use_all();
    }
    const auto areas = space_.allocate(lock, steps.size(), tenant, options.quota_bytes);
    if (space_.disk_is_full()) space_.free_areas().keep_to_used();
    std::vector<int> results(areas.size(), -EINTR);
    std::vector<uint32_t> crcs(areas.size(), 0);
    lock.unlock();
    const auto write = [&](size_t i) {
      thread_local StagingBuffer staging;
      results[i] = write_step(layout_, *slabs_, steps[i], areas[i], tenant, tokens, planes, staging,
                              &crcs[i]);
    };
    parallel_items(areas.size(), options_.io_threads, write, options.goes_on);
    lock.lock();
    if (anchor != kNoEntry && prefixes_.holds(anchor, anchor_sequence)) {
      --prefixes_[anchor].leases;
    }
    bool is_open = true, lacks_space = false;
    for (size_t i = 0; i < areas.size(); ++i) {
      is_open = is_open && results[i] == 0;
      if (is_full(results[i])) {
        lacks_space = true;
        space_.refuse(areas[i]);
      } else if (!is_open || !publish(steps[i], areas[i], crcs[i], tenant, options, tokens)) {
        space_.free_areas().give_back(areas[i]);
      }
    }
    const bool finds_more =
        space_.disk_is_full() && attempt < kPoolAttempt && areas.size() < steps.size();
    if (!lacks_space && !finds_more) {
      space_.keep_reserve();
      return !space_.disk_is_full() || areas.size() == steps.size();
    }
    space_.note_full_disk();
  }
  return false;
}

// Commits the stored part of the tokens, and returns its length.
uint64_t StoreEngine::acknowledge(Lock& lock, PrefixKeys& keys, bool had_space) {
  const auto last_batch = [&](const PrefixChain& chain) {
    uint64_t batch = 0;
    for (const auto& [id, take] : chain.parts) batch = std::max(batch, prefixes_[id].batch);
    return batch;
  };
  PrefixChain chain = prefixes_.longest(keys);
  commits_.commit(lock, last_batch(chain), survives());
  chain = prefixes_.longest(keys);
  uint64_t stored = 0;
  for (const auto& [id, take] : chain.parts) {
    if (!commits_.survives(prefixes_[id].batch, survives())) break;
    stored += take;
  }
  const bool is_all = stored == keys.tokens().size();
  if (!is_all) ++stats_.declined;
  space_.note_stored(is_all, !had_space);
  return stored;
}

uint64_t StoreEngine::put(const Scope& scope, std::span<const int32_t> tokens,
                          std::span<const TensorPlane> planes, const PutOptions& options) {
  check_token_ids(tokens);
  check_planes(layout_, planes, 0, layout_.shape.num_layers_with_state(), tokens.size(), false);
  PrefixKeys keys = keys_of(root(scope), tokens);
  keys.whole();  // hashed before others have to wait
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  const bool had_space = put_locked(lock, keys, tenant_id(scope.salt), planes, options);
  return acknowledge(lock, keys, had_space);
}

}  // namespace lmdecode::store
