// A disk without space, at every size around what the store would take: it keeps and goes on.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

constexpr uint32_t kAreas = 128;
constexpr int32_t kPuts = 40;

// Prefixes of one to three slots, tails among them.
Tokens prefix(int32_t number) {
  Tokens tokens(static_cast<size_t>(3 + number % 3 * 4), number);
  return tokens;
}

std::set<Digest> keys_of(StoreEngine& engine) {
  std::set<Digest> keys;
  for (const AreaRow& row : engine.entries()) keys.insert(row.key);
  return keys;
}

std::shared_ptr<StoreEngine> open(SimulatedDisk& disk) {
  try {
    return StoreEngine::open(small::options(disk, kAreas));
  } catch (const StoreError& error) {
    CHECK_EQ(error.error_number(), ENOSPC);
    CHECK(std::string(error.what()).find(small::kDirectory) != std::string::npos);
    return nullptr;
  }
}

struct Life {
  uint64_t stored = 0, declined = 0, evicted = 0;
  // What a session was last acknowledged to be, and what was tried since.
  std::map<std::string, std::vector<Tokens>> sessions;
};

// Puts and commits that do not fit; returns what came of them.
Life live(StoreEngine& engine) {
  Life life;
  for (int32_t i = 0; i < kPuts; ++i) {
    const Tokens tokens = prefix(i);
    const auto before = keys_of(engine);
    const uint64_t evicted_before = engine.stats().evicted;
    const bool is_commit = i % 4 == 3;
    const std::string session(1, static_cast<char>('a' + i % 3));
    if (is_commit) life.sessions[session].push_back(tokens);
    const uint64_t stored =
        is_commit ? small::commit(engine, session, tokens) : small::put(engine, tokens);
    const StoreStats stats = engine.stats();
    if (stored == tokens.size()) {
      ++life.stored;
      CHECK_EQ(engine.failure(), "");
      CHECK(small::check_prefix(engine, tokens) == Found::kRight);
      if (is_commit) life.sessions[session] = {tokens};
    } else {
      ++life.declined;
      CHECK(engine.failure() != "");
    }
    // What is gone was evicted, and no more than that.
    const auto after = keys_of(engine);
    uint64_t gone = 0;
    for (const Digest& key : before) gone += after.contains(key) ? 0 : 1;
    CHECK_EQ(gone, stats.evicted - evicted_before);
    life.evicted = stats.evicted;
  }
  for (int32_t i = 0; i < kPuts; ++i) {
    CHECK(small::check_prefix(engine, prefix(i)) != Found::kWrong);
  }
  return life;
}

// One after another, so that none is hidden by a longer one.
void check_all_readable(StoreEngine& engine) {
  const VerifyReport report = engine.verify([](uint64_t, uint64_t) { return true; });
  CHECK_EQ(report.damage.size(), 0u);
}

TEST(at_every_size_what_is_not_replaced_stays) {
  uint64_t largest = 0;
  {
    SimulatedDisk disk;
    const auto engine = StoreEngine::open(small::options(disk, kAreas));
    live(*engine);
    largest = disk.used_bytes();
  }
  uint64_t opened = 0, full = 0, smallest = 0, last_declined = 0;
  for (uint64_t limit = kSector; limit < largest + 64 * kSector; limit += kSector) {
    SimulatedDisk disk;
    disk.limit_to(limit);
    auto engine = open(disk);
    if (engine == nullptr) continue;
    ++opened;
    if (smallest == 0) smallest = limit;
    const Life life = live(*engine);
    if (life.declined > 0) last_declined = std::max(last_declined, limit);
    full += life.evicted > 0 || life.declined > 0;
    const auto held = keys_of(*engine);
    check_all_readable(*engine);
    engine->close();
    engine.reset();
    const auto restarted = disk.restarted();
    restarted->limit_to(limit);
    const auto again = open(*restarted);
    CHECK(again != nullptr);
    if (again == nullptr) continue;
    if (life.declined == 0) CHECK(keys_of(*again) == held);
    for (const auto& [name, attempts] : life.sessions) {
      const auto tokens = again->read_session({}, name);
      CHECK(tokens.has_value() && std::count(attempts.begin(), attempts.end(), *tokens) > 0);
    }
    check_all_readable(*again);
    // And there is space again: nothing has to go.
    restarted->limit_to(UINT64_MAX);
    const uint64_t evicted = again->stats().evicted;
    const Tokens more = {91, 92, 93};
    CHECK_EQ(small::put(*again, more), more.size());
    CHECK_EQ(again->stats().evicted, evicted);
    CHECK_EQ(again->failure(), "");
  }
  std::printf("    %llu sizes from %llu bytes on, %llu of them full; all is stored from %llu on\n",
              static_cast<unsigned long long>(opened), static_cast<unsigned long long>(smallest),
              static_cast<unsigned long long>(full),
              static_cast<unsigned long long>(last_declined + kSector));
  // Beside the index there is room for one prefix: then each replaces an older one.
  CHECK(last_declined < smallest + (uint64_t{1} << 16));
  CHECK(full > 200);
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
