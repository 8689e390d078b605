// Each system call of a run fails in every way: the store may decline, never serve wrong bytes.
#include <functional>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

const Progress kProgress = [](uint64_t, uint64_t) { return true; };

// Prefixes that share, extend and leave one another.
std::vector<Tokens> conversations() {
  std::vector<Tokens> result;
  for (int32_t i = 0; i < 6; ++i) {
    Tokens tokens;
    for (int32_t token = 0; token < 5 + 2 * i; ++token) {
      tokens.push_back(token < 6 ? token : 10 * (i % 3) + token);
    }
    result.push_back(tokens);
  }
  return result;
}

const Tokens kGone = {500, 501, 502, 503, 504, 505, 506};

struct Outcome {
  std::vector<Tokens> acknowledged;
  std::optional<Tokens> session;
  bool erased = false;   // the session "gone" and its tokens
  bool gave_up = false;  // a slot that it could not read, or had to evict for want of space
  uint64_t wrong = 0;
  std::string strange;  // an exception of another kind
};

void guarded(Outcome* outcome, const std::function<void()>& body) {
  try {
    body();
  } catch (const StoreError&) {
    // A clear error is one of the allowed outcomes.
  } catch (const std::exception& error) {
    outcome->strange = error.what();
  }
}

Outcome run(SimulatedDisk& disk, uint32_t areas, bool relaxed) {
  Outcome outcome;
  std::shared_ptr<StoreEngine> engine;
  guarded(&outcome, [&] { engine = StoreEngine::open(small::options(disk, areas, relaxed)); });
  if (engine == nullptr) return outcome;
  for (const Tokens& tokens : conversations()) {
    guarded(&outcome, [&] {
      if (small::put(*engine, tokens) == tokens.size() && !relaxed) {
        outcome.acknowledged.push_back(tokens);
      }
    });
    guarded(&outcome,
            [&] { outcome.wrong += small::check_prefix(*engine, tokens) == Found::kWrong; });
  }
  guarded(&outcome, [&] {
    const Tokens tokens = conversations()[3];
    const uint64_t stored = small::commit(*engine, "session", tokens);
    if (stored == tokens.size() && !relaxed) outcome.session = tokens;
  });
  guarded(&outcome, [&] {
    const std::string name = "gone";
    small::commit(*engine, name, {kGone.begin(), kGone.end() - 1});
    small::commit(*engine, name, kGone);
    if (!engine->read_session({}, name).has_value()) return;
    engine->erase({}, nullptr, &name);
    outcome.erased = true;
  });
  guarded(&outcome, [&] { engine->collect(); });
  guarded(&outcome, [&] { engine->give_space_back(0, INT64_MAX); });
  guarded(&outcome, [&] { engine->verify(kProgress); });
  guarded(&outcome, [&] { engine->backup("/copy/fingerprint", kProgress); });
  guarded(&outcome,
          [&] { outcome.gave_up = engine->stats().damaged > 0 || engine->stats().evicted > 0; });
  guarded(&outcome, [&] { engine->close(); });
  return outcome;
}

void check_afterwards(SimulatedDisk& disk, const Outcome& outcome, bool has_room) {
  const auto engine = StoreEngine::open(small::options(disk, has_room ? 64 : 7));
  for (const Tokens& tokens : conversations()) {
    CHECK(small::check_prefix(*engine, tokens) != Found::kWrong);
  }
  if (has_room && !outcome.gave_up) {
    for (const Tokens& tokens : outcome.acknowledged) {
      uint64_t found = 0;
      small::check_prefix(*engine, tokens, &found);
      CHECK_EQ(found, tokens.size());
    }
  }
  if (outcome.session.has_value()) {
    CHECK(engine->read_session({}, "session") == outcome.session);
  }
  if (outcome.erased) {
    CHECK(!engine->read_session({}, "gone").has_value());
    CHECK_EQ(engine->peek({}, kGone).num_tokens(), 0u);
  }
  const VerifyReport report = engine->verify(kProgress);
  CHECK_EQ(report.damage.size(), 0u);
  const Tokens more = {7, 7, 7, 7, 7};
  CHECK_EQ(small::put(*engine, more), more.size());
}

uint64_t fail_every_call(FaultKind kind, uint64_t count, bool has_room, bool relaxed) {
  std::mt19937_64 random(7);
  for (uint64_t call = 0;; ++call) {
    SimulatedDisk disk;
    disk.fail_from(kind, call, count);
    const Outcome outcome = run(disk, has_room ? 64 : 7, relaxed);
    CHECK_EQ(outcome.wrong, 0u);
    CHECK_EQ(outcome.strange, "");
    const bool failed = disk.faults() > 0;
    check_afterwards(*disk.restarted(), outcome, has_room);
    check_afterwards(*disk.crashed(random), outcome, has_room);
    if (!failed) return call;
  }
}

TEST(every_call_fails_once) {
  for (const bool has_room : {true, false}) {
    for (const bool relaxed : {false, true}) {
      CHECK(fail_every_call(FaultKind::kInputOutput, 1, has_room, relaxed) > 100);
    }
  }
}

TEST(every_call_from_one_on_fails) {
  CHECK(fail_every_call(FaultKind::kInputOutput, UINT64_MAX, true, false) > 100);
}

TEST(the_disk_is_full_once) {
  for (const bool has_room : {true, false}) {
    CHECK(fail_every_call(FaultKind::kNoSpace, 1, has_room, false) > 50);
  }
}

TEST(the_disk_stays_full) {
  for (const bool has_room : {true, false}) {
    CHECK(fail_every_call(FaultKind::kNoSpace, UINT64_MAX, has_room, false) > 50);
  }
}

TEST(every_write_is_short_once) {
  CHECK(fail_every_call(FaultKind::kShortWrite, 1, true, false) > 50);
}

TEST(every_sync_fails_once) {
  for (const bool relaxed : {false, true}) {
    CHECK(fail_every_call(FaultKind::kFailedSync, 1, true, relaxed) > 10);
  }
}

TEST(a_failed_flush_makes_the_store_read_only) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  const Tokens first = {1, 2, 3}, second = {4, 5, 6};
  CHECK_EQ(small::put(*engine, first), 3u);
  disk.fail_from(FaultKind::kFailedSync, 0, 1);
  CHECK_EQ(small::put(*engine, second), 0u);
  CHECK(engine->failure() != "");
  CHECK_EQ(small::put(*engine, {8, 9}), 0u);  // though syncs would say yes again
  CHECK(small::check_prefix(*engine, first) == Found::kRight);
}

TEST(a_full_disk_is_survived_by_eviction) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 64));
  for (int32_t i = 0; i < 4; ++i) CHECK_EQ(small::put(*engine, {i, i, i}), 3u);
  // The next slot has no room; those that there are have theirs.
  disk.fail_from(FaultKind::kNoSpace, 0, 1);
  CHECK_EQ(small::put(*engine, {9, 9, 9}), 3u);
  CHECK_EQ(engine->failure(), "");
  CHECK(engine->stats().evicted > 0);
  CHECK(small::check_prefix(*engine, {9, 9, 9}) == Found::kRight);
  CHECK_EQ(engine->stats().unusable_areas, 1u);
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
