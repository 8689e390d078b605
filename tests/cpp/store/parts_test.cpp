// The store's parts: hashes, queues of free areas, the address map, strided copies, slot sizes.
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "store/address_map.h"
#include "store/crc32c.h"
#include "store/free_areas.h"
#include "store/plane_copy.h"
#include "store/sha256.h"
#include "store/slot_layout.h"
#include "store/token_chain.h"

namespace lmdecode::store {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (const uint8_t byte : digest) {
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

std::vector<int32_t> ids(size_t size) {
  std::vector<int32_t> result(size);
  for (size_t i = 0; i < size; ++i) result[i] = static_cast<int32_t>(31 * i % 97);
  return result;
}

TEST(keys_of_prefixes_are_the_chain_in_any_order_of_asking) {
  const Digest root = root_key("model", 4, {"tenant", "context"});
  for (const size_t size : {0, 1, 3, 4, 5, 8, 11}) {
    const std::vector<int32_t> tokens = ids(size);
    std::vector<Digest> chain = {root};
    for (size_t begin = 0; begin < size; begin += 4) {
      const size_t count = std::min<size_t>(4, size - begin);
      chain.push_back(chain_key(chain.back(), begin + count, {tokens.data() + begin, count}));
    }
    PrefixKeys forwards(root, tokens, 4), backwards(root, tokens, 4), last(root, tokens, 4);
    CHECK_EQ(forwards.size(), chain.size() - 1);
    CHECK(last.whole() == chain.back());
    CHECK(prefix_key(root, tokens, 4) == chain.back());
    size_t chunk_tokens = 0;
    for (size_t i = 0; i < forwards.size(); ++i) {
      CHECK(forwards.before(i) == chain[i]);
      CHECK(forwards[i] == chain[i + 1]);
      const size_t from_the_end = forwards.size() - 1 - i;
      CHECK(backwards[from_the_end] == chain[from_the_end + 1]);
      chunk_tokens += forwards.chunk(i).size();
    }
    CHECK_EQ(chunk_tokens, size);
  }
}

std::vector<Sha256Compress> compressions() {
  std::vector<Sha256Compress> result = {sha256_compress_portable};
  if (sha256_compress_accelerated() != nullptr) result.push_back(sha256_compress_accelerated());
  return result;
}

// FIPS 180-4 examples (NIST), and a million times "a".
TEST(sha256_published_vectors) {
  const std::pair<std::string, const char*> vectors[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1000000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
  for (const Sha256Compress compress : compressions()) {
    for (const auto& [text, digest] : vectors) {
      CHECK_EQ(hex(Sha256(compress).update(text.data(), text.size()).finish()), digest);
    }
  }
}

TEST(sha256_in_pieces_is_sha256_of_the_whole) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<uint8_t> bytes(random() % 500);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    const Digest whole =
        Sha256(sha256_compress_portable).update(bytes.data(), bytes.size()).finish();
    for (const Sha256Compress compress : compressions()) {
      Sha256 hash(compress);
      for (size_t begin = 0; begin < bytes.size();) {
        const size_t count = std::min<size_t>(bytes.size() - begin, random() % 150);
        hash.update(bytes.data() + begin, count);
        begin += count;
      }
      CHECK_EQ(hex(hash.finish()), hex(whole));
    }
  }
}

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
TEST(crc32c_published_vectors) {
  std::vector<uint8_t> ascending(32), descending(32);
  for (uint8_t i = 0; i < 32; ++i) ascending[i] = i, descending[i] = static_cast<uint8_t>(31 - i);
  std::vector<Crc32c> ways = crc32c_accelerated();
  ways.push_back(crc32c_portable);
  for (const Crc32c crc : ways) {
    CHECK_EQ(crc(std::vector<uint8_t>(32, 0).data(), 32, 0), 0x8a9136aau);
    CHECK_EQ(crc(std::vector<uint8_t>(32, 0xff).data(), 32, 0), 0x62a8ab43u);
    CHECK_EQ(crc(ascending.data(), 32, 0), 0x46dd794eu);
    CHECK_EQ(crc(descending.data(), 32, 0), 0x113fdb5cu);
    CHECK_EQ(crc("123456789", 9, 0), 0xe3069283u);
  }
}

TEST(crc32c_is_the_same_by_every_way_at_any_size) {
  std::mt19937_64 random(2);
  std::vector<uint8_t> bytes(40000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t size = 0; size < bytes.size(); size += 1 + size / 37) {
    const size_t from = random() % (bytes.size() - size + 1), split = random() % (size + 1);
    const uint8_t* data = bytes.data() + from;
    const auto start = static_cast<uint32_t>(random());
    const uint32_t whole = crc32c_portable(data, size, 0);
    for (const Crc32c crc : crc32c_accelerated()) {
      CHECK_EQ(crc(data, size, 0), whole);
      CHECK_EQ(crc(data, size, start), crc32c_portable(data, size, start));
    }
    CHECK_EQ(crc32c(data + split, size - split, crc32c(data, split)), whole);
  }
}

TEST(a_copy_with_its_checksum_is_a_copy_and_its_checksum) {
  std::mt19937_64 random(3);
  std::vector<uint8_t> source(20000);
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
  std::vector<uint8_t> target(source.size() + 128);
  for (size_t size = 0; size < source.size(); size += 1 + size / 17) {
    for (const size_t shift : {size_t{0}, size_t{1}, size_t{64 - (size % 64)}}) {
      // Streamed only where aligned, and no byte beside what is copied changes.
      const size_t to_line = 64 - reinterpret_cast<uintptr_t>(target.data()) % 64;
      const size_t at = std::min(to_line + shift, target.size() - size - 1);
      for (const bool streamed : {false, true}) {
        const auto start = static_cast<uint32_t>(random());
        std::fill(target.begin(), target.end(), uint8_t{0xa5});
        const size_t from = random() % (source.size() - size + 1);
        const uint32_t crc =
            copy_crc32c(target.data() + at, source.data() + from, size, start, streamed);
        finish_streamed_copies();
        CHECK_EQ(crc, crc32c_portable(source.data() + from, size, start));
        CHECK(std::equal(source.begin() + from, source.begin() + from + size, target.begin() + at));
        CHECK(target[at - 1] == 0xa5 && target[at + size] == 0xa5);
      }
    }
  }
}

TEST(keys_tell_apart_whatever_differs) {
  const Scope scope{"salt", "context"};
  const Digest key = root_key("fingerprint", 16, scope);
  CHECK(key != root_key("fingerprint", 32, scope));
  CHECK(key != root_key("fingerprin", 16, {"tsalt", "context"}));
  CHECK(key != root_key("fingerprint", 16, {"saltc", "ontext"}));
  CHECK(key != root_key("fingerprint", 16, {"", "context"}));
  const int32_t tokens[] = {1, 2, 3};
  CHECK(chain_key(key, 3, tokens) != chain_key(key, 4, tokens));
  CHECK(chain_key(key, 3, tokens) != chain_key(Digest{}, 3, tokens));
  // A whole prefix by chunks: the same as step by step.
  CHECK(prefix_key(key, tokens, 2) ==
        chain_key(chain_key(key, 2, {tokens, 2}), 3, {tokens + 2, 1}));
}

// ---- free areas

TEST(the_fuller_queue_serves) {
  FreeAreas areas;
  areas.reset(0, 3, 100);  // three that were never used
  CHECK_EQ(areas.take(0), 0u);
  CHECK_EQ(areas.take(0), 1u);
  areas.add_freed(1, 10, 10);
  areas.add_freed(0, 11, 11);
  CHECK_EQ(areas.idle(), 1u);
  CHECK_EQ(areas.freed(), 2u);
  CHECK_EQ(areas.take(12), 1u);  // two freed, one idle: the oldest of the freed
  CHECK_EQ(areas.take(13), 2u);  // one each: the idle one
  CHECK_EQ(areas.take(14), 0u);
  CHECK_EQ(areas.take(15), kNoArea);
}

TEST(a_freed_area_ages_into_the_first_queue) {
  FreeAreas areas;
  areas.reset(4, 4, 100);
  areas.add_freed(2, 0, 0);
  areas.add_freed(3, 50, 50);
  CHECK_EQ(areas.idle(), 0u);
  areas.add_freed(1, 60, 60);
  CHECK_EQ(areas.take(120), 3u);  // 2 has aged: one idle, two freed
  CHECK_EQ(areas.idle(), 1u);
  CHECK_EQ(areas.freed(), 1u);
  CHECK_EQ(areas.take(121), 2u);
  areas.add_freed(0, 0, 500);  // freed long ago: as it is opened
  CHECK_EQ(areas.idle(), 1u);
}

TEST(on_a_full_disk_no_new_area_is_handed_out) {
  FreeAreas areas;
  areas.reset(1, 10, 100);
  areas.keep_to_used();
  CHECK_EQ(areas.take(0), kNoArea);
  areas.add_freed(0, 1, 1);
  CHECK_EQ(areas.take(1), 0u);
}

// ---- the address map

Digest digest_of(uint64_t number, uint64_t bucket) {
  Digest digest{};
  std::memcpy(digest.data(), &bucket, 8);
  std::memcpy(digest.data() + 8, &number, 8);
  return digest;
}

// Many hashes in few lists: entries are told apart by count and hash, and leave in any order.
TEST(the_lists_of_the_map_hold_what_was_inserted) {
  AddressMap map;
  std::mt19937_64 random(3);
  std::map<std::pair<uint64_t, uint64_t>, EntryId> expected;
  for (int round = 0; round < 20000; ++round) {
    const uint64_t number = random() % 600, count = 1 + random() % 3;
    const Digest key = digest_of(number, number % 5);
    const auto known = expected.find({number, count});
    const EntryId found = map.find(count, key);
    CHECK_EQ(found, known == expected.end() ? kNoEntry : known->second);
    if (found == kNoEntry) {
      Entry entry;
      entry.key = key;
      entry.num_tokens = count;
      const EntryId id = map.insert(entry);
      map.link(id, map.root(digest_of(1000 + number, 7)));
      expected[{number, count}] = id;
    } else {
      map.remove(found);
      expected.erase(known);
    }
    CHECK_EQ(map.size(), expected.size());
  }
}

TEST(a_list_is_walked_by_its_pointers) {
  AddressMap map;
  std::vector<EntryId> ids;
  for (uint64_t i = 0; i < 5; ++i) {
    Entry entry;
    entry.key = digest_of(i, 42);
    entry.num_tokens = i + 1;
    ids.push_back(map.insert(entry));
    map.link(ids.back(), map.root(digest_of(9, 9)));
  }
  map.remove(ids[2]);
  std::vector<uint64_t> forward, backward;
  EntryId last = kNoEntry;
  for (EntryId id = ids[4]; id != kNoEntry; id = map[id].next) {
    forward.push_back(map[id].num_tokens);
    last = id;
  }
  for (EntryId id = last; id != kNoEntry; id = map[id].previous) {
    backward.push_back(map[id].num_tokens);
  }
  CHECK(forward == std::vector<uint64_t>({5, 4, 2, 1}));
  CHECK(backward == std::vector<uint64_t>({1, 2, 4, 5}));
}

TEST(the_least_recently_used_entry_is_a_leaf) {
  AddressMap map;
  std::vector<EntryId> leaves;
  std::vector<EntryId> touched;
  std::mt19937_64 random(4);
  std::vector<EntryId> all;
  for (uint64_t i = 0; i < 300; ++i) {
    Entry entry;
    entry.key = digest_of(i, i);
    const EntryId parent = all.empty() || random() % 8 == 0 ? map.root(digest_of(5000, 1))
                                                            : all[random() % all.size()];
    entry.num_tokens = map[parent].num_tokens + 1;
    const EntryId id = map.insert(entry);
    map.link(id, parent);
    map.touch(id, static_cast<int64_t>(i), &touched);
    all.push_back(id);
    map.touch(all[random() % all.size()], static_cast<int64_t>(i), &touched);
    CHECK_EQ(map[map.oldest()].first_child, kNoEntry);
  }
  while (map.size() > 0) {
    CHECK_EQ(map[map.oldest()].first_child, kNoEntry);
    map.remove(map.oldest());
  }
}

// ---- planes

template <class T>
void check_copies(int64_t heads, int64_t tokens, int64_t elements) {
  const int64_t size = sizeof(T);
  const PlaneStrides row{size * elements * tokens, size * elements, size};
  const PlaneStrides column{size * elements * tokens, size, size * tokens};
  const PlaneStrides odd{size, 2 * size * heads * elements, 2 * size * heads};
  const PlaneStrides wide{2 * size * elements * tokens, 2 * size * elements, size};  // whole lines
  const size_t room = static_cast<size_t>(2 * heads * tokens * elements + heads);
  std::vector<T> source(room), memory(room + 64);
  const size_t to_line = (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / sizeof(T);
  const std::span<T> target(memory.data() + to_line, room);
  for (size_t i = 0; i < room; ++i) source[i] = static_cast<T>(i * 2654435761u + 1);
  const auto check = [&](const PlaneStrides& from, const PlaneStrides& to) {
    int64_t wrong = 0, touched = 0;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t element = 0; element < elements; ++element) {
          const auto at = [&](const PlaneStrides& s) {
            return (head * s.head + token * s.token + element * s.element) / size;
          };
          wrong += target[at(to)] != source[at(from)];
          target[at(to)] = T{0};
        }
      }
    }
    for (const T value : target) touched += value != T{0};
    CHECK_EQ(wrong, 0);
    CHECK_EQ(touched, 0);
  };
  const char* in = reinterpret_cast<const char*>(source.data());
  char* out = reinterpret_cast<char*>(target.data());
  for (const bool streamed : {false, true}) {
    for (const PlaneStrides& to : {row, column, odd, wide}) {
      for (const PlaneStrides& from : {row, column, odd, wide}) {
        copy_plane(out, to, in, from, heads, tokens, elements, size, streamed);
        finish_streamed_copies();
        check(from, to);
      }
      std::vector<char> staging(heads * tokens * elements * size);
      for (char* own : {static_cast<char*>(nullptr), staging.data()}) {
        for (const PlaneStrides& from : {row, column}) {
          const uint32_t crc =
              copy_plane_crc32c(out, to, in, from, heads, tokens, elements, size, streamed, own);
          finish_streamed_copies();
          check(from, to);
          CHECK_EQ(crc, crc32c_portable(in, heads * tokens * elements * size, 0));
        }
      }
    }
  }
}

template <class T>
void check_copies_of_all_sizes() {
  check_copies<T>(3, 37, 21);
  check_copies<T>(2, 64, 64);
  check_copies<T>(2, 5, 1100);
  check_copies<T>(1, 1, 1);
}

// The checksum is that of what was copied, whatever the source was before and after.
void check_changing_source(int64_t heads, int64_t tokens, int64_t elements, bool by_column) {
  const PlaneStrides row{2 * elements * tokens, 2 * elements, 2};
  const PlaneStrides column{2 * elements * tokens, 2, 2 * tokens};
  const PlaneStrides from = by_column ? column : row;
  const size_t bytes = 2 * heads * tokens * elements;
  std::vector<std::atomic<uint64_t>> source(bytes / 8 + 1);
  const char* in = reinterpret_cast<const char*>(source.data());
  // Twice as long rows, as of a longer prefix.
  const PlaneStrides to = by_column ? PlaneStrides{4 * elements * tokens, 2, 4 * tokens}
                                    : PlaneStrides{4 * elements * tokens, 2 * elements, 2};
  std::vector<char> memory(2 * bytes + 64), staging(bytes), copied(bytes);
  char* out = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t value = 1; !stop; ++value) {
      source[value * 7919 % source.size()].store(value, std::memory_order_relaxed);
    }
  });
  int64_t wrong = 0;
  for (int round = 0; round < 300; ++round) {
    const uint32_t crc = copy_plane_crc32c(out, to, in, from, heads, tokens, elements, 2,
                                           round % 2 == 0, staging.data());
    finish_streamed_copies();
    copy_plane(copied.data(), from, out, to, heads, tokens, elements, 2);
    wrong += crc != crc32c(copied.data(), bytes);
  }
  stop = true;
  writer.join();
  CHECK_EQ(wrong, 0);
}

TEST(a_source_that_changes_is_read_once) {
  for (const bool by_column : {false, true}) {
    check_changing_source(2, 64, 64, by_column);
    check_changing_source(1, 100, 24, by_column);
    check_changing_source(3, 700, 8, by_column);
    check_changing_source(2, 5, 3, by_column);
  }
}

TEST(planes_are_copied_between_any_strides) {
  check_copies_of_all_sizes<uint8_t>();
  check_copies_of_all_sizes<uint16_t>();
  check_copies_of_all_sizes<uint32_t>();
  check_copies_of_all_sizes<uint64_t>();
}

TEST(slots_have_at_least_a_mebibyte_in_whole_blocks) {
  for (const ModelShape& shape : {ModelShape{32, 8, 128, 2, {}}, ModelShape{2, 2, 16, 4, {}},
                                  ModelShape{80, 8, 128, 2, {}}, ModelShape{1, 1, 1, 2, {}}}) {
    const SlotLayout layout{shape, default_chunk_tokens(shape), true};
    CHECK(layout.slot_bytes() >= 1 << 20);
    CHECK_EQ(layout.slot_bytes() % 4096, 0u);
    CHECK((layout.chunk_tokens & (layout.chunk_tokens - 1)) == 0);
    for (uint32_t count = 1; count <= layout.chunk_tokens; count += 1 + count / 3) {
      CHECK(layout.image_bytes(count) <= layout.slot_bytes());
    }
  }
}

}  // namespace
}  // namespace lmdecode::store

CHECK_MAIN()
