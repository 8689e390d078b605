// Calls of pybind11 modules that run without the interpreter's lock: how they end with it, and how
// signals and callbacks of Python reach them.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

namespace lmdecode::bindings {

namespace py = pybind11;

// A thread that wants the lock of an interpreter that has ended is killed where it stands, in the
// middle of its C++. So at exit, while the interpreter is whole, calls under way are waited for,
// and those that come later keep the lock. Calls that begin while that wait lasts are waited for
// too: with the lock they could wait for a call that needs it. Only those that were under way
// first decide how long that is, or threads that call again and again would hold up the end.
class Unlocked {
 public:
  // With the lock, as the destructor ends.
  Unlocked() {
    if (keeps_lock_) return;
    under_way_ = is_ending_ ? &late_ : &early_;
    ++*under_way_;
    release_.emplace();
  }
  ~Unlocked() {
    if (!released()) return;
    release_.reset();
    --*under_way_;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  bool released() const { return release_.has_value(); }
  static bool is_ending() { return is_ending_; }

  // Once for each module.
  static void watch_the_end() {
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
      is_ending_ = true;
      wait_for(early_);
      keeps_lock_ = true;
      wait_for(late_);
    }));
    // The threads of those calls stay in the parent.
    py::module_::import("os").attr("register_at_fork")(
        py::arg("after_in_child") = py::cpp_function([] { early_ = late_ = 0; }));
  }

 private:
  // With the lock. Ctrl-C ends it.
  static void wait_for(const int& calls) {
    while (calls > 0) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      const py::gil_scoped_release release;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  static inline std::atomic<bool> is_ending_{false};
  // Guarded by the lock.
  static inline bool keeps_lock_ = false;
  static inline int early_ = 0;  // calls under way that began before the end
  static inline int late_ = 0;   // and that began after it
  int* under_way_ = nullptr;
  std::optional<py::gil_scoped_release> release_;
};

template <class Body>
auto unlocked(const Body& body) {
  const Unlocked guard;
  return body();
}

// A long call polls this on its calling thread to learn whether to continue. It stops after a
// signal handler that raised (Ctrl-C), a callback that raised, or, in a call that is without the
// lock, at exit.
class Interruption {
 public:
  // *error holds the exception.
  Interruption(const Unlocked& guard, py::handle progress, std::exception_ptr* error)
      : guard_(guard), progress_(progress), error_(*error) {}

  bool goes_on(uint64_t done, uint64_t total) {
    if (error_ != nullptr || (Unlocked::is_ending() && guard_.released())) return false;
    const auto now = std::chrono::steady_clock::now();
    if (progress_.is_none() && now - asked_ < kInterval) return true;
    asked_ = now;
    const py::gil_scoped_acquire lock;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!progress_.is_none()) progress_(done, total);
    } catch (py::error_already_set&) {
      error_ = std::current_exception();
    }
    return error_ == nullptr;
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{5};
  const Unlocked& guard_;
  py::handle progress_;
  std::exception_ptr& error_;
  std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

// body(interruption) without the lock. Whatever it makes of being stopped, what stopped it comes
// out.
template <class Body>
auto interruptible(py::handle progress, const Body& body) {
  std::exception_ptr error;
  const auto stopped = [&] {
    if (error != nullptr) std::rethrow_exception(error);
  };
  try {
    auto result = [&] {
      const Unlocked guard;
      Interruption interruption(guard, progress, &error);
      return body(interruption);
    }();
    stopped();
    return result;
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception&) {
    stopped();
    throw;
  }
}

}  // namespace lmdecode::bindings
