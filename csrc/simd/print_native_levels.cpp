// Run by csrc/sources.cmake where LMDECODE_LEVELS is native: prints the levels that this processor
// makes use of, as a list of CMake. Compiled with every LMD_HAS_<LEVEL>.
#include <cstdlib>
#include <iostream>

#include "simd/cpu_capability.h"

int main() {
  using lmdecode::CpuCapability;
  unsetenv("LMDECODE_CPU_CAPABILITY");
  const CpuCapability best = lmdecode::cpu_capability();
  std::cout << "default_";
  if (best >= CpuCapability::kAvx2) std::cout << ";avx2";
  if (best >= CpuCapability::kAvx512) std::cout << ";avx512";
  if (lmdecode::use_avx512_bf16()) std::cout << ";avx512_bf16";
  if (lmdecode::use_avx512_vnni()) std::cout << ";avx512_vnni";
  if (lmdecode::use_avx512_amx()) std::cout << ";avx512_amx";
}
