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
// and those that come later keep the lock.
class Unlocked {
 public:
  // With the lock, as the destructor ends.
  Unlocked() {
    if (is_ending_) return;
    ++under_way_;
    release_.emplace();
  }
  ~Unlocked() {
    if (!release_.has_value()) return;
    release_.reset();
    --under_way_;
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  static bool is_ending() { return is_ending_; }

  // Once for each module.
  static void watch_the_end() {
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
      is_ending_ = true;
      while (under_way_ > 0) {
        const py::gil_scoped_release release;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }));
    // The threads of those calls stay in the parent.
    py::module_::import("os").attr("register_at_fork")(
        py::arg("after_in_child") = py::cpp_function([] { under_way_ = 0; }));
  }

 private:
  static inline std::atomic<bool> is_ending_{false};
  static inline int under_way_ = 0;  // guarded by the lock
  std::optional<py::gil_scoped_release> release_;
};

template <class Body>
auto unlocked(const Body& body) {
  const Unlocked guard;
  return body();
}

// What a long call asks now and then, without the lock, on the thread that called: whether to go
// on. Not after a signal whose handler raised (Ctrl-C), a callback that raised, or at exit.
class Interruption {
 public:
  explicit Interruption(py::handle progress = py::none()) : progress_(progress) {}

  bool goes_on(uint64_t done, uint64_t total) {
    if (error_ != nullptr || Unlocked::is_ending()) return false;
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

  // With the lock.
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{5};
  py::handle progress_;
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

// body(interruption) without the lock. Whatever it makes of being stopped, what stopped it comes
// out.
template <class Body>
auto interruptible(py::handle progress, const Body& body) {
  Interruption interruption(progress);
  try {
    auto result = unlocked([&] { return body(interruption); });
    interruption.rethrow();
    return result;
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception&) {
    interruption.rethrow();
    throw;
  }
}

}  // namespace lmdecode::bindings
