#include "simd/cpu_capability.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace lmdecode {
namespace {

#if defined(LMD_HAS_AVX2)
constexpr bool kHasAvx2 = true;
#else
constexpr bool kHasAvx2 = false;
#endif
#if defined(LMD_HAS_AVX512)
constexpr bool kHasAvx512 = true;
#else
constexpr bool kHasAvx512 = false;
#endif
#if defined(LMD_HAS_AVX512_BF16)
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif
#if defined(LMD_HAS_AVX512_VNNI)
constexpr bool kHasVnni = true;
#else
constexpr bool kHasVnni = false;
#endif
#if defined(LMD_HAS_AVX512_AMX)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif

// The best level of this machine without tiles, built or not.
CpuCapability best_of_vectors() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return CpuCapability::kAvx512;
  if (avx2) return CpuCapability::kAvx2;
#endif
  return CpuCapability::kDefault;
}

#if defined(__x86_64__) && defined(__linux__)
// The vector instructions that the level of tiles is compiled with.
bool has_vectors_of_tiles() {
  return best_of_vectors() == CpuCapability::kAvx512 && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

#if defined(LMDECODE_AMX_EMULATION)
// A build for tests: tests/cpp/amx_emulation stands for the tiles of an Intel processor.
bool has_tiles() { return has_vectors_of_tiles(); }
#else
// Whether this process may use the registers of tiles: asked for once, threads inherit it. Refused
// by kernels before 5.16 and by some containers.
bool request_tile_permission() {
  constexpr int64_t kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tile_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr unsigned kAll = kAmxBf16 | kAmxTile | kAmxInt8;
  return (edx & kAll) == kAll;
}

bool has_tiles() {
  static const bool has =
      has_vectors_of_tiles() && has_tile_instructions() && request_tile_permission();
  return has;
}
#endif
#else
bool has_tiles() { return false; }
#endif

CpuCapability best_of_machine() { return has_tiles() ? CpuCapability::kAmx : best_of_vectors(); }

CpuCapability detect() {
  const char* forced = std::getenv("LMDECODE_CPU_CAPABILITY");
  if (forced == nullptr || *forced == '\0') return max_cpu_capability();
  for (const CpuCapability level : {CpuCapability::kDefault, CpuCapability::kAvx2,
                                    CpuCapability::kAvx512, CpuCapability::kAmx}) {
    if (std::string(forced) != cpu_capability_name(level)) continue;
    // Tiles are not asked for where they are left out.
    if (level > best_of_vectors() && level > best_of_machine()) {
      throw std::invalid_argument(std::string("LMDECODE_CPU_CAPABILITY is ") + forced +
                                  ", but this machine has at most " +
                                  cpu_capability_name(best_of_machine()));
    }
    if (!is_built(level)) {
      throw std::invalid_argument(std::string("LMDECODE_CPU_CAPABILITY is ") + forced +
                                  ", but this build of lmdecode has at most " +
                                  cpu_capability_name(max_cpu_capability()) +
                                  ": build it with LMDECODE_LEVELS=all");
    }
    return level;
  }
  throw std::invalid_argument(std::string("LMDECODE_CPU_CAPABILITY is '") + forced +
                              "'; expected default, avx2, avx512 or amx");
}

}  // namespace

bool is_built(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kAmx:
      return kHasAmx;
    case CpuCapability::kAvx512:
      return kHasAvx512;
    case CpuCapability::kAvx2:
      return kHasAvx2;
    default:
      return true;
  }
}

CpuCapability max_cpu_capability() {
  if (kHasAmx && has_tiles()) return CpuCapability::kAmx;
  const CpuCapability machine = best_of_vectors();
  for (const CpuCapability level : {CpuCapability::kAvx512, CpuCapability::kAvx2}) {
    if (level <= machine && is_built(level)) return level;
  }
  return CpuCapability::kDefault;
}

bool use_avx512_bf16() {
#if defined(__x86_64__)
  // Intel's processors multiply pairs of bfloat16 at half the speed of floats (a Granite Rapids:
  // 125 GFLOP/s where FMA has 190 to 245). By the vendor, not by a measurement: every process of a
  // machine has the same bits.
  bool is_intel = __builtin_cpu_is("intel");
#if defined(LMDECODE_AMX_EMULATION)
  is_intel |= cpu_capability() == CpuCapability::kAmx;  // its tiles are emulated
#endif
  return kHasBf16 && cpu_capability() >= CpuCapability::kAvx512 &&
         __builtin_cpu_supports("avx512bf16") && !is_intel;
#else
  return false;
#endif
}

bool use_avx512_vnni() {
#if defined(__x86_64__)
  return kHasVnni && cpu_capability() >= CpuCapability::kAvx512 &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool is_zen5() {
#if defined(__x86_64__)
  static const bool is = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    __builtin_cpu_init();
    if (!__builtin_cpu_is("amd") || __get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
    return (eax >> 8 & 15) + (eax >> 20 & 255) == 26;
  }();
  return is;
#else
  return false;
#endif
}

bool use_avx512_amx() { return cpu_capability() == CpuCapability::kAmx; }

const char* cpu_capability_name(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kAmx:
      return "amx";
    case CpuCapability::kAvx512:
      return "avx512";
    case CpuCapability::kAvx2:
      return "avx2";
    default:
      return "default";
  }
}

CpuCapability cpu_capability() {
  static const CpuCapability capability =
      detect();  // a throw leaves it unset: the next call tries again
  return capability;
}

}  // namespace lmdecode
