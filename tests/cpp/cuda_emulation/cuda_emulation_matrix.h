// The third part of cuda_emulation.h: 16-bit elements and the matrix instructions of a warp. What
// the hardware leaves open, in which order the 16 products of a sum are added, is here: exactly,
// then rounded to f32 once.
#pragma once

namespace lmdecode::emulation {

std::uint16_t bf16_of(float value);  // rounded to nearest even
std::uint16_t f16_of(float value);
void load_matrices(unsigned* to, const void* row, bool transposed, Location where,
                   const void* code);
void multiply_add(float* sum, const unsigned* a, const unsigned* b, bool brain_float,
                  Location where);

}  // namespace lmdecode::emulation

namespace lmdecode::cuda {

inline float exp2_approximate(float x) { return std::exp2(x); }
inline float divide_approximate(float a, float b) { return a / b; }
inline unsigned round_to_bf16(float first, float second) {
  return emulation::bf16_of(first) | unsigned(emulation::bf16_of(second)) << 16;
}
inline unsigned round_to_f16(float first, float second) {
  return emulation::f16_of(first) | unsigned(emulation::f16_of(second)) << 16;
}
[[gnu::noinline]] inline void load_matrices(unsigned (&to)[4], const void* row, LMDECODE_HERE) {
  emulation::load_matrices(to, row, false, where, __builtin_return_address(0));
}
[[gnu::noinline]] inline void load_transposed_matrices(unsigned (&to)[4], const void* row,
                                                       LMDECODE_HERE) {
  emulation::load_matrices(to, row, true, where, __builtin_return_address(0));
}
inline void multiply_add_bf16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              LMDECODE_HERE) {
  emulation::multiply_add(sum, a, b, true, where);
}
inline void multiply_add_f16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                             LMDECODE_HERE) {
  emulation::multiply_add(sum, a, b, false, where);
}

}  // namespace lmdecode::cuda
