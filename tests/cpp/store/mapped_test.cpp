// Slots in the page cache are copied from there; pages that go in the middle are a miss.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "check.h"
#include "store/bus_error.h"
#include "store/store_engine.h"

namespace lmdecode::store {
namespace {

constexpr uint64_t kPage = 4096, kSize = 16 * kPage;

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "lmdecode-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

std::unique_ptr<File> written(const std::string& path) {
  std::vector<uint8_t> bytes(kSize);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / kPage);
  int error = 0;
  auto file = posix_file_system().open(path, OpenMode::kCreate, &error);
  CHECK_EQ(write_all(*file, 0, bytes.data(), bytes.size()), 0);
  return file;
}

TEST(bytes_in_the_page_cache_are_those_of_the_file) {
  const Folder folder;
  const auto file = written(folder.path / "file");
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, kPage, 3 * kPage + 77}) {
    const uint64_t size = kSize - offset - 5;
    std::vector<uint8_t> bytes(size);
    CHECK_EQ(read_all(*file, offset, bytes.data(), size), 0);
    const uint8_t* cached = file->cached(offset, size, 2 * kSize);
    CHECK(cached != nullptr && std::equal(bytes.begin(), bytes.end(), cached));
  }
  CHECK(file->cached(0, kSize + kPage, 2 * kSize) == nullptr);      // the file ends
  CHECK(file->cached(2 * kSize - 8, kPage, 2 * kSize) == nullptr);  // so does the memory
  CHECK_EQ(file->truncate(4 * kPage), 0);
  CHECK(file->cached(3 * kPage, 2 * kPage, 2 * kSize) == nullptr);
}

TEST(pages_that_go_while_they_are_read_are_no_signal) {
  const Folder folder;
  const auto file = written(folder.path / "file");
  const uint8_t* cached = file->cached(0, kSize, kSize);
  CHECK(cached != nullptr);
  volatile uint64_t sum = 0, after = 0;
  const auto read = [&] {
    for (uint64_t i = 0; i < kSize; i += kPage) sum = sum + cached[i];
    after = after + 1;
  };
  CHECK(reads_mapped(cached, kSize, read));
  CHECK_EQ(file->truncate(4 * kPage), 0);
  for (int round = 0; round < 3; ++round) CHECK(!reads_mapped(cached, kSize, read));
  CHECK_EQ(after, 1u);
  CHECK(reads_mapped(cached, 4 * kPage, [&] { sum = sum + cached[3 * kPage]; }));
}

TEST(signals_of_other_places_are_not_taken) {
  const Folder folder;
  const auto file = written(folder.path / "file");
  const uint8_t* cached = file->cached(0, kSize, kSize);
  CHECK(cached != nullptr && reads_mapped(cached, kSize, [] {}));
  CHECK_EQ(file->truncate(0), 0);
  const int descriptor = ::open((folder.path / "file").c_str(), O_RDONLY);
  const ::pid_t child = ::fork();
  if (child == 0) {
    const void* mapped = ::mmap(nullptr, kPage, PROT_READ, MAP_SHARED, descriptor, 0);
    const auto read = [&] { ::_exit(*static_cast<const volatile char*>(mapped)); };
    reads_mapped(cached, kSize, read);
    ::_exit(0);
  }
  ::close(descriptor);
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

// Another program cuts the files off while they are loaded.
TEST(a_store_whose_files_go_serves_nothing_wrong) {
  const Folder folder;
  StoreOptions options;
  options.directory = folder.path / "fingerprint";
  options.fingerprint = "mapped";
  options.shape = {2, 2, 64, 2, {}};
  options.chunk_tokens = 64;
  options.capacity_bytes = uint64_t{1} << 26;
  options.io_threads = 1;
  const auto engine = StoreEngine::open(options);
  constexpr uint64_t kTokens = 640;
  std::vector<int32_t> tokens(kTokens, 7);
  std::vector<std::vector<uint16_t>> kv(4, std::vector<uint16_t>(2 * kTokens * 64)), loaded = kv;
  for (size_t plane = 0; plane < kv.size(); ++plane) {
    for (size_t i = 0; i < kv[plane].size(); ++i) {
      kv[plane][i] = static_cast<uint16_t>(i * 40503u + plane);
    }
  }
  const auto planes_of = [](std::vector<std::vector<uint16_t>>& memory) {
    std::vector<TensorPlane> planes;
    for (auto& plane : memory) {
      planes.push_back({reinterpret_cast<char*>(plane.data()), {kTokens * 128, 128, 2}, kTokens});
    }
    return planes;
  };
  const auto source = planes_of(kv), target = planes_of(loaded);
  const std::string slab = options.directory + "/slab-00000";
  std::atomic<bool> is_loading{false}, stop{false};
  std::thread other([&] {
    for (uint64_t round = 0; !stop; ++round) {
      while (!is_loading && !stop) std::this_thread::yield();
      for (uint64_t spin = 0; spin < round % 64 * 500; ++spin)
        std::atomic_signal_fence(std::memory_order_seq_cst);
      if (::truncate(slab.c_str(), 0) != 0) break;
      while (is_loading && !stop) std::this_thread::yield();
    }
  });
  uint64_t right = 0, wrong = 0, missed = 0;
  // More rounds where the other thread was never run in time.
  for (int round = 0; round < 150 || (missed == 0 && round < 15000); ++round) {
    CHECK_EQ(engine->put({}, tokens, source, {}), kTokens);
    Hit hit = engine->lookup({}, tokens);
    for (auto& plane : loaded) std::fill(plane.begin(), plane.end(), uint16_t{0});
    is_loading = round % 4 != 0;
    if (hit.num_tokens() == kTokens && engine->load(hit, 0, 2, target)) {
      ++(loaded == kv ? right : wrong);
    } else {
      ++missed;
    }
    is_loading = false;
    engine->erase({}, nullptr, nullptr);
  }
  stop = true;
  other.join();
  CHECK_EQ(wrong, 0u);
  CHECK(right > 0 && missed > 0);
}

}  // namespace
}  // namespace lmdecode::store
CHECK_MAIN()
