// Reads a mapped file. The kernel sends SIGBUS where a page cannot be read.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>

namespace lmdecode::store {

// The memory that a thread reads, and where it goes on when that is not there. A handler of SIGBUS,
// set when it is first needed, looks at it; signals of other places go to the handler before it.
class BusErrorGuard {
 public:
  BusErrorGuard(const void* begin, size_t size);
  ~BusErrorGuard();
  BusErrorGuard(const BusErrorGuard&) = delete;
  BusErrorGuard& operator=(const BusErrorGuard&) = delete;

  sigjmp_buf environment;

 private:
  friend struct BusErrorHandler;
  const uintptr_t begin_;
  const size_t size_;
  BusErrorGuard* const before_;
};

// Calls body, which reads [begin, begin + size). False: it was left in the middle, and nothing that
// it made was destroyed: let it make nothing.
template <class Body>
[[gnu::noinline]] bool reads_mapped(const void* begin, size_t size, const Body& body) {
  BusErrorGuard guard(begin, size);
  if (sigsetjmp(guard.environment, 0) != 0) return false;
  body();
  return true;
}

}  // namespace lmdecode::store
