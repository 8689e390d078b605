// A test runner of one header, for executables that need no more: TEST(name) { CHECK(...);
// CHECK_EQ(a, b); } and CHECK_MAIN() once. A failed check is reported and the test goes on; an
// exception that leaves a test fails it.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace lmdecode::check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}
inline int failures = 0;       // of the test that runs now
inline bool filtered = false;  // some tests are left out

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline void report(const char* file, int line, const std::string& what) {
  ++failures;
  std::printf("%s:%d: %s\n", file, line, what.c_str());
}

template <class A, class B>
void equal(const A& a, const B& b, const char* expression, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << "failed: " << expression << " (" << a << " and " << b << ")";
  report(file, line, what.str());
}

// What `function` throws, "" if nothing.
template <class Function>
std::string error_of(Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// An argument keeps to tests whose name contains it.
inline int run_all(int argc, char** argv) {
  filtered = argc > 1;
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    failures = 0;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& error) {
      report(test.name, 0, std::string("threw ") + error.what());
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s (%.0f ms)\n", failures == 0 ? "ok    " : "FAILED", test.name, seconds * 1e3);
    ++(failures == 0 ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace lmdecode::check

#define TEST(name)                                                                      \
  static void test_##name();                                                            \
  static const ::lmdecode::check::Registration registration_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition) \
  ((condition) ? void(0) : ::lmdecode::check::report(__FILE__, __LINE__, "failed: " #condition))
#define CHECK_EQ(a, b) ::lmdecode::check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_MAIN() \
  int main(int argc, char** argv) { return ::lmdecode::check::run_all(argc, argv); }
