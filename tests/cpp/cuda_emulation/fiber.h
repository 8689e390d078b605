// Stacks and switches between them: hand-written on x86-64 (a few ns, no signal mask calls),
// ucontext elsewhere. Under ASan every switch is announced to it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace lmdecode::emulation {

inline void poison([[maybe_unused]] const void* start, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(start, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* start, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(start, bytes);
#endif
}

#if defined(__x86_64__)
extern "C" void lmdecode_emulation_switch(void** save, void* load);
asm(R"(
  .text
  .weak lmdecode_emulation_switch
  .type lmdecode_emulation_switch, @function
lmdecode_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size lmdecode_emulation_switch, .-lmdecode_emulation_switch
)");
#endif

// Stacks of one size in one reserved address range, each with an inaccessible page below it.
class StackPool {
 public:
  static constexpr std::size_t kSlot =
      256 << 10;  // ASan's frames are large; untouched pages cost nothing
  static constexpr std::size_t kGuard = 4096;
  static constexpr std::size_t kMaxStacks = 16 * 1024;  // a cluster of 16 blocks of 1024

  // The lowest usable byte of stack `index`; it has kSlot - kGuard bytes.
  char* stack(std::size_t index) {
    if (base_ == nullptr) {
      void* range = mmap(nullptr, kMaxStacks * kSlot, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (range == MAP_FAILED) throw std::runtime_error("emulation: no address space for stacks");
      base_ = static_cast<char*>(range);
    }
    for (; open_ <= index; ++open_) {
      if (mprotect(base_ + open_ * kSlot + kGuard, kSlot - kGuard, PROT_READ | PROT_WRITE) != 0) {
        throw std::runtime_error("emulation: no memory for stacks");
      }
    }
    return base_ + index * kSlot + kGuard;
  }

  // Which stack an address lies in, -1 if none.
  std::ptrdiff_t index_of(const void* address) const {
    const auto offset =
        reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(base_);
    return base_ != nullptr && offset < kMaxStacks * kSlot ? std::ptrdiff_t(offset / kSlot) : -1;
  }

 private:
  char* base_ = nullptr;
  std::size_t open_ = 0;
};

// A place to come back to: a fiber, or the caller of run().
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  const void* stack = nullptr;  // as ASan wants them
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;

  // Makes the next switch to this context call entry(), which must not return.
  void start(char* stack_low, std::size_t bytes, void (*entry)()) {
    stack = stack_low;
    stack_bytes = bytes;
    fake_stack = nullptr;
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(stack_low + bytes);
    *--top = nullptr;  // entry()'s return address; the ABI wants the stack aligned to 16 above it
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer = top;
#else
    getcontext(&context);
    context.uc_stack.ss_sp = stack_low;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
#endif
  }
};

// To be called first by an entry(): `from` learns its own stack, whose bounds ASan needs.
inline void arrive([[maybe_unused]] Context& self, [[maybe_unused]] Context& from) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self.fake_stack, &from.stack, &from.stack_bytes);
#endif
}

// `leaves`: `from` is never switched to again.
inline void switch_context(Context& from, Context& to, [[maybe_unused]] bool leaves = false) {
#if defined(__SANITIZE_ADDRESS__)
  if (leaves) __asan_handle_no_return();  // the next life of this stack must find no redzones
  __sanitizer_start_switch_fiber(leaves ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#if defined(__x86_64__)
  lmdecode_emulation_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace lmdecode::emulation
