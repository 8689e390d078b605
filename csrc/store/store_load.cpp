// From slots to tensors. Every byte is checked against the checksums before it is handed out: the
// index holds the header's checksum, the header holds the planes'.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "store/bus_error.h"
#include "store/crc32c.h"
#include "store/plane_copy.h"
#include "store/store_engine.h"

namespace lmdecode::store {

namespace {

// Tuning: bytes read at once, and the size from which a load bypasses the caches.
constexpr uint64_t kReadBytes = uint64_t{1} << 18;
constexpr uint64_t kStreamedBytes = uint64_t{16} << 20;

// Errors that say nothing about the slot: it stays. A slot that cannot be read for good is dropped,
// or it would be in the way of a new one for ever.
bool is_transient(int error) {
  return error == -EMFILE || error == -ENFILE || error == -ENOMEM || error == -EACCES;
}

enum class PartResult { kLoaded, kDamaged, kUnreadable };

// Compares the slot's tokens with the looked-up ones: a hash alone is not trusted.
bool has_tokens(const Hit& hit, const HitPart& part, const SlotHeader& header) {
  const auto begin = hit.tokens().begin() + static_cast<int64_t>(part.num_tokens - part.count);
  return std::equal(begin, begin + part.take, header.tokens.begin());
}

// Copies a tensor's part of a stored plane and returns the checksum of the whole plane. staging:
// memory for the plane if it may change while it is read; else null.
uint32_t take_plane(const SlotLayout& layout, uint32_t plane, const uint8_t* stored,
                    const HitPart& part, uint64_t total, const TensorPlane& target, bool streamed,
                    uint8_t* staging) {
  const PlaneShape of = layout.plane_shape(plane, part.count);
  const PlaneStrides strides = layout.plane_strides(plane, part.count);
  const uint64_t begin = part.num_tokens - static_cast<uint64_t>(of.tokens);
  const uint64_t end = part.num_tokens - part.count + part.take;
  const uint64_t first_wanted = total - target.num_tokens;
  const uint64_t bytes = layout.plane_bytes(plane, part.count);
  if (end <= first_wanted) return crc32c(stored, bytes);
  const uint64_t first = std::max(begin, first_wanted);
  char* out = target.data + static_cast<int64_t>(first - first_wanted) * target.strides.token;
  const auto tokens = static_cast<int64_t>(end - first);
  if (tokens == of.tokens) {
    return copy_plane_crc32c(out, target.strides, reinterpret_cast<const char*>(stored), strides,
                             of.heads, tokens, of.elements, of.element_size, streamed,
                             reinterpret_cast<char*>(staging));
  }
  uint32_t crc;
  if (staging == nullptr) {
    crc = crc32c(stored, bytes);
  } else {
    crc = copy_crc32c(staging, stored, bytes, 0, false);
    stored = staging;
  }
  const char* in =
      reinterpret_cast<const char*>(stored) + static_cast<int64_t>(first - begin) * strides.token;
  copy_plane(out, target.strides, in, strides, of.heads, tokens, of.elements, of.element_size,
             streamed);
  return crc;
}

// Bytes wanted of the planes, numbered from first_plane.
uint64_t wanted_bytes(const SlotLayout& layout, uint32_t first_plane,
                      std::span<const TensorPlane> planes) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < planes.size(); ++i) {
    bytes += planes[i].num_tokens * layout.plane_bytes(first_plane + i, 1);
  }
  return bytes;
}

PartResult load_part(const SlotLayout& layout, SlabFiles& slabs, Hit& hit, size_t index,
                     uint32_t first_layer, std::span<const TensorPlane> planes,
                     StagingBuffer& staging) {
  const HitPart& part = hit.parts()[index];
  const uint64_t begin = part.num_tokens - part.count, end = begin + part.take;
  const uint64_t total = hit.num_tokens();
  const auto is_wanted = [&](const TensorPlane& plane) { return end > total - plane.num_tokens; };
  if (std::none_of(planes.begin(), planes.end(), is_wanted)) return PartResult::kLoaded;

  // Reads as many planes at a time as the L2 cache holds until they are checked and copied. The
  // state after the hit's last token is read on its own.
  const uint32_t first_plane = 2 * first_layer, kv_planes = layout.shape.num_kv_planes();
  const auto num_planes = static_cast<uint32_t>(planes.size());
  const uint32_t last_plane =
      std::min(first_plane + num_planes, end < total ? kv_planes : layout.shape.num_planes());
  const auto offset_of = [&](uint32_t plane) { return layout.plane_offset(plane, part.count); };
  const auto at_once =
      static_cast<uint32_t>(std::max<uint64_t>(1, kReadBytes / (offset_of(1) - offset_of(0))));
  const bool streamed = wanted_bytes(layout, first_plane, planes) >= kStreamedBytes;

  // The header is read once a hit, with the first planes where these are wanted.
  std::optional<std::vector<uint32_t>> crcs = hit.plane_crcs(index);
  const uint64_t lead = crcs.has_value() || first_plane > 0 ? 0 : layout.header_bytes(part.count);
  const auto accept = [&](std::span<const uint8_t> bytes) {
    const auto header = check_header(layout, part, bytes);
    if (!header.has_value() || !has_tokens(hit, part, *header)) return false;
    crcs = header->plane_crcs;
    hit.keep_plane_crcs(index, *crcs);
    return true;
  };
  const auto failed = [](int error) {
    return is_transient(error) ? PartResult::kUnreadable : PartResult::kDamaged;
  };
  if (!crcs.has_value() && lead == 0) {
    const auto bytes = staging.resized(layout.header_bytes(part.count));
    const int error = slabs.read(part.area, 0, bytes.data(), bytes.size());
    if (error != 0) return failed(error);
    if (!accept(bytes)) return PartResult::kDamaged;
  }

  const auto take_planes = [&](uint32_t from, uint32_t to, const uint8_t* stored, uint8_t* own) {
    for (uint32_t plane = from; plane < to; ++plane) {
      [[maybe_unused]] const uint32_t crc =
          take_plane(layout, plane, stored + (offset_of(plane) - offset_of(from)), part, total,
                     planes[plane - first_plane], streamed, own);
#if !defined(LMD_PLANT_NO_VERIFICATION)
      if (crc != (*crcs)[plane]) return false;
#endif
    }
    return true;
  };
  PartResult result = PartResult::kLoaded;
  for (uint32_t from = first_plane, to; from < last_plane && result == PartResult::kLoaded;
       from = to) {
    to = from < kv_planes ? std::min({last_plane, from + at_once, kv_planes}) : from + 1;
    const uint64_t before = from == first_plane ? lead : 0;
    const uint64_t offset = offset_of(from) - before;
    const uint64_t size = before + offset_of(to) - offset_of(from);
    // Cached pages are copied from the page cache.
    if (const uint8_t* cached = slabs.cached(part.area, offset, size); cached != nullptr) {
      uint8_t* own =
          staging.resized(std::max(before, offset_of(from + 1) - offset_of(from))).data();
      bool is_whole = false;
      const auto take = [&] {
        is_whole = true;
        if (before > 0) {
          std::memcpy(own, cached, before);
          is_whole = accept({own, before});
        }
        is_whole = is_whole && take_planes(from, to, cached + before, own);
      };
      if (reads_mapped(cached, size, take)) {
        if (!is_whole) result = PartResult::kDamaged;
        continue;
      }
    }
    const auto bytes = staging.resized(size);
    const int error = slabs.read(part.area, offset, bytes.data(), bytes.size());
    if (error != 0) {
      result = failed(error);
    } else if ((before > 0 && !accept(bytes.first(before))) ||
               !take_planes(from, to, bytes.data() + before, nullptr)) {
      result = PartResult::kDamaged;
    }
  }
  if (streamed) finish_streamed_copies();
  return result;
}

}  // namespace

std::optional<SlotHeader> check_header(const SlotLayout& layout,
                                       [[maybe_unused]] const Chunk& chunk,
                                       std::span<const uint8_t> bytes) {
#if !defined(LMD_PLANT_NO_VERIFICATION)  // a test leaves it out to see that this is noticed
  if (crc32c(bytes.data(), bytes.size()) != chunk.header_crc) return std::nullopt;
#endif
  try {
    SlotHeader header = decode_header(layout, bytes);
#if !defined(LMD_PLANT_NO_VERIFICATION)
    if (header.area != chunk.area || header.key != chunk.key || header.count != chunk.count ||
        header.num_tokens != chunk.num_tokens || header.usable_from != chunk.usable_from) {
      return std::nullopt;
    }
#endif
    return header;
  } catch (const StoreError&) {
    return std::nullopt;
  }
}

std::optional<SlotHeader> read_whole(const SlotLayout& layout, SlabFiles& slabs, const Chunk& chunk,
                                     std::span<uint8_t> image, int* error) {
  *error = slabs.read(chunk.area, 0, image.data(), image.size());
  if (*error != 0) return std::nullopt;
  auto header = check_header(layout, chunk, image.first(layout.header_bytes(chunk.count)));
  if (header.has_value() && !planes_are_whole(layout, *header, image)) return std::nullopt;
  return header;
}

std::optional<std::vector<int32_t>> StoreEngine::read_tokens(const Entry& entry) {
  StagingBuffer staging;
  const auto bytes = staging.resized(layout_.header_bytes(entry.count));
  if (slabs_->read(entry.area, 0, bytes.data(), bytes.size()) != 0) return std::nullopt;
  auto header = check_header(layout_, entry, bytes);
  if (!header.has_value()) return std::nullopt;
  return std::move(header->tokens);
}

bool StoreEngine::load(Hit& hit, uint32_t first_layer, uint32_t num_layers,
                       std::span<const TensorPlane> planes, const GoesOn& goes_on) {
  if (hit.num_tokens() > 0 && hit.engine_.get() != this) {
    throw std::invalid_argument("load: the hit is of another store");
  }
  const uint32_t layers = layout_.shape.num_layers_with_state();
  if (num_layers == 0 || first_layer >= layers || num_layers > layers - first_layer) {
    throw std::invalid_argument("load: layers " + std::to_string(first_layer) + " to " +
                                std::to_string(uint64_t{first_layer} + num_layers) +
                                "; expected a range within 0 to " + std::to_string(layers));
  }
  check_planes(layout_, planes, first_layer, num_layers, hit.num_tokens(), true);
  Lock lock(mutex_);
  check_usable();
  const Activity activity(*this, lock);
  lock.unlock();
  std::atomic<bool> unreadable{false};
  std::atomic<int64_t> damaged{-1};
  const auto load_one = [&](size_t part) {
    thread_local StagingBuffer staging;
    if (damaged.load() >= 0 || unreadable.load()) return;
    const PartResult result = load_part(layout_, *slabs_, hit, part, first_layer, planes, staging);
    if (result == PartResult::kDamaged) damaged = static_cast<int64_t>(part);
    if (result == PartResult::kUnreadable) unreadable = true;
  };
  bool is_stopped = false;
  parallel_items(hit.parts_.size(), options_.io_threads, load_one,
                 [&] { return !(is_stopped = goes_on && !goes_on()); });
  slabs_->leave_cached();
  lock.lock();
  if (damaged.load() >= 0) {
    drop_damaged(hit.parts_[static_cast<size_t>(damaged.load())]);
    return false;
  }
  if (unreadable.load() || is_stopped) return false;
  stats_.bytes_read += wanted_bytes(layout_, 2 * first_layer, planes);
  return true;
}

void StoreEngine::drop_damaged(const HitPart& part) {
  if (closed_) return;
  // The writer may have given the slot to another prefix without telling readers: not damage.
  if (options_.readonly) refresh();
  if (!prefixes_.holds(part.id, part.sequence)) return;
  ++stats_.damaged;
  space_.drop_subtree(part.id);
}

// --- lookup

Hit::~Hit() {
  if (engine_ != nullptr && !parts_.empty()) engine_->release(parts_.back());
}

Hit::Hit(Hit&& other) noexcept { *this = std::move(other); }

Hit& Hit::operator=(Hit&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(tokens_, other.tokens_);
  std::swap(parts_, other.parts_);
  std::swap(checked_, other.checked_);
  return *this;
}

std::optional<std::vector<uint32_t>> Hit::plane_crcs(size_t part) const {
  const std::lock_guard lock(checked_->mutex);
  return checked_->plane_crcs[part];
}

void Hit::keep_plane_crcs(size_t part, const std::vector<uint32_t>& crcs) {
  const std::lock_guard lock(checked_->mutex);
  checked_->plane_crcs[part] = crcs;
}

Hit StoreEngine::lookup(const Scope& scope, std::span<const int32_t> tokens) {
  PrefixKeys keys = keys_of(root(scope), tokens);
  Lock lock(mutex_);
  check_usable();
  refresh();
  const PrefixChain chain = prefixes_.longest(keys);
  ++(chain.parts.empty() ? stats_.misses : stats_.hits);
  if (!chain.parts.empty()) touch(chain.parts.back().first);
  return hit_of(chain, tokens);
}

Hit StoreEngine::peek(const Scope& scope, std::span<const int32_t> tokens) {
  PrefixKeys keys = keys_of(root(scope), tokens);
  const Lock lock(mutex_);
  check_usable();
  refresh();
  return hit_of(prefixes_.longest(keys), tokens);
}

Hit StoreEngine::hit_of(const PrefixChain& chain, std::span<const int32_t> tokens) {
  Hit hit;
  if (chain.parts.empty()) return hit;
  ++prefixes_[chain.parts.back().first].leases;
  hit.engine_ = shared_from_this();
  hit.tokens_.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(chain.num_tokens));
  for (const auto& [id, take] : chain.parts) {
    hit.parts_.push_back({prefixes_[id], id, take});
  }
  hit.checked_ = std::make_unique<Hit::Checked>();
  hit.checked_->plane_crcs.resize(hit.parts_.size());
  return hit;
}

void StoreEngine::release(const HitPart& part) {
  const Lock lock(mutex_);
  if (!prefixes_.holds(part.id, part.sequence)) return;
  Entry& entry = prefixes_[part.id];
  if (entry.leases > 0) --entry.leases;
}

void StoreEngine::pin(const Hit& hit, bool pinned) {
  Lock lock(mutex_);
  require_writer();
  for (const HitPart& part : hit.parts()) {
    if (!prefixes_.holds(part.id, part.sequence)) continue;
    Entry& entry = prefixes_[part.id];
    if (entry.pinned == pinned) continue;
    entry.pinned = pinned;
    commits_.add(prefixes_.row_of(entry));
  }
  if (commits_.has_changes()) commits_.commit(lock, commits_.open_number(), survives());
}

}  // namespace lmdecode::store
