#include "store/slot_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "store/bytes.h"
#include "store/crc32c.h"

namespace lmdecode::store {

namespace {

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kPlaneAlignment = 64;
constexpr uint64_t kMinSlotBytes = uint64_t{1} << 20;
constexpr uint64_t kMaxSlotBytes = uint64_t{1} << 31;
constexpr uint32_t kMinChunkTokens = 16;
constexpr char kMagic[8] = {'L', 'M', 'D', 'K', 'V', 'S', 'L', 'T'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kFixedBytes = 120;
constexpr uint32_t kStateWindow = 2;

uint64_t rounded_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

void expect(bool condition, const char* what) {
  if (!condition) throw StoreError(ErrorKind::kDamaged, std::string("slot header: ") + what);
}

}  // namespace

uint32_t ModelShape::window_of(uint32_t layer) const {
  if (layer == num_layers) return kStateWindow;
  return windows.empty() ? 0 : windows[layer];
}

uint32_t ModelShape::widest_window() const {
  const uint32_t widest = windows.empty() ? 0 : *std::max_element(windows.begin(), windows.end());
  return state_bytes > 0 ? std::max(widest, kStateWindow) : widest;
}

uint64_t SlotLayout::header_bytes(uint32_t count) const {
  return rounded_up(kFixedBytes + 4 * uint64_t{shape.num_planes()} + 4 * uint64_t{count}, kBlock);
}

PlaneShape SlotLayout::plane_shape(uint32_t plane, uint32_t count) const {
  if (plane == shape.num_kv_planes()) {
    return {1, 1, static_cast<int64_t>(shape.state_bytes), 1};
  }
  return {shape.num_kv_heads, count, shape.head_size, shape.element_size};
}

uint64_t SlotLayout::plane_bytes(uint32_t plane, uint32_t count) const {
  if (plane == shape.num_kv_planes()) return shape.state_bytes;
  return uint64_t{shape.num_kv_heads} * count * shape.head_size * shape.element_size;
}

uint64_t SlotLayout::plane_offset(uint32_t plane, uint32_t count) const {
  const uint32_t kv_planes = std::min(plane, shape.num_kv_planes());
  const uint64_t state = plane > kv_planes ? rounded_up(shape.state_bytes, kPlaneAlignment) : 0;
  return header_bytes(count) + kv_planes * rounded_up(plane_bytes(0, count), kPlaneAlignment) +
         state;
}

uint64_t SlotLayout::slot_bytes() const { return rounded_up(image_bytes(chunk_tokens), kBlock); }

PlaneStrides SlotLayout::plane_strides(uint32_t plane, uint32_t count) const {
  const PlaneShape of = plane_shape(plane, count);
  const int64_t element = of.element_size, row = element * of.elements;
  const int64_t head = row * of.tokens;
  if (plane % 2 == 1 && values_by_column) return {head, element, element * of.tokens};
  return {head, row, element};
}

uint32_t default_chunk_tokens(const ModelShape& shape) {
  const uint64_t token =
      uint64_t{shape.num_kv_planes()} * shape.num_kv_heads * shape.head_size * shape.element_size;
  const uint64_t bytes = std::max(kMinSlotBytes, shape.state_bytes);
  const uint64_t tokens = (bytes + token - 1) / std::max<uint64_t>(token, 1);
  return std::max<uint32_t>(kMinChunkTokens, static_cast<uint32_t>(std::bit_ceil(tokens)));
}

void check_layout(const SlotLayout& layout) {
  const ModelShape& shape = layout.shape;
  const auto expect_positive = [](uint64_t value, uint64_t limit, const char* name) {
    if (value == 0 || value > limit) {
      throw std::invalid_argument("KVStore: " + std::string(name) + " is " + std::to_string(value) +
                                  "; expected 1 to " + std::to_string(limit));
    }
  };
  expect_positive(shape.num_layers, 1 << 16, "num_layers");
  expect_positive(shape.num_kv_heads, 1 << 16, "num_kv_heads");
  expect_positive(shape.head_size, 1 << 16, "head_size");
  expect_positive(shape.element_size, 8, "the size of an element");
  expect_positive(layout.chunk_tokens, 1 << 20, "chunk_tokens");
  if (!shape.windows.empty() && shape.windows.size() != shape.num_layers) {
    throw std::invalid_argument("KVStore: window has " + std::to_string(shape.windows.size()) +
                                " numbers; expected one for each of " +
                                std::to_string(shape.num_layers) + " layers");
  }
  // At most 2^16 * 2^20 * 2^16 * 8 bytes: no overflow.
  const uint64_t plane = layout.plane_bytes(0, layout.chunk_tokens);
  if (plane > kMaxSlotBytes || shape.state_bytes > kMaxSlotBytes ||
      layout.slot_bytes() > kMaxSlotBytes) {
    throw std::invalid_argument(
        "KVStore: a slot of chunk_tokens = " + std::to_string(layout.chunk_tokens) +
        " tokens would have more than 2^31 bytes");
  }
}

void encode_header(const SlotLayout& layout, const SlotHeader& header, std::span<uint8_t> out) {
  ByteWriter fields;
  fields.raw(kMagic, sizeof(kMagic)).u32(kVersion);
  fields.u32(static_cast<uint32_t>(layout.header_bytes(header.count)));
  fields.u64(header.area).u64(header.num_tokens).u32(header.count).u32(header.usable_from);
  fields.u32(layout.shape.num_planes()).u32(layout.values_by_column ? 1 : 0);
  fields.u64(header.tenant).digest(header.key).digest(header.parent);
  for (const uint32_t crc : header.plane_crcs) fields.u32(crc);
  fields.raw(header.tokens.data(), header.tokens.size() * sizeof(int32_t));
  std::memcpy(out.data(), fields.bytes().data(), fields.bytes().size());
  std::fill(out.begin() + static_cast<int64_t>(fields.bytes().size()), out.end(), uint8_t{0});
}

SlotHeader decode_header(const SlotLayout& layout, std::span<const uint8_t> bytes) {
  ByteReader fields(bytes, "slot header");
  const auto magic = fields.raw(sizeof(kMagic));
  expect(std::memcmp(magic.data(), kMagic, sizeof(kMagic)) == 0, "not one");
  expect(fields.u32() == kVersion, "of another format version");
  const uint32_t header_bytes = fields.u32();
  SlotHeader header;
  header.area = fields.u64();
  header.num_tokens = fields.u64();
  header.count = fields.u32();
  header.usable_from = fields.u32();
  expect(fields.u32() == layout.shape.num_planes(), "of another number of planes");
  expect(fields.u32() == (layout.values_by_column ? 1u : 0u), "of another value layout");
  expect(header.count >= 1 && header.count <= layout.chunk_tokens, "count out of range");
  expect(header.num_tokens >= header.count &&
             (header.num_tokens - header.count) % layout.chunk_tokens == 0,
         "num_tokens out of range");
  const uint32_t window = layout.shape.widest_window();
  const uint64_t last = window <= 1 ? 0 : uint64_t{header.count} + window - 1;
  expect(header.usable_from <= last, "usable_from out of range");
  expect(header_bytes == layout.header_bytes(header.count) && bytes.size() >= header_bytes,
         "of another size");
  header.tenant = fields.u64();
  header.key = fields.digest();
  header.parent = fields.digest();
  header.plane_crcs.resize(layout.shape.num_planes());
  for (uint32_t& crc : header.plane_crcs) crc = fields.u32();
  header.tokens.resize(header.count);
  std::memcpy(header.tokens.data(), fields.raw(4 * uint64_t{header.count}).data(),
              4 * size_t{header.count});
  return header;
}

bool planes_are_whole(const SlotLayout& layout, const SlotHeader& header,
                      std::span<const uint8_t> image) {
  const uint32_t planes = layout.planes_in_slot(header.count, header.usable_from);
  for (uint32_t plane = 0; plane < planes; ++plane) {
    const uint8_t* bytes = image.data() + layout.plane_offset(plane, header.count);
    const uint64_t size = layout.plane_bytes(plane, header.count);
    if (crc32c(bytes, size) != header.plane_crcs[plane]) return false;
  }
  return true;
}

}  // namespace lmdecode::store
