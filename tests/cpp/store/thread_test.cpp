// Threads that do everything to a store at once beside a reader, under ThreadSanitizer.
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

constexpr int kThreads = 4, kRounds = 150;

Tokens conversation(std::mt19937_64& random) {
  Tokens tokens;
  const size_t size = 1 + random() % 18;
  for (size_t i = 0; i < size; ++i) tokens.push_back(static_cast<int32_t>(random() % 2));
  return tokens;
}

void hammer(uint32_t areas, bool relaxed) {
  SimulatedDisk disk;
  StoreOptions options = small::options(disk, areas, relaxed);
  options.io_threads = 2;
  auto time = std::make_shared<std::atomic<int64_t>>(1'000'000);
  options.now_ms = [time] { return ++*time; };
  options.flush_interval_ms = relaxed ? 1 : 0;
  std::atomic<uint64_t> wrong{0}, right{0};
  {
    const auto engine = StoreEngine::open(options);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(static_cast<uint64_t>(thread));
        for (int round = 0; round < kRounds; ++round) {
          const Tokens tokens = conversation(random);
          const uint64_t choice = random() % 10;
          if (choice < 5) {
            small::put(*engine, tokens);
          } else if (choice < 6) {
            small::commit(*engine, std::string(1, static_cast<char>('a' + thread)), tokens);
          } else if (choice < 9) {
            const Found found = small::check_prefix(*engine, tokens);
            wrong += found == Found::kWrong;
            right += found == Found::kRight;
          } else if (random() % 8 == 1) {
            engine->erase({}, &tokens, nullptr);
          } else if (random() % 8 == 1) {
            engine->give_space_back(random() % 2 * engine->layout().slot_bytes(), INT64_MAX);
          } else if (random() % 8 == 0) {
            engine->verify([](uint64_t, uint64_t) { return true; });
          } else {
            engine->flush();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(engine->failure(), "");
    const StoreStats stats = engine->stats();
    CHECK_EQ(stats.used_areas + stats.idle_areas + stats.freed_areas, areas);
    CHECK_EQ(stats.damaged, 0u);
    engine->close();
  }
  CHECK_EQ(wrong.load(), 0u);
  CHECK(right.load() > (small::kStateBytes > 0 ? 5 : 50));  // a state is found where it was stored
  const auto again = StoreEngine::open(small::options(disk, areas));
  const VerifyReport report = again->verify([](uint64_t, uint64_t) { return true; });
  CHECK_EQ(report.damage.size(), 0u);
  CHECK(report.entries > 0);
}

TEST(threads_share_a_store_with_room) { hammer(500, false); }
TEST(threads_share_a_store_that_evicts) { hammer(24, false); }
TEST(threads_share_a_relaxed_store) { hammer(24, true); }

// Entries leave one store and enter another, as by a second tier, while both are used.
TEST(threads_pass_entries_to_another_store) {
  SimulatedDisk disks[2];
  std::shared_ptr<StoreEngine> engines[2];
  for (int i = 0; i < 2; ++i) {
    StoreOptions options = small::options(disks[i], i == 0 ? 500 : 24);
    auto time = std::make_shared<std::atomic<int64_t>>(1'000'000);
    options.now_ms = [time] { return ++*time; };
    engines[i] = StoreEngine::open(options);
  }
  std::atomic<uint64_t> wrong{0}, passed{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(static_cast<uint64_t>(thread) + 100);
      for (int round = 0; round < kRounds; ++round) {
        const Tokens tokens = conversation(random);
        small::put(*engines[0], tokens);
        const Hit hit = engines[0]->peek({}, tokens);
        size_t index = 0;
        for (const AreaRow& row : engines[0]->entries_of(hit)) {
          std::vector<uint8_t> image(engines[0]->layout().image_bytes(row.count, row.usable_from));
          if (!engines[0]->read_image(hit, index++, image)) break;
          if (!engines[1]->insert_image({}, row.key, image, {})) break;
          ++passed;
        }
        if (round % 4 == 0) engines[1]->flush();
        wrong += small::check_prefix(*engines[1], tokens) == Found::kWrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0u);
  CHECK(passed.load() > 50);
  for (const auto& engine : engines) {
    CHECK_EQ(engine->verify([](uint64_t, uint64_t) { return true; }).damage.size(), 0u);
  }
}

// Commits that meet share a flush: fewer transactions than puts.
TEST(concurrent_commits_share_a_transaction) {
  SimulatedDisk disk;
  disk.slow_syncs(1);  // long enough for the others to arrive
  const auto engine = StoreEngine::open(small::options(disk, 500));
  std::vector<std::thread> threads;
  std::atomic<int> stored{0};
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      for (int32_t i = 0; i < 20; ++i) {
        const Tokens tokens = {thread, i, i + 1};
        stored += small::put(*engine, tokens) == tokens.size();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(stored.load(), 160);
  CHECK(engine->stats().commits < 100);
  CHECK_EQ(engine->stats().entries, 160u);
}

TEST(a_store_is_closed_under_its_users) {
  for (int round = 0; round < 10; ++round) {
    SimulatedDisk disk;
    const auto engine = StoreEngine::open(small::options(disk, 50));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(static_cast<uint64_t>(10 * round + thread));
        try {
          for (;;) {
            small::put(*engine, conversation(random));
            CHECK(small::check_prefix(*engine, conversation(random)) != Found::kWrong);
          }
        } catch (const StoreError& error) {
          CHECK(check::contains(error.what(), "closed"));
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    engine->close();
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(a_reader_follows_the_writer) {
  SimulatedDisk disk;
  const auto writer = StoreEngine::open(small::options(disk, 12));
  StoreOptions options = small::options(disk, 12);
  options.readonly = true;
  const auto reader = StoreEngine::open(options);
  std::mt19937_64 random(5);
  uint64_t right = 0;
  for (int round = 0; round < 300; ++round) {
    const Tokens tokens = conversation(random);
    uint64_t of_writer = 0, of_reader = 0;
    if (round % 2 == 0) small::put(*writer, tokens);
    CHECK(small::check_prefix(*writer, tokens, &of_writer) != Found::kWrong);
    const Found found = small::check_prefix(*reader, tokens, &of_reader);
    CHECK(found != Found::kWrong);
    CHECK_EQ(of_reader, of_writer);
    right += found == Found::kRight;
  }
  CHECK(right > 50);
  CHECK_EQ(reader->stats().damaged, 0u);
  CHECK_EQ(reader->stats().entries, writer->stats().entries);
  CHECK(check::contains(check::error_of([&] { small::put(*reader, {1}); }), "readonly"));
  CHECK(check::contains(check::error_of([&] { StoreEngine::open(small::options(disk, 12)); }),
                        "has a writer"));
}

// A slot that the writer gave to another prefix between a reader's lookup and its load.
TEST(a_slot_reused_under_a_reader_is_a_miss) {
  SimulatedDisk disk;
  const auto writer = StoreEngine::open(small::options(disk, 2));
  StoreOptions options = small::options(disk, 2);
  options.readonly = true;
  small::put(*writer, {1, 2, 3});
  const auto reader = StoreEngine::open(options);
  Hit hit = reader->lookup({}, Tokens{1, 2, 3});
  CHECK_EQ(hit.num_tokens(), 3u);
  for (int32_t i = 0; i < 4; ++i) small::put(*writer, {9, i, 7});
  small::Cache loaded(3);
  CHECK(!reader->load(hit, 0, small::kLoaded, loaded.planes()));
  CHECK_EQ(reader->stats().damaged, 0u);
  CHECK(small::check_prefix(*reader, {9, 3, 7}) == Found::kRight);
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
