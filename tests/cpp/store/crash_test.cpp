// Every state that a loss of power may leave: the store runs on a simulated disk that loses power
// at a random call; each state of a sample of those allowed is opened and looked at. Nothing wrong
// may be served, nothing acknowledged may be lost, no slot may belong to two entries, and the store
// must go on. SQLite's own files are on the same disk.
//
// Built with a fault planted (LMD_PLANT_...), the same must notice it. LMD_STORE_CRASH_STATES sets
// the number of states, LMD_STORE_CRASH_SEED the first seed.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Findings {
  uint64_t states = 0;
  uint64_t wrong = 0;    // bytes other than those stored
  uint64_t lost = 0;     // acknowledged, durable and not evicted, but not found
  uint64_t damaged = 0;  // the index refers to a slot that does not hold it
  uint64_t leaked = 0;   // free and used areas are not all
  uint64_t not_opened = 0;
  uint64_t stuck = 0;  // opened, but does not go on
  std::string first;   // what was found first

  uint64_t all() const { return wrong + lost + damaged + leaked + not_opened + stuck; }
  void note(uint64_t Findings::* kind, uint64_t seed, const std::string& what) {
    ++(this->*kind);
    if (first.empty()) first = "seed " + std::to_string(seed) + ": " + what;
  }
};

struct Settings {
  uint32_t areas = 10;
  bool relaxed = false;
  int64_t idle_ms = 60000;  // 0: a freed area is the next to be used
  std::string ignored_syncs = {};
};

// What was promised before the power went.
struct Promises {
  std::map<Digest, uint64_t> entries;  // durable, and still in the map: key to sequence
  std::map<std::string, Tokens> sessions;
  // Commits since, which may or may not be durable: the last one, or one before it.
  std::map<std::string, std::vector<Tokens>> attempted;
  std::set<Tokens> erased;  // and not stored again
};

class Run {
 public:
  Run(uint64_t seed, const Settings& settings, Findings* findings)
      : random_(seed), seed_(seed), settings_(settings), findings_(findings) {}

  void live(int lives, int states_each) {
    auto disk = std::make_unique<SimulatedDisk>();
    for (int life = 0; life < lives; ++life) {
      disk->ignore_syncs_of(settings_.ignored_syncs);
      disk->lose_power_at(1 + random_() % (life == 0 ? 700 : 400));
      work(*disk);
      for (int state = 0; state < states_each; ++state) check(*disk->crashed(random_));
      disk = disk->crashed(random_);
      forget_what_was_lost(*disk);
    }
  }

 private:
  StoreOptions settings_for(SimulatedDisk& disk, bool relaxed) const {
    StoreOptions options = small::options(disk, settings_.areas, relaxed);
    options.idle_ms = settings_.idle_ms;
    return options;
  }

  Tokens conversation() {
    // Few tokens to choose from: prefixes are shared, forked and extended.
    Tokens tokens;
    const size_t size = 1 + random_() % 14;
    for (size_t i = 0; i < size; ++i) {
      tokens.push_back(static_cast<int32_t>(random_() % (i % 4 == 0 ? 3 : 2)));
    }
    return tokens;
  }

  void promise(StoreEngine& engine) {
    promises_.entries.clear();
    for (const AreaRow& row : engine.entries()) promises_.entries[row.key] = row.sequence;
  }

  // Until the power goes, or long enough.
  void work(SimulatedDisk& disk) {
    std::shared_ptr<StoreEngine> engine;
    try {
      engine = StoreEngine::open(settings_for(disk, settings_.relaxed));
    } catch (const std::exception& error) {
      if (!disk.power_is_lost()) findings_->note(&Findings::not_opened, seed_, error.what());
      return;
    }
    if (!settings_.relaxed) promise(*engine);
    while (!disk.power_is_lost()) {
      try {
        act(*engine, disk);
      } catch (const StoreError& error) {
        if (!disk.power_is_lost()) findings_->note(&Findings::stuck, seed_, error.what());
      }
    }
    // What it evicted meanwhile may be gone.
    std::set<std::pair<Digest, uint64_t>> held;
    for (const AreaRow& row : engine->entries()) held.insert({row.key, row.sequence});
    std::erase_if(promises_.entries, [&](const auto& entry) { return !held.contains(entry); });
  }

  void act(StoreEngine& engine, SimulatedDisk& disk) {
    const Tokens tokens = conversation();
    known_.insert(tokens);
    const uint64_t choice = random_() % 16;
    bool is_durable = !settings_.relaxed;
    if (choice < 12) forget_erased(tokens);
    if (choice < 8) {
      small::put(engine, tokens);
    } else if (choice < 12) {
      const std::string name(1, static_cast<char>('a' + random_() % 3));
      promises_.attempted[name].push_back(tokens);
      small::commit(engine, name, tokens);
      if (!disk.power_is_lost() && is_durable) promises_.sessions[name] = tokens;
    } else if (choice < 14) {
      if (small::check_prefix(engine, tokens) == Found::kWrong) {
        findings_->note(&Findings::wrong, seed_, "while it ran");
      }
    } else if (choice == 15 && random_() % 2 == 0) {
      erase(engine, tokens);
      is_durable = true;
      if (settings_.relaxed && !disk.power_is_lost()) {
        for (const auto& [name, attempts] : promises_.attempted) {
          promises_.sessions[name] = attempts.back();
        }
      }
    } else if (choice == 14) {
      engine.flush();
      is_durable = true;
      if (settings_.relaxed && !disk.power_is_lost()) {
        for (const auto& [name, attempts] : promises_.attempted) {
          promises_.sessions[name] = attempts.back();
        }
      }
    } else if (random_() % 2 == 0) {
      engine.collect();
    } else {
      engine.give_space_back(random_() % 3 * engine.layout().slot_bytes(), INT64_MAX);
    }
    if (disk.power_is_lost() || !is_durable) return;
    promise(engine);
    promises_.attempted.clear();
  }

  // They are stored again, with what they begin with.
  void forget_erased(const Tokens& tokens) {
    std::erase_if(promises_.erased, [&](const Tokens& erased) {
      return erased.size() <= tokens.size() &&
             std::equal(erased.begin(), erased.end(), tokens.begin());
    });
  }

  // A crash within leaves what is erased whole or gone, the session too.
  void erase(StoreEngine& engine, const Tokens& tokens) {
    const uint64_t what = random_() % 3;
    const std::string name(1, static_cast<char>('a' + random_() % 3));
    if (what == 2 || !engine.read_session({}, name).has_value()) {
      engine.erase({}, &tokens, nullptr);
      promises_.erased.insert(tokens);
      if (engine.lookup({}, tokens).num_tokens() == tokens.size()) {
        findings_->note(&Findings::wrong, seed_, "erased tokens are found");
      }
      return;
    }
    promises_.sessions.erase(name);
    engine.erase({}, nullptr, &name);
    promises_.attempted.erase(name);
  }

  void forget_what_was_lost(SimulatedDisk& disk) {
    // The next life goes on from one of the states: there, what was under way came out one way.
    auto copy = disk.restarted();
    try {
      const auto engine = StoreEngine::open(settings_for(*copy, false));
      promise(*engine);
      promises_.sessions.clear();
      for (const char* name : {"a", "b", "c"}) {
        const auto tokens = engine->read_session({}, name);
        if (tokens.has_value()) promises_.sessions[name] = *tokens;
      }
    } catch (const std::exception&) {
      promises_.entries.clear();
      promises_.sessions.clear();
    }
    promises_.attempted.clear();
  }

  void check(SimulatedDisk& disk) {
    ++findings_->states;
    try {
      const auto engine = StoreEngine::open(settings_for(disk, false));
      check_opened(*engine);
      // And it goes on.
      const Tokens tokens = conversation();
      known_.insert(tokens);
      small::put(*engine, tokens);
      if (!engine->failure().empty() || small::check_prefix(*engine, tokens) != Found::kRight) {
        findings_->note(&Findings::stuck, seed_, "a put after recovery: " + engine->failure());
      }
      engine->close();
    } catch (const std::exception& error) {
      findings_->note(&Findings::not_opened, seed_, error.what());
    }
  }

  void check_opened(StoreEngine& engine) {
    std::set<Digest> keys;
    std::set<uint32_t> areas;
    for (const AreaRow& row : engine.entries()) {
      keys.insert(row.key);
      if (!areas.insert(row.area).second) {
        findings_->note(&Findings::leaked, seed_, "an area with two owners");
      }
    }
    for (const auto& [key, sequence] : promises_.entries) {
      if (!keys.contains(key)) findings_->note(&Findings::lost, seed_, "an entry");
    }
    for (const auto& [name, tokens] : promises_.sessions) {
      const auto stored = engine.read_session({}, name);
      const auto attempt = promises_.attempted.find(name);
      const bool is_new = attempt != promises_.attempted.end() && stored.has_value() &&
                          std::count(attempt->second.begin(), attempt->second.end(), *stored) > 0;
      if (stored != tokens && !is_new) findings_->note(&Findings::lost, seed_, "a session");
    }
    for (const Tokens& tokens : promises_.erased) {
      if (engine.peek({}, tokens).num_tokens() == tokens.size()) {
        findings_->note(&Findings::wrong, seed_, "erased tokens are found after a crash");
      }
    }
    const StoreStats stats = engine.stats();
    if (stats.used_areas + stats.idle_areas + stats.freed_areas != settings_.areas) {
      findings_->note(&Findings::leaked, seed_,
                      "of " + std::to_string(settings_.areas) + " areas " +
                          std::to_string(stats.used_areas) + " are used, " +
                          std::to_string(stats.idle_areas) + " idle, " +
                          std::to_string(stats.freed_areas) + " freed");
    }
    for (const Tokens& tokens : known_) {
      if (small::check_prefix(engine, tokens) == Found::kWrong) {
        findings_->note(&Findings::wrong, seed_, "after a crash");
      }
    }
    const VerifyReport report = engine.verify([](uint64_t, uint64_t) { return true; });
    const uint64_t damaged = report.damage.size() + engine.stats().damaged;
    if (damaged > 0) {
      findings_->note(&Findings::damaged, seed_,
                      report.damage.empty() ? "an entry" : report.damage.front());
    }
  }

  std::mt19937_64 random_;
  const uint64_t seed_;
  const Settings settings_;
  Findings* const findings_;
  std::set<Tokens> known_;
  Promises promises_;
};

constexpr int kLives = 4, kStatesEach = 25;

Findings enumerate(const Settings& settings, uint64_t states) {
  Findings findings;
  const uint64_t first = from_environment("LMD_STORE_CRASH_SEED", 1);
  for (uint64_t seed = first; findings.states < states; ++seed) {
    Run(seed, settings, &findings).live(kLives, kStatesEach);
  }
  std::printf(
      "    %llu states from seed %llu: %llu wrong, %llu lost, %llu damaged, %llu leaked, "
      "%llu not opened, %llu stuck\n",
      static_cast<unsigned long long>(findings.states), static_cast<unsigned long long>(first),
      static_cast<unsigned long long>(findings.wrong),
      static_cast<unsigned long long>(findings.lost),
      static_cast<unsigned long long>(findings.damaged),
      static_cast<unsigned long long>(findings.leaked),
      static_cast<unsigned long long>(findings.not_opened),
      static_cast<unsigned long long>(findings.stuck));
  return findings;
}

#if !defined(LMD_PLANT_NO_QUARANTINE) && !defined(LMD_PLANT_NO_VERIFICATION)

const uint64_t kStates = from_environment("LMD_STORE_CRASH_STATES", 10000);

TEST(strict_with_eviction) {
  const Findings findings = enumerate({.areas = 10}, kStates / 2);
  CHECK_EQ(findings.first, "");
  CHECK_EQ(findings.all(), 0u);
}

TEST(strict_with_room) {
  const Findings findings = enumerate({.areas = 200, .idle_ms = 0}, kStates / 4);
  CHECK_EQ(findings.first, "");
  CHECK_EQ(findings.all(), 0u);
}

TEST(relaxed_loses_only_what_was_not_flushed) {
  const Findings findings = enumerate({.areas = 20, .relaxed = true, .idle_ms = 0}, kStates / 4);
  CHECK_EQ(findings.first, "");
  CHECK_EQ(findings.all(), 0u);
}

// The system goes on where the process is killed: all that was acknowledged is there, unflushed.
TEST(relaxed_loses_nothing_when_the_process_is_killed) {
  std::mt19937_64 random(from_environment("LMD_STORE_CRASH_SEED", 1));
  uint64_t found = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<std::unique_ptr<SimulatedDisk>>
        disks;  // engines that are "killed" still close them
    disks.push_back(std::make_unique<SimulatedDisk>());
    std::set<Tokens> known;
    for (int life = 0; life < 4; ++life) {
      SimulatedDisk& disk = *disks.back();
      const auto engine = StoreEngine::open(small::options(disk, 12, /*relaxed=*/true));
      for (uint64_t left = random() % 12; left > 0; --left) {
        Tokens tokens(1 + random() % 14);
        for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 2);
        known.insert(tokens);
        if (random() % 3 == 0) {
          small::commit(*engine, std::string(1, static_cast<char>('a' + random() % 2)), tokens);
        } else if (random() % 6 == 0) {
          engine->flush();
        } else {
          small::put(*engine, tokens);
        }
      }
      auto killed = disk.restarted();
      const auto reopened = StoreEngine::open(small::options(*killed, 12, random() % 2 == 0));
      const auto keys = [](StoreEngine& engine) {
        std::set<std::pair<Digest, uint32_t>> keys;
        for (const AreaRow& row : engine.entries()) keys.insert({row.key, row.area});
        return keys;
      };
      CHECK(keys(*reopened) == keys(*engine));
      for (const char* name : {"a", "b"}) {
        CHECK(reopened->read_session({}, name) == engine->read_session({}, name));
      }
      for (const Tokens& tokens : known) {
        const Found one = small::check_prefix(*engine, tokens);
        CHECK(small::check_prefix(*reopened, tokens) == one && one != Found::kWrong);
        found += one == Found::kRight ? 1 : 0;
      }
      const StoreStats stats = reopened->stats();
      CHECK_EQ(stats.used_areas + stats.idle_areas + stats.freed_areas, 12u);
      // Two more of them: what this one recovered is not lost, and a power cut leaves no damage.
      const auto again = killed->restarted();
      CHECK(keys(*StoreEngine::open(small::options(*again, 12, true))) == keys(*engine));
      const auto crashed = disk.crashed(random);
      const auto after = StoreEngine::open(small::options(*crashed, 12, true));
      CHECK(after->verify([](uint64_t, uint64_t) { return true; }).damage.empty());
      disks.push_back(killed->restarted());
    }
  }
  CHECK(found > 500);
}

// Power goes at every call of an erasure: once the tokens are not found, no slot holds them either.
TEST(what_is_erased_is_overwritten_after_a_crash_too) {
  const Tokens tokens = {1234567, 2345678, 3456789}, longer = {1234567, 2345678, 3456789, 4567890};
  const std::string slab = std::string(small::kDirectory) + "/slab-00000";
  const auto holds_it = [&](SimulatedDisk& disk) {
    const std::vector<uint8_t>& bytes = disk.file(slab)->visible;
    const auto* first = reinterpret_cast<const uint8_t*>(tokens.data());
    return std::search(bytes.begin(), bytes.end(), first, first + 4 * tokens.size()) != bytes.end();
  };
  std::mt19937_64 random(1);
  uint64_t erased = 0;
  for (uint64_t call = 1;; ++call) {
    SimulatedDisk disk;
    const auto engine = StoreEngine::open(small::options(disk, 10));
    small::commit(*engine, "a", tokens);
    small::commit(*engine, "a", longer);  // the shorter one's slot is free, and holds it still
    CHECK(holds_it(disk));
    disk.lose_power_at(disk.calls() + call);
    try {
      const std::string name = "a";
      engine->erase({}, nullptr, &name);
    } catch (const StoreError&) {
      CHECK(disk.power_is_lost());
    }
    const bool is_done = !disk.power_is_lost();
    for (int state = 0; state < 4; ++state) {
      const auto after = disk.crashed(random);
      const auto again = StoreEngine::open(small::options(*after, 10));
      const bool is_found = again->lookup({}, tokens).num_tokens() > 0;
      CHECK_EQ(is_found, again->read_session({}, "a").has_value());
      CHECK_EQ(is_found, holds_it(*after));
      CHECK(!is_done || !is_found);
      erased += !is_found;
      again->close();
    }
    if (is_done) break;
  }
  CHECK(erased > 10);
}

// Mutants: what these tests would say of a store that forgets a flush.
TEST(a_dropped_flush_of_the_slots_is_noticed) {
  const Findings findings = enumerate({.areas = 10, .ignored_syncs = "slab"}, 400);
  CHECK(findings.damaged > 0);
  CHECK_EQ(findings.wrong, 0u);  // what is damaged is a miss
}

TEST(a_dropped_flush_of_the_index_is_noticed) {
  const Findings findings = enumerate({.areas = 10, .ignored_syncs = "-wal"}, 400);
  CHECK(findings.lost > 0);
  CHECK_EQ(findings.wrong, 0u);
}

#elif defined(LMD_PLANT_NO_QUARANTINE)

TEST(a_freed_area_that_is_reused_at_once_is_noticed) {
  // Between a deletion and its commit there is another put only where those do not wait.
  CHECK(enumerate({.areas = 200, .relaxed = true, .idle_ms = 0}, 2000).damaged > 0);
}

#else

TEST(without_verification_a_dropped_flush_serves_wrong_bytes) {
  CHECK(enumerate({.areas = 10, .ignored_syncs = "slab"}, 400).wrong > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
