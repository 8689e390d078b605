// The tiles of Intel's matrix units (AMX): eight registers of at most 16 rows of 64 bytes. Under
// LMDECODE_AMX_EMULATION they come from tests/cpp/amx_emulation, in C++.
//
//   c [rows, 16] 32-bit += a [rows, pairs or quads] b [pairs or quads, 16]
//
// An element of a and b is a pair of bfloat16 or a quad of bytes along the depth.
//
//   multiply_bfloat16  per call two chains from 0 along the depth, of the first and of the second
//                      elements of the pairs; each product exact, each addition rounded to nearest
//                      even, subnormal numbers 0 before and after; then first + second, then c +
//                      that. docs/reference/linear.md has the order for users.
//   multiply_int8      exact modulo 2^32: a without sign, b with
//   multiply_codes     likewise: a with sign, b without
//   multiply_numbers   likewise: both with sign
//
// The instructions are written out: the compiler's intrinsics name neither the memory that a tile
// is loaded from nor all of the configuration, and stores before them may be moved or dropped.
#pragma once

#include <cstdint>

#if defined(LMDECODE_AMX_EMULATION)
#include "amx_emulation.h"
#endif

namespace lmdecode::LMD_SIMD {

constexpr int kTileRegisters = 8;
constexpr int64_t kMatrixTileRows = 16, kMatrixTileBytes = 64, kMatrixTileColumns = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of each register
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

#if defined(LMDECODE_AMX_EMULATION)

inline void load_tile_config(const TileConfig& config) { amx_emulation::load_config(&config); }
inline void release_tiles() { amx_emulation::release(); }
template <int kTile>
inline void zero_tile() {
  amx_emulation::zero(kTile);
}
template <int kTile>
inline void load_tile(const void* rows, int64_t row_stride) {
  amx_emulation::load(kTile, rows, row_stride);
}
template <int kTile>
inline void load_passing_tile(const void* rows, int64_t row_stride) {
  amx_emulation::load(kTile, rows, row_stride);
}
template <int kTile>
inline void store_tile(void* rows, int64_t row_stride) {
  amx_emulation::store(kTile, rows, row_stride);
}
template <int kC, int kA, int kB>
inline void multiply_bfloat16() {
  amx_emulation::dpbf16ps(kC, kA, kB);
}
template <int kC, int kA, int kB>
inline void multiply_int8() {
  amx_emulation::dpbusd(kC, kA, kB);
}
template <int kC, int kA, int kB>
inline void multiply_codes() {
  amx_emulation::dpbsud(kC, kA, kB);
}
template <int kC, int kA, int kB>
inline void multiply_numbers() {
  amx_emulation::dpbssd(kC, kA, kB);
}

#else

inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const void* rows, int64_t row_stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_stride), "i"(kTile) : "memory");
}
// For what is read once: it does not push out of the caches what is read again.
template <int kTile>
inline void load_passing_tile(const void* rows, int64_t row_stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(row_stride), "i"(kTile)
               : "memory");
}
template <int kTile>
inline void store_tile(void* rows, int64_t row_stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(row_stride), "i"(kTile)
               : "memory");
}
template <int kC, int kA, int kB>
inline void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void multiply_int8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void multiply_codes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void multiply_numbers() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#endif

// Tiles are in use while it lives: once a call of a kernel, as a configuration costs some 200
// cycles. They are released at the end: other libraries use the same registers on the same threads,
// and tiles in use make a switch of threads dear.
class TileScope {
 public:
  explicit TileScope(const TileConfig& config) { load_tile_config(config); }
  ~TileScope() { release_tiles(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace lmdecode::LMD_SIMD
