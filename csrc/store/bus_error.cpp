#include "store/bus_error.h"

#include <csignal>
#include <mutex>

namespace lmdecode::store {

namespace {
thread_local BusErrorGuard* current = nullptr;
struct sigaction before;
}  // namespace

struct BusErrorHandler {
  static void handle(int number, siginfo_t* info, void* context) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (current != nullptr && address - current->begin_ < current->size_) {
      siglongjmp(current->environment, 1);
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
      before.sa_handler(number);
    } else {  // the instruction is tried again, and ends the process
      std::signal(number, SIG_DFL);
    }
  }

  static void install() {
    struct sigaction action{};
    action.sa_sigaction = handle;
    // Not blocked within, as the jump out of it does not restore the mask.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
  }
};

BusErrorGuard::BusErrorGuard(const void* begin, size_t size)
    : begin_(reinterpret_cast<uintptr_t>(begin)), size_(size), before_(current) {
  static std::once_flag once;
  std::call_once(once, BusErrorHandler::install);
  current = this;
}

BusErrorGuard::~BusErrorGuard() { current = before_; }

}  // namespace lmdecode::store
