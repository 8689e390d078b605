// Intel's tile registers in C++, with the arithmetic of its manual: what
// csrc/simd/matrix_tiles.h is under LMDECODE_AMX_EMULATION. Memory is read and written row by row,
// so that the sanitizers see each access. What the processor would fault at ends the process with a
// line that says why: an instruction without a configuration, sizes that do not fit.
#pragma once

#include <cstdint>

namespace amx_emulation {

// 64 bytes, as ldtilecfg reads them.
void load_config(const void* config);
void release();
void zero(int tile);
void load(int tile, const void* rows, int64_t row_stride);
void store(int tile, void* rows, int64_t row_stride);
void dpbf16ps(int c, int a, int b);
void dpbusd(int c, int a, int b);
void dpbsud(int c, int a, int b);
void dpbssd(int c, int a, int b);

// Products have the same bits one number at a time and by vectors of AVX-512, which are taken where
// the machine has them, unless they are not allowed.
void allow_vectors(bool allowed);

// Whether this thread's registers are in use: not before a configuration, nor after a release.
bool in_use();

// a * b + c, rounded once to nearest even; subnormal numbers count as 0 before and after, and a
// result is subnormal if it is one after rounding to 24 bits.
float flushed_multiply_add(float a, float b, float c);

}  // namespace amx_emulation
