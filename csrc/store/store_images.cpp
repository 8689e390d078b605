// Whole entries, header and planes as one image: what files of other stores and a second tier hold.
#include <algorithm>

#include "store/crc32c.h"
#include "store/store_engine.h"

namespace lmdecode::store {

SlotHeader check_image(const SlotLayout& layout, std::span<const uint8_t> image) {
  SlotHeader header = decode_header(layout, image);
  if (image.size() != layout.image_bytes(header.count, header.usable_from) ||
      !planes_are_whole(layout, header, image) ||
      chain_key(header.parent, header.num_tokens, header.tokens) != header.key ||
      std::any_of(header.tokens.begin(), header.tokens.end(), [](int32_t id) { return id < 0; })) {
    throw StoreError(ErrorKind::kDamaged, "import: an entry is damaged");
  }
  return header;
}

// Writes a checked image to a slot of its own. True: it is new. False: it is known, what it
// continues is not, or there is no room. Throws StoreError where the slot cannot be written.
bool StoreEngine::place_image(Lock& lock, SlotHeader& header, std::span<uint8_t> image,
                              const PutOptions& options) {
  const Step step{header.num_tokens - header.count, header.count, header.usable_from, header.key,
                  header.parent};
  const EntryId known = prefixes_.find(header.num_tokens, header.key);
  if (known != kNoEntry && prefixes_[known].usable_from <= header.usable_from) return false;
  const EntryId parent = prefixes_.find(step.begin, step.parent);
  if (step.begin > 0 && parent == kNoEntry) return false;
  const uint64_t parent_sequence = step.begin > 0 ? prefixes_[parent].sequence : 0;
  if (step.begin > 0) ++prefixes_[parent].leases;
  const auto areas = space_.allocate(lock, 1, header.tenant, options.quota_bytes);
  if (step.begin > 0 && prefixes_.holds(parent, parent_sequence)) --prefixes_[parent].leases;
  if (areas.empty()) return false;
  header.area = areas[0];
  const auto header_bytes = image.first(layout_.header_bytes(header.count));
  encode_header(layout_, header, header_bytes);
  const uint32_t crc = crc32c(header_bytes.data(), header_bytes.size());
  const int error = slabs_->write(areas[0], image.data(), image.size());
  // The tokens of the prefix before are not here: only the entry's own are looked at.
  std::vector<int32_t> tokens(step.begin, 0);
  tokens.insert(tokens.end(), header.tokens.begin(), header.tokens.end());
  if (error != 0 || !publish(step, areas[0], crc, header.tenant, options, tokens)) {
    is_full(error) ? space_.refuse(areas[0]) : space_.free_areas().give_back(areas[0]);
    if (error != 0) throw_errno(-error, "import: cannot write to", options_.directory);
    return false;
  }
  return true;
}

std::vector<AreaRow> StoreEngine::entries_of(const Hit& hit) {
  const Lock lock(mutex_);
  check_usable();
  std::vector<AreaRow> rows;
  for (const HitPart& part : hit.parts_) {
    if (!prefixes_.holds(part.id, part.sequence)) break;
    rows.push_back(prefixes_.row_of(prefixes_[part.id]));
  }
  return rows;
}

bool StoreEngine::read_image(const Hit& hit, size_t index, std::span<uint8_t> image) {
  if (hit.engine_.get() != this || index >= hit.parts_.size()) {
    throw std::invalid_argument("read_image: not an entry of a hit of this store");
  }
  const HitPart& part = hit.parts_[index];
  const uint64_t size = layout_.image_bytes(part.count, part.usable_from);
  if (image.size() != size) {
    throw std::invalid_argument("read_image: " + std::to_string(image.size()) +
                                " bytes; expected " + std::to_string(size));
  }
  Lock lock(mutex_);
  check_usable();
  const Activity activity(*this, lock);
  lock.unlock();
  int error = 0;
  auto header = read_whole(layout_, *slabs_, part, image, &error);
  if (!header.has_value()) {
    lock.lock();
    if (error == 0) drop_damaged(part);
    return false;
  }
  header->area = 0;  // a place means nothing elsewhere
  encode_header(layout_, *header, image.first(layout_.header_bytes(part.count)));
  return true;
}

bool StoreEngine::insert_image(const Scope& scope, const Digest& key, std::span<uint8_t> image,
                               const PutOptions& options) {
  try {
    SlotHeader header = check_image(layout_, image);
    if (header.key != key) return false;
    header.tenant = tenant_id(scope.salt);  // the key says so, the header might lie
    Lock lock(mutex_);
    require_writer();
    const Activity activity(*this, lock);
    if (!commits_.failure().empty()) return false;
    return place_image(lock, header, image, options) ||
           prefixes_.find(header.num_tokens, key) != kNoEntry;
  } catch (const StoreError& error) {
    if (error.kind() == ErrorKind::kUnusable) throw;
    return false;
  }
}

}  // namespace lmdecode::store
