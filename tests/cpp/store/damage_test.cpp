// Flipped bits in every class of byte of slots, index and exports, and headers made up.
#include <algorithm>
#include <set>

#include "check.h"
#include "simulated_disk.h"
#include "small_store.h"
#include "store/bytes.h"
#include "store/crc32c.h"

namespace lmdecode::store {
namespace {

using small::Found;
using Tokens = std::vector<int32_t>;

const Progress kProgress = [](uint64_t, uint64_t) { return true; };
const Tokens kTokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
constexpr const char* kSlab = "/store/fingerprint/slab-00000";
constexpr const char* kIndex = "/store/fingerprint/index.sqlite";

SlotLayout layout() { return {{small::kLayers, small::kHeads, small::kHeadSize, 4, {}}, 4, true}; }

// A closed store with one conversation and one session.
std::unique_ptr<SimulatedDisk> written() {
  auto disk = std::make_unique<SimulatedDisk>();
  const auto engine = StoreEngine::open(small::options(*disk, 16));
  small::commit(*engine, "session", kTokens);
  engine->close();
  return disk;
}

void flip(SimulatedDisk& disk, const char* path, uint64_t byte, int bit) {
  disk.file(path)->visible.at(byte) ^= static_cast<uint8_t>(1 << bit);
}

TEST(a_flipped_bit_of_a_slot_is_a_miss_and_the_rest_goes_on) {
  const SlotLayout slot = layout();
  const auto pristine = written();
  // The first slot: magic, version, sizes, numbers, key, parent, checksums, tokens, padding,
  // planes.
  std::vector<uint64_t> bytes = {0,  7,  8,  12,  16,  24,  32,  36,  40,  44,   48,
                                 56, 79, 88, 119, 120, 135, 136, 151, 152, 1000, 4095};
  for (uint32_t plane = 0; plane < slot.shape.num_planes(); ++plane) {
    for (const uint64_t byte :
         {uint64_t{0}, slot.plane_bytes(plane, 4) / 2, slot.plane_bytes(plane, 4) - 1}) {
      bytes.push_back(slot.plane_offset(plane, 4) + byte);
    }
  }
  for (const uint64_t byte : bytes) {
    for (const int bit : {0, 7}) {
      const auto disk = pristine->restarted();
      flip(*disk, kSlab, byte, bit);
      const auto engine = StoreEngine::open(small::options(*disk, 16));
      CHECK(small::check_prefix(*engine, kTokens) == Found::kMiss);
      CHECK_EQ(engine->stats().damaged, 1u);
      // Recomputed and stored again, it is there, and survives.
      CHECK_EQ(small::put(*engine, kTokens), kTokens.size());
      CHECK(small::check_prefix(*engine, kTokens) == Found::kRight);
      const StoreStats stats = engine->stats();
      CHECK_EQ(stats.used_areas + stats.idle_areas + stats.freed_areas, 16u);
    }
  }
}

TEST(verify_names_the_damage) {
  const auto disk = written();
  flip(*disk, kSlab, layout().slot_bytes() + layout().plane_offset(2, 4), 3);
  const auto engine = StoreEngine::open(small::options(*disk, 16));
  const VerifyReport report = engine->verify(kProgress);
  CHECK_EQ(report.entries, 3u);
  CHECK_EQ(report.damage.size(), 1u);
  uint64_t found = 0;
  CHECK(small::check_prefix(*engine, kTokens, &found) == Found::kRight);
  CHECK_EQ(found, 4u);  // what comes before it is still there
}

// Slots that are whole, but not where they belong, or of another time.
TEST(misdirected_and_stale_slots_are_misses) {
  const uint64_t slot = layout().slot_bytes();
  const auto pristine = written();
  {
    const auto disk = pristine->restarted();
    auto& bytes = disk->file(kSlab)->visible;
    std::copy(bytes.begin(), bytes.begin() + static_cast<int64_t>(slot),
              bytes.begin() + static_cast<int64_t>(slot));
    const auto engine = StoreEngine::open(small::options(*disk, 16));
    CHECK(small::check_prefix(*engine, kTokens) != Found::kWrong);
    CHECK_EQ(engine->stats().damaged, 1u);
  }
  {
    const auto disk = pristine->restarted();
    const auto other = written();  // the same prefix of another time would be the same bytes
    const auto another = StoreEngine::open(small::options(*other, 16));
    auto& bytes = disk->file(kSlab)->visible;
    bytes.resize(slot);  // the rest of the file is gone
    const auto engine = StoreEngine::open(small::options(*disk, 16));
    uint64_t found = 0;
    CHECK(small::check_prefix(*engine, kTokens, &found) != Found::kWrong);
    CHECK(small::check_prefix(*engine, kTokens, &found) == Found::kRight);
    CHECK_EQ(found, 4u);
  }
}

TEST(a_flipped_bit_of_the_index_is_an_error_or_a_miss) {
  const auto pristine = written();
  const uint64_t size = pristine->file(kIndex)->visible.size();
  uint64_t errors = 0, misses = 0, unchanged = 0;
  for (uint64_t byte = 0; byte < size; byte += 5) {
    const auto disk = pristine->restarted();
    flip(*disk, kIndex, byte, static_cast<int>(byte % 8));
    try {
      const auto engine = StoreEngine::open(small::options(*disk, 16));
      const Found found = small::check_prefix(*engine, kTokens);
      CHECK(found != Found::kWrong);
      ++(found == Found::kMiss ? misses : unchanged);
      const auto session = engine->read_session({}, "session");
      CHECK(!session.has_value() || *session == kTokens);
      small::put(*engine, {5, 5, 5});
      CHECK(small::check_prefix(*engine, {5, 5, 5}) != Found::kWrong);
    } catch (const StoreError& error) {
      ++errors;
      CHECK(std::string(error.what()).size() > 10);
    }
  }
  CHECK(errors > 10);
  CHECK(misses > 10);
  CHECK(unchanged > 10);
}

TEST(files_that_are_no_index_are_errors) {
  for (const std::vector<uint8_t>& content :
       {std::vector<uint8_t>(4096, 0xab), std::vector<uint8_t>(100, 'x')}) {
    const auto disk = written();
    disk->file(kIndex)->visible = content;
    const std::string error =
        check::error_of([&] { StoreEngine::open(small::options(*disk, 16)); });
    CHECK(check::contains(error, "index"));
  }
}

// ---- exported files

std::vector<uint8_t> exported() {
  const auto disk = written();
  const auto engine = StoreEngine::open(small::options(*disk, 16));
  engine->export_to("/store/file", nullptr, "", kProgress);
  return disk->file("/store/file")->visible;
}

// Imports a file into an empty store; what became of it.
std::string import_of(const std::vector<uint8_t>& content, uint64_t* added,
                      Found* found = nullptr) {
  SimulatedDisk disk;
  int error = 0;
  disk.open("/store/file", OpenMode::kCreate, &error);
  disk.file("/store/file")->visible = content;
  const auto engine = StoreEngine::open(small::options(disk, 16));
  *added = 0;
  const std::string text =
      check::error_of([&] { *added = engine->import_from("/store/file", kProgress); });
  const Found result = small::check_prefix(*engine, kTokens);
  CHECK(result != Found::kWrong);
  if (found != nullptr) *found = result;
  CHECK_EQ(engine->verify(kProgress).damage.size(), 0u);
  const auto session = engine->read_session({}, "session");
  CHECK(!session.has_value() || *session == kTokens);
  return text;
}

TEST(an_exported_file_comes_back) {
  uint64_t added = 0;
  Found found;
  CHECK_EQ(import_of(exported(), &added, &found), "");
  CHECK_EQ(added, 3u);
  CHECK(found == Found::kRight);
}

TEST(a_flipped_bit_of_an_exported_file_is_an_error) {
  const auto pristine = exported();
  uint64_t added = 0;
  for (size_t byte = 0; byte < pristine.size(); byte += byte < 80 ? 1 : 97) {
    auto content = pristine;
    content[byte] ^= static_cast<uint8_t>(1 << byte % 8);
    CHECK(import_of(content, &added) != "");
  }
}

TEST(a_shortened_file_is_an_error) {
  const auto pristine = exported();
  uint64_t added = 0;
  for (size_t size = 0; size < pristine.size(); size += size < 120 ? 1 : 211) {
    const std::vector<uint8_t> content(pristine.begin(),
                                       pristine.begin() + static_cast<int64_t>(size));
    CHECK(import_of(content, &added) != "");
  }
}

// Whoever can compute the checksums still cannot pass a header that is none of this layout.
TEST(hostile_headers_with_right_checksums_are_errors) {
  const auto pristine = exported();
  const size_t start = 8 + 4 + 8 + 5 + 8;  // of the first record, after "small" and two numbers
  const size_t image = start + 12;
  const uint64_t length = ByteReader({pristine.data() + start + 4, 8}, "length").u64();
  std::mt19937_64 random(1);
  const uint32_t extremes[] = {0, 1, 4, 5, 0x7fffffff, 0x80000000, 0xffffffff};
  uint64_t added = 0;
  for (int round = 0; round < 600; ++round) {
    auto content = pristine;
    // Numbers of the slot's header, or of the record around it.
    const size_t at = round % 8 == 0 ? start + 4 * (random() % 3) : image + 4 * (random() % 36);
    const uint32_t value =
        round % 3 == 0 ? static_cast<uint32_t>(random()) : extremes[random() % std::size(extremes)];
    if (std::memcmp(content.data() + at, &value, 4) == 0) continue;
    const size_t area = image + 16;  // where it was: of no meaning elsewhere
    if (at == area || at == area + 4) continue;
    std::memcpy(content.data() + at, &value, 4);
    const uint32_t crc = crc32c(content.data() + start, 12 + length);
    std::memcpy(content.data() + image + length, &crc, 4);
    const std::string error = import_of(content, &added);
    const size_t tenant = image + 48;
    if (at != tenant && at != tenant + 4) CHECK(error != "");
  }
}

TEST(hostile_bytes_are_no_header) {
  const SlotLayout slot = layout();
  std::mt19937_64 random(2);
  uint64_t refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint8_t> bytes(random() % 5000);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const char magic[] = "LMDKVSLT\1\0\0\0\0\20\0\0";
    if (round % 2 == 0) std::copy_n(magic, std::min<size_t>(16, bytes.size()), bytes.begin());
    refused += check::error_of([&] { decode_header(slot, bytes); }) != "";
  }
  CHECK_EQ(refused, 2000u);
}

TEST(another_fingerprint_or_layout_is_refused) {
  const auto disk = written();
  StoreOptions options = small::options(*disk, 16);
  options.fingerprint = "other";
  CHECK(check::contains(check::error_of([&] { StoreEngine::open(options); }), "fingerprint"));
  options = small::options(*disk, 16);
  options.chunk_tokens = 8;
  CHECK(check::contains(check::error_of([&] { StoreEngine::open(options); }), "chunk_tokens"));
  options = small::options(*disk, 16);
  options.values_by_column = false;
  CHECK(check::contains(check::error_of([&] { StoreEngine::open(options); }), "v_layout"));
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
