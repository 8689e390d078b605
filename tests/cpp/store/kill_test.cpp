// Writers killed LMD_STORE_KILLS times (200) while readers read: no wrong byte, nothing lost.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "check.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

constexpr int kReaders = 2;
constexpr uint32_t kAreas = 4000;  // nothing is evicted: what is acknowledged stays

// Seen by all processes.
struct Shared {
  std::atomic<uint64_t> acknowledged;  // of the numbered conversations
  std::atomic<uint64_t> loads, wrong, failures;
  std::atomic<bool> stop;
};

StoreOptions options(const std::string& folder, bool readonly) {
  StoreOptions settings = small::options(posix_file_system(), kAreas);
  settings.directory = folder + "/store";
  settings.readonly = readonly;
  settings.slab_bytes = uint64_t{1} << 20;
  settings.now_ms = nullptr;
  return settings;
}

// The n-th: long ones, short ones, and such that extend the one before.
Tokens conversation(uint64_t number) {
  std::mt19937_64 random(number / 3);
  Tokens tokens(2 + random() % 20);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 1000);
  const size_t size = tokens.size() - std::min<size_t>(tokens.size() - 1, 2 - number % 3);
  tokens.resize(size);
  return tokens;
}

[[noreturn]] void write(const std::string& folder, Shared* shared) {
  try {
    const auto engine = StoreEngine::open(options(folder, false));
    for (uint64_t number = shared->acknowledged;; ++number) {
      const Tokens tokens = conversation(number);
      const uint64_t stored =
          number % 4 == 0 ? small::commit(*engine, "session", tokens) : small::put(*engine, tokens);
      if (stored != tokens.size()) ++shared->failures;
      shared->acknowledged = number + 1;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "writer: %s\n", error.what());
    ++shared->failures;
  }
  _exit(1);
}

[[noreturn]] void read(const std::string& folder, Shared* shared, uint64_t seed) {
  try {
    const auto engine = StoreEngine::open(options(folder, true));
    std::mt19937_64 random(seed);
    while (!shared->stop) {
      const uint64_t count = std::max<uint64_t>(1, shared->acknowledged);
      const Found found = small::check_prefix(*engine, conversation(random() % (count + 3)));
      ++shared->loads;
      if (found == Found::kWrong) ++shared->wrong;
      if (engine->stats().damaged > 0) ++shared->failures;
      ::usleep(500);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "reader: %s\n", error.what());
    ++shared->failures;
  }
  _exit(0);
}

template <class Body>
pid_t child(const Body& body) {
  const pid_t process = ::fork();
  if (process == 0) body();
  return process;
}

TEST(writers_are_killed_while_readers_read) {
  const char* wanted = std::getenv("LMD_STORE_KILLS");
  const int kills = wanted == nullptr ? 200 : std::atoi(wanted);
  char pattern[] = "/tmp/lmdecode-kill-XXXXXX";
  const std::string folder = ::mkdtemp(pattern);
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* shared = new (memory) Shared();
  StoreEngine::open(options(folder, false))->close();  // something to read

  std::vector<pid_t> readers;
  for (uint64_t reader = 0; reader < kReaders; ++reader) {
    readers.push_back(child([&] { read(folder, shared, reader); }));
  }
  std::mt19937_64 random(1);
  uint64_t checked = 0;
  for (int kill = 0; kill < kills; ++kill) {
    const uint64_t before = shared->acknowledged;
    const pid_t writer = child([&] { write(folder, shared); });
    ::usleep(static_cast<useconds_t>(2000 + random() % 30000));
    ::kill(writer, SIGKILL);
    ::waitpid(writer, nullptr, 0);
    // The lock went with the process; what it acknowledged is there.
    const auto engine = StoreEngine::open(options(folder, false));
    const uint64_t last = shared->acknowledged;
    for (uint64_t number = std::min(before, last - std::min<uint64_t>(last, 20)); number < last;
         ++number) {
      const Tokens tokens = conversation(number);
      uint64_t found = 0;
      CHECK(small::check_prefix(*engine, tokens, &found) == Found::kRight);
      CHECK_EQ(found, tokens.size());
      ++checked;
    }
    const StoreStats stats = engine->stats();
    CHECK_EQ(stats.used_areas + stats.idle_areas + stats.freed_areas, kAreas);
    engine->close();
  }
  shared->stop = true;
  for (const pid_t reader : readers) ::waitpid(reader, nullptr, 0);
  std::printf("    %d kills, %llu conversations, %llu checked, %llu loads by readers\n", kills,
              static_cast<unsigned long long>(shared->acknowledged.load()),
              static_cast<unsigned long long>(checked),
              static_cast<unsigned long long>(shared->loads.load()));
  CHECK_EQ(shared->wrong.load(), 0u);
  CHECK_EQ(shared->failures.load(), 0u);
  CHECK(shared->acknowledged > 0);
  CHECK(shared->loads > 0);
  const auto engine = StoreEngine::open(options(folder, false));
  CHECK_EQ(engine->verify([](uint64_t, uint64_t) { return true; }).damage.size(), 0u);
  engine->close();
  std::filesystem::remove_all(folder);
}

// A process that is forked while it has the store open may not use it, nor harm it.
TEST(a_forked_child_leaves_the_store_alone) {
  char pattern[] = "/tmp/lmdecode-fork-XXXXXX";
  const std::string folder = ::mkdtemp(pattern);
  {
    auto engine = StoreEngine::open(options(folder, false));
    CHECK_EQ(small::put(*engine, {1, 2, 3}), 3u);
    const pid_t process = child([&] {
      const std::string error = check::error_of([&] { small::put(*engine, {4, 5}); });
      engine.reset();
      _exit(check::contains(error, "fork") ? 0 : 1);
    });
    int status = 0;
    ::waitpid(process, &status, 0);
    CHECK_EQ(status, 0);
    CHECK_EQ(small::put(*engine, {6, 7}), 2u);
  }
  const auto engine = StoreEngine::open(options(folder, false));
  CHECK(small::check_prefix(*engine, {1, 2, 3}) == Found::kRight);
  CHECK(small::check_prefix(*engine, {6, 7}) == Found::kRight);
  engine->close();
  std::filesystem::remove_all(folder);
}

// As a user who may read the store and not write it; root may write everywhere, and becomes nobody.
TEST(a_directory_that_is_read_only_is_a_clear_error_to_writers) {
  namespace fs = std::filesystem;
  char pattern[] = "/tmp/lmdecode-closed-XXXXXX";
  const std::string folder = ::mkdtemp(pattern);
  const auto open_store = [&] {
    auto engine = StoreEngine::open(options(folder, false));
    CHECK_EQ(small::put(*engine, {1, 2, 3}), 3u);
    engine->close();
  };
  open_store();
  const auto allow = [&](fs::perms directories, fs::perms files) {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      fs::permissions(entry.path(), entry.is_directory() ? directories : files);
    }
    fs::permissions(folder, directories);
  };
  allow(static_cast<fs::perms>(0555), static_cast<fs::perms>(0444));
  const pid_t process = child([&] {
    if (::getuid() == 0 && ::setuid(65534) != 0) _exit(9);
    const std::string writer = check::error_of([&] { StoreEngine::open(options(folder, false)); });
    if (!check::contains(writer, folder.c_str()) || !check::contains(writer, "denied")) _exit(1);
    // SQLite reads such an index, or says that it cannot.
    bool is_wrong = false;
    const std::string reader = check::error_of([&] {
      const auto engine = StoreEngine::open(options(folder, true));
      is_wrong = small::check_prefix(*engine, {1, 2, 3}) != Found::kRight;
    });
    _exit(is_wrong || (!reader.empty() && !check::contains(reader, folder.c_str())) ? 2 : 0);
  });
  int status = 0;
  ::waitpid(process, &status, 0);
  CHECK_EQ(status, 0);
  allow(static_cast<fs::perms>(0700), static_cast<fs::perms>(0600));
  open_store();
  fs::remove_all(folder);
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
