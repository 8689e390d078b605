// A slot: a header with the key, the tokens and a checksum of each plane, then planes of keys and
// values for each layer, then the state after the slot's last token, where the model keeps one.
// docs/reference/store_format.md gives it byte by byte.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/sha256.h"

namespace lmdecode::store {

struct ModelShape {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_size = 0;
  uint32_t element_size = 0;  // bytes
  // One a layer: a token sees itself and window - 1 tokens before it; 0: all of them.
  std::vector<uint32_t> windows;
  // Bytes of the state after a prefix, which other layers keep; 0: none. It is stored as a last
  // layer with one plane and a window of 2: the next token needs the state after the last one.
  uint64_t state_bytes = 0;

  uint32_t num_kv_planes() const { return 2 * num_layers; }
  uint32_t num_planes() const { return num_kv_planes() + (state_bytes > 0 ? 1 : 0); }
  uint32_t num_layers_with_state() const { return num_layers + (state_bytes > 0 ? 1 : 0); }
  uint32_t window_of(uint32_t layer) const;  // 0: none
  uint32_t widest_window() const;            // 0: no layer has one
};

// Strides in bytes of [num_kv_heads, tokens, head_size].
struct PlaneStrides {
  int64_t head = 0;
  int64_t token = 0;
  int64_t element = 0;
};

// [heads, tokens, elements] of a plane as it is stored; of a state one token, and bytes.
struct PlaneShape {
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t elements = 0;
  int64_t element_size = 0;
};

struct SlotLayout {
  ModelShape shape;
  uint32_t chunk_tokens = 0;  // tokens of a full slot
  bool values_by_column = true;

  // For a slot with `count` tokens; plane 2 * layer holds keys, 2 * layer + 1 values, the last one
  // the state.
  uint64_t header_bytes(uint32_t count) const;
  uint64_t plane_bytes(uint32_t plane, uint32_t count) const;
  uint64_t plane_offset(uint32_t plane, uint32_t count) const;
  // A slot without a state serves no prefix that ends in it.
  uint32_t planes_in_slot(uint32_t count, uint32_t usable_from) const {
    return usable_from <= count ? shape.num_planes() : shape.num_kv_planes();
  }
  uint64_t image_bytes(uint32_t count, uint32_t usable_from = 0) const {
    return plane_offset(planes_in_slot(count, usable_from), count);
  }
  uint64_t slot_bytes() const;  // of a full one, in whole 4 KiB
  // The plane's tokens are the last ones of the slot.
  PlaneShape plane_shape(uint32_t plane, uint32_t count) const;
  PlaneStrides plane_strides(uint32_t plane, uint32_t count) const;
};

// The number of tokens, a power of two, with which keys and values of a slot have at least 1 MiB,
// and as much as a state; at least 16.
uint32_t default_chunk_tokens(const ModelShape& shape);
// Throws std::invalid_argument where a number is 0, or the slot would have more than 2^31 bytes.
void check_layout(const SlotLayout& layout);

struct SlotHeader {
  uint64_t area = 0;
  uint64_t num_tokens = 0;  // of the prefix that ends with this slot
  uint32_t count = 0;       // of them in this slot
  // Prefixes that end less than this many tokens after the slot's first one miss keys and values of
  // layers with a window; 0: none does.
  uint32_t usable_from = 0;
  uint64_t tenant = 0;
  Digest key{};
  Digest parent{};
  std::vector<uint32_t> plane_crcs;
  std::vector<int32_t> tokens;
};

// Exactly header_bytes(count) bytes. A plane that the slot lacks has the checksum 0.
void encode_header(const SlotLayout& layout, const SlotHeader& header, std::span<uint8_t> out);
// Trusts nothing: throws StoreError kDamaged where a field cannot be one of this layout.
SlotHeader decode_header(const SlotLayout& layout, std::span<const uint8_t> bytes);
// Whether the planes of a slot, image_bytes(count, usable_from) bytes, match its checksums.
bool planes_are_whole(const SlotLayout& layout, const SlotHeader& header,
                      std::span<const uint8_t> image);

}  // namespace lmdecode::store
