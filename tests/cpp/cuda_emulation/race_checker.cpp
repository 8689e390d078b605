// Data races, found whatever the schedule. Where kernels are compiled with -fsanitize=thread, the
// compiler announces every access to memory by a call to __tsan_*; these are answered here instead
// of by libtsan (do not link that: leave the flag out when linking, and out when compiling this
// folder's other sources).
//
// Reported: two accesses of different threads to the same bytes, one of them a write, not both
// atomic, with no barrier between them that both threads take part in (for lanes of a warp also
// __syncwarp; shuffles and votes order nothing); reads of shared memory that nobody wrote; accesses
// outside shared memory, of a block that has left, or of another thread's stack; another block's
// shared memory before the first cluster_sync. Not seen: races between clusters, memcpy and memset
// that are calls, and order that a kernel makes itself out of atomics and fences (reported as a
// race).
#include "race_checker.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" const char __executable_start;

namespace lmdecode::emulation {
namespace {

struct Record {
  Actor actor;
  const void* code;
  std::uint8_t bytes;  // which of the word's four
  bool atomic;
};

// Accesses to one aligned word of four bytes. Two readers are kept, of different warps if there
// are: a later writer is then unordered to one of them if it is to any, but for odd cases.
struct Word {
  std::uintptr_t address = 0;
  std::uint64_t cluster = 0;  // number of the run the rest belongs to; another: nothing is known
  std::uint8_t written = 0;   // bytes
  Record write, reads[2];
};

constexpr std::size_t kElsewhereWords = std::size_t{1}
                                        << 16;  // of global memory; collisions forget

std::uint64_t cluster_number = 0;
std::size_t shared_words = 0;
Word* shared =
    nullptr;  // plain arrays: the library's containers may come from instrumented objects
std::size_t shared_capacity = 0;
Word* elsewhere = nullptr;

bool ordered(const Actor& before, const Actor& now) {
  if (before.thread == now.thread || before.cluster_epoch != now.cluster_epoch) return true;
  if (before.block != now.block) return false;
  return before.block_epoch != now.block_epoch ||
         (before.warp == now.warp && before.warp_epoch != now.warp_epoch);
}

bool conflict(const Record& before, const Record& now) {
  return (before.bytes & now.bytes) != 0 && !(before.atomic && now.atomic) &&
         !ordered(before.actor, now.actor);
}

// The source line of an access, by binutils where there are any; that of the last few is kept.
const char* source_line(const void* code) {
  struct Line {
    const void* code;
    char text[400];
  };
  static Line known[16];
  static std::size_t next = 0;
  for (const Line& line : known) {
    if (line.code == code) return line.text;
  }
  Line& known_line = known[next++ % 16];
  known_line.code = code;
  char* const text = known_line.text;
  constexpr std::size_t size = sizeof(known_line.text);
  const auto offset = reinterpret_cast<std::uintptr_t>(code) -
                      reinterpret_cast<std::uintptr_t>(&__executable_start);
  std::snprintf(text, size, "code 0x%zx", std::size_t(offset));
  char command[160];
  std::snprintf(command, sizeof(command), "addr2line -e /proc/%d/exe 0x%zx 2>/dev/null",
                int(getpid()), std::size_t(offset) - 1);
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return text;
  char line[300];
  if (std::fgets(line, sizeof(line), pipe) != nullptr && line[0] != '?') {
    line[std::strcspn(line, "\n")] = 0;
    std::snprintf(text, size, "%s", line);
  }
  pclose(pipe);
  return text;
}

[[noreturn]] void report(const char* what, const Place& place, const void* code,
                         const Record* other = nullptr) {
  static char text[1200];
  int length = std::snprintf(text, sizeof(text), "%s, %s", what, source_line(code));
  if (place.kind == Place::kShared) {
    length += std::snprintf(text + length, sizeof(text) - std::size_t(length),
                            ", shared memory byte %zu", place.offset);
  }
  if (other != nullptr) {
    std::snprintf(text + length, sizeof(text) - std::size_t(length),
                  "; with thread %u of the cluster at %s", other->actor.thread,
                  source_line(other->code));
  }
  fail_without_unwinding(text);
}

void check_word(Word& word, std::uintptr_t address, const Record& now, Access access,
                const Place& place) {
  if (word.cluster != cluster_number || word.address != address) {
    word.address = address;
    word.cluster = cluster_number;
    word.written = 0;
    word.write.bytes = word.reads[0].bytes = word.reads[1].bytes = 0;
  }
  if (place.kind == Place::kShared && access != Access::kWrite &&
      (now.bytes & ~word.written) != 0) {
    report("reads shared memory that nobody wrote", place, now.code);
  }
  if (conflict(word.write, now)) report("data race", place, now.code, &word.write);
  if (access == Access::kRead) {
    Record& first = word.reads[0];
    const bool replace_first =
        (first.bytes & ~now.bytes) == 0 &&
        (first.actor.thread == now.actor.thread || ordered(first.actor, now.actor));
    if (replace_first || first.bytes == 0) {
      first = now;
    } else if (word.reads[1].bytes == 0 || word.reads[1].actor.warp == first.actor.warp ||
               now.actor.warp != first.actor.warp) {
      word.reads[1] = now;
    }
    return;
  }
  for (const Record& read : word.reads) {
    if (conflict(read, now)) report("data race", place, now.code, &read);
  }
  word.written |= now.bytes;
  word.write = now;
}

}  // namespace

namespace race_checker {

bool active = false;

void start_cluster(unsigned blocks, std::size_t shared_bytes) {
  ++cluster_number;
  shared_words = (shared_bytes + 3) / 4;
  const std::size_t words = shared_words * blocks;
  if (words > shared_capacity) {
    std::free(shared);
    shared = static_cast<Word*>(std::calloc(words, sizeof(Word)));
    shared_capacity = words;
  }
  if (elsewhere == nullptr)
    elsewhere = static_cast<Word*>(std::calloc(kElsewhereWords, sizeof(Word)));
}

void check(const void* address, std::size_t bytes, Access access, const void* code) {
  const Place place = place_of(address, bytes);
  if (place.kind == Place::kOwnStack) return;
  Record now;
  if (!current_actor(&now.actor)) return;
  switch (place.kind) {
    case Place::kOwnStack:
      break;
    case Place::kOtherStack:
      report("touches another thread's stack", place, code);
    case Place::kOutsideShared:
      report("touches memory outside shared memory", place, code);
    case Place::kLeftShared:
      report("touches the shared memory of a block that has exited", place, code);
    case Place::kShared:
      if (place.block != now.actor.block && now.actor.cluster_epoch == 0) {
        report("touches another block's shared memory before a cluster_sync", place, code);
      }
      break;
    case Place::kElsewhere:
      break;
  }
  now.code = code;
  now.atomic = access == Access::kAtomic;
  const auto begin = reinterpret_cast<std::uintptr_t>(address), end = begin + bytes;
  std::size_t shared_word = place.offset / 4;  // shared memory starts at a multiple of 4
  for (std::uintptr_t word = begin & ~std::uintptr_t{3}; word < end; word += 4) {
    now.bytes = 0;
    for (unsigned byte = 0; byte < 4; ++byte) {
      now.bytes |= std::uint8_t((word + byte >= begin && word + byte < end) << byte);
    }
    Word& cell = place.kind == Place::kShared ? shared[place.block * shared_words + shared_word++]
                                              : elsewhere[(word / 4 * 0x9E3779B97F4A7C15ull) >> 48];
    check_word(cell, word, now, access, place);
  }
}

}  // namespace race_checker

bool race_checker_active() { return race_checker::active; }

void announce(const void* address, std::size_t bytes, Access access, const void* code) {
  if (race_checker::active) race_checker::check(address, bytes, access, code);
}

}  // namespace lmdecode::emulation

// ---- what -fsanitize=thread calls
extern "C" {

using lmdecode::emulation::Access;
namespace checker = lmdecode::emulation::race_checker;

void __tsan_init() { checker::active = true; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define LMDECODE_HOOK(name, bytes, access)                               \
  void name(const void* address) {                                       \
    checker::check(address, bytes, access, __builtin_return_address(0)); \
  }
LMDECODE_HOOK(__tsan_read1, 1, Access::kRead)
LMDECODE_HOOK(__tsan_read2, 2, Access::kRead)
LMDECODE_HOOK(__tsan_read4, 4, Access::kRead)
LMDECODE_HOOK(__tsan_read8, 8, Access::kRead)
LMDECODE_HOOK(__tsan_read16, 16, Access::kRead)
LMDECODE_HOOK(__tsan_unaligned_read2, 2, Access::kRead)
LMDECODE_HOOK(__tsan_unaligned_read4, 4, Access::kRead)
LMDECODE_HOOK(__tsan_unaligned_read8, 8, Access::kRead)
LMDECODE_HOOK(__tsan_unaligned_read16, 16, Access::kRead)
LMDECODE_HOOK(__tsan_write1, 1, Access::kWrite)
LMDECODE_HOOK(__tsan_write2, 2, Access::kWrite)
LMDECODE_HOOK(__tsan_write4, 4, Access::kWrite)
LMDECODE_HOOK(__tsan_write8, 8, Access::kWrite)
LMDECODE_HOOK(__tsan_write16, 16, Access::kWrite)
LMDECODE_HOOK(__tsan_unaligned_write2, 2, Access::kWrite)
LMDECODE_HOOK(__tsan_unaligned_write4, 4, Access::kWrite)
LMDECODE_HOOK(__tsan_unaligned_write8, 8, Access::kWrite)
LMDECODE_HOOK(__tsan_unaligned_write16, 16, Access::kWrite)
#undef LMDECODE_HOOK

void __tsan_read_range(const void* address, unsigned long bytes) {
  checker::check(address, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(const void* address, unsigned long bytes) {
  checker::check(address, bytes, Access::kWrite, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Host code of the same files: function-local statics and shared_ptr.
char __tsan_atomic8_load(const volatile char* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_load(const volatile int* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}
int __tsan_atomic32_fetch_add(volatile int* address, int value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

}  // extern "C"
