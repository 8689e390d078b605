// Calls csrc/common/glibc_2_28.cpp for tests/test_package.py, which builds with and without it.

#include <dlfcn.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

void call_functions(std::ostream& out) {
  const volatile double x = 2.5, y = 0.3, least = -1;
  out << std::hexfloat << std::exp(x) << ' ' << std::exp2(x) << ' ' << std::log(x) << ' '
      << std::log2(x) << ' ' << std::pow(x, y) << ' ' << std::fmod(x, y) << ' '
      << std::isnan(std::log(least)) << '\n';
  struct stat by_path, by_descriptor;
  const int found = stat("/", &by_path);
  const int missing = stat("/missing", &by_descriptor);
  const int closed = fstat(-1, &by_descriptor);
  out << found << S_ISDIR(by_path.st_mode) << missing << closed << '\n';
  out << (dlsym(RTLD_DEFAULT, "strlen") != nullptr) << (dlopen("/missing.so", RTLD_NOW) == nullptr)
      << '\n';
}

void pass_exceptions(std::ostream& out) {
  std::exception_ptr first;
  try {
    throw std::invalid_argument("invalid");
  } catch (...) {
    first = std::current_exception();
  }
  for (int copies = 0; copies < 3; ++copies) {
    std::exception_ptr copy = first, moved = std::move(copy);
    copy = moved;
  }
  try {
    std::rethrow_exception(first);
  } catch (const std::invalid_argument& error) {
    out << error.what() << '\n';
  }
  std::promise<int> promise;
  std::thread([&] { promise.set_exception(first); }).join();
  first = nullptr;
  try {
    promise.get_future().get();
  } catch (const std::invalid_argument& error) {
    out << error.what() << '\n';
  }
  const volatile long negative = -1;
  try {
    std::unique_ptr<int[]> numbers(new int[negative]);
    out << numbers[0];
  } catch (const std::bad_array_new_length& error) {
    out << error.what() << '\n';
  }
}

void wait_for_threads(std::ostream& out) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  const auto is_done = [&] { return done; };
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex);
  const bool in_time = changed.wait_for(lock, std::chrono::milliseconds(50), is_done);
  out << in_time << (std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(50));
  std::thread thread([&] {
    std::lock_guard locked(mutex);
    done = true;
    changed.notify_all();
  });
  out << changed.wait_for(lock, std::chrono::hours(1), is_done);
  changed.wait(lock, is_done);
  lock.unlock();
  thread.join();
  std::once_flag once;
  for (int times = 0; times < 2; ++times) {
    std::call_once(once, [&] { out << "once"; });
  }
  const auto shared = std::make_shared<int>(1);
  const auto other = shared;
  out << shared.use_count() << '\n';
}

void write_streams(std::ostream& out) {
  std::ostringstream written;
  std::stringstream both;
  written << "written" << 1;
  both << "both " << 2;
  std::string word;
  both >> word;
  out << written.str() << word << std::move(both).str() << std::move(written).str() << '\n';
}

}  // namespace

// Named as the one kind of function that csrc/exports.map shows.
extern "C" __attribute__((visibility("default"))) const char* PyInit_calls() {
  static std::string told;
  std::ostringstream out;
  call_functions(out);
  pass_exceptions(out);
  wait_for_threads(out);
  write_streams(out);
  told = out.str();
  return told.c_str();
}
