// Whole entries that leave one store and enter another: what arrives is trusted in nothing.
#include <algorithm>
#include <random>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;
using Image = std::vector<uint8_t>;

const Tokens kTokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};  // two chunks of four and a tail of two

struct Entry {
  Digest key;
  Image image;
};

std::vector<Entry> images(StoreEngine& engine, const Tokens& tokens) {
  const Hit hit = engine.peek({}, tokens);
  std::vector<Entry> result;
  for (const AreaRow& row : engine.entries_of(hit)) {
    Entry entry{row.key, Image(engine.layout().image_bytes(row.count, row.usable_from))};
    if (!engine.read_image(hit, result.size(), entry.image)) break;
    result.push_back(std::move(entry));
  }
  return result;
}

std::vector<Entry> written() {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  small::put(*engine, kTokens);
  return images(*engine, kTokens);
}

void expect_whole(StoreEngine& engine, uint64_t areas) {
  const StoreStats stats = engine.stats();
  CHECK_EQ(stats.used_areas + stats.idle_areas + stats.freed_areas, areas);
  CHECK_EQ(engine.verify([](uint64_t, uint64_t) { return true; }).damage.size(), 0u);
}

TEST(entries_pass_to_another_store_and_survive_there) {
  SimulatedDisk disk;
  {
    const auto engine = StoreEngine::open(small::options(disk, 16));
    for (Entry& entry : written()) CHECK(engine->insert_image({}, entry.key, entry.image, {}));
    uint64_t found = 0;
    CHECK(small::check_prefix(*engine, kTokens, &found) == Found::kRight);
    CHECK_EQ(found, kTokens.size());
    // Once more: they are known.
    for (Entry& entry : written()) CHECK(engine->insert_image({}, entry.key, entry.image, {}));
    CHECK_EQ(engine->stats().entries, 3u);
    CHECK(engine->flush());
  }
  const auto again = StoreEngine::open(small::options(disk, 16));
  CHECK(small::check_prefix(*again, kTokens) == Found::kRight);
  expect_whole(*again, 16);
}

TEST(an_entry_needs_what_it_continues_and_its_own_key) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  std::vector<Entry> entries = written();
  CHECK_EQ(entries.size(), 3u);
  CHECK(!engine->insert_image({}, entries[1].key, entries[1].image, {}));
  CHECK(!engine->insert_image({}, entries[1].key, entries[0].image, {}));
  CHECK(engine->insert_image({}, entries[0].key, entries[0].image, {}));
  entries = written();
  CHECK(engine->insert_image({}, entries[1].key, entries[1].image, {}));
  expect_whole(*engine, 16);
}

TEST(peek_is_no_use) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 2));
  small::put(*engine, {1, 2});
  small::put(*engine, {3, 4});
  CHECK_EQ(engine->peek({}, Tokens{1, 2}).num_tokens(), 2u);
  CHECK_EQ(engine->stats().hits + engine->stats().misses, 0u);
  small::put(*engine, {5, 6});
  CHECK_EQ(engine->peek({}, Tokens{1, 2}).num_tokens(), 0u);  // the oldest still
  CHECK_EQ(engine->peek({}, Tokens{3, 4}).num_tokens(), 2u);
}

TEST(a_damaged_slot_gives_no_image) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  small::put(*engine, kTokens);
  const uint64_t in_second = engine->layout().slot_bytes() + engine->layout().plane_offset(1, 4);
  disk.file("/store/fingerprint/slab-00000")->visible.at(in_second) ^= 1;
  CHECK_EQ(images(*engine, kTokens).size(), 1u);
  CHECK_EQ(engine->stats().damaged, 1u);
}

// Only bytes that mean nothing elsewhere (the slot's number, the tenant, padding) may differ.
TEST(a_flipped_bit_is_refused_or_changes_nothing) {
  const std::vector<Entry> pristine = written();
  const size_t size = pristine[0].image.size();
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  uint64_t taken = 0;
  for (size_t byte = 0; byte < size; byte += byte < 200 ? 1 : 37) {
    for (const int bit : {0, 7}) {
      Entry entry = pristine[0];
      entry.image[byte] ^= static_cast<uint8_t>(1 << bit);
      if (!engine->insert_image({}, entry.key, entry.image, {})) continue;
      ++taken;
      const Tokens prefix(kTokens.begin(), kTokens.begin() + 4);
      CHECK(small::check_prefix(*engine, prefix) == Found::kRight);
    }
  }
  CHECK(taken > 0);
  const uint64_t planes = engine->layout().plane_offset(0, 4);
  for (uint64_t at = planes; at < planes + engine->layout().plane_bytes(0, 4); ++at) {
    SimulatedDisk other_disk;
    if (at % 16 != 0) continue;
    const auto other = StoreEngine::open(small::options(other_disk, 4));
    Entry entry = pristine[0];
    entry.image[at] ^= 4;
    CHECK(!other->insert_image({}, entry.key, entry.image, {}));
    expect_whole(*other, 4);
  }
  expect_whole(*engine, 16);
}

TEST(images_that_somebody_made_up_are_refused) {
  const std::vector<Entry> pristine = written();
  std::mt19937_64 random(7);
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  for (int round = 0; round < 3000; ++round) {
    Entry entry = pristine[random() % pristine.size()];
    Image& image = entry.image;
    const uint64_t kind = random() % 3;
    if (kind == 0) {
      image.resize(random() % (2 * image.size()));  // truncated, or too long
    } else if (kind == 1) {
      for (int i = 0; i < 8; ++i) image[8 + random() % 40] = static_cast<uint8_t>(random());
    } else {
      for (uint8_t& byte : image) byte = static_cast<uint8_t>(random());
    }
    if (image == pristine[0].image || image.empty()) continue;
    engine->insert_image({}, entry.key, image, {});
  }
  uint64_t found = 0;
  CHECK(small::check_prefix(*engine, kTokens, &found) != Found::kWrong);
  expect_whole(*engine, 16);
}

TEST(a_full_store_and_a_full_disk_decline) {
  SimulatedDisk disk;
  const auto engine = StoreEngine::open(small::options(disk, 2));
  std::vector<Entry> entries = written();
  CHECK(engine->insert_image({}, entries[0].key, entries[0].image, {}));
  CHECK(engine->insert_image({}, entries[1].key, entries[1].image, {}));
  CHECK(!engine->insert_image({}, entries[2].key, entries[2].image, {}));
  PutOptions poor;
  poor.quota_bytes = 1;
  SimulatedDisk other_disk;
  const auto other = StoreEngine::open(small::options(other_disk, 4));
  entries = written();
  CHECK(!other->insert_image({}, entries[0].key, entries[0].image, poor));
  expect_whole(*engine, 2);
  expect_whole(*other, 4);
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
