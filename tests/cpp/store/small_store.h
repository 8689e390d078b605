// A store small enough to open ten thousand times, with caches whose numbers follow from tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "store/store_engine.h"

namespace lmdecode::store::small {

constexpr uint32_t kLayers = 2, kHeads = 1, kHeadSize = 4, kChunk = 4;
#if defined(LMD_STORE_STATES)
constexpr uint32_t kStateBytes = 100;
#else
constexpr uint32_t kStateBytes = 0;
#endif
constexpr uint32_t kLoaded = kLayers + (kStateBytes > 0 ? 1 : 0);
constexpr const char* kDirectory = "/store/fingerprint";

inline StoreOptions options(FileSystem& disk, uint32_t areas, bool relaxed = false) {
  StoreOptions settings;
  settings.directory = kDirectory;
  settings.fingerprint = "small";
  settings.shape = {kLayers, kHeads, kHeadSize, 4, {}, kStateBytes};
  settings.chunk_tokens = kChunk;
  const SlotLayout layout{settings.shape, kChunk, true};
  settings.capacity_bytes = areas * layout.slot_bytes();
  settings.slab_bytes = 5 * layout.slot_bytes();  // several slabs
  settings.relaxed = relaxed;
  settings.index_reserve_bytes = uint64_t{1} << 16;
  settings.flush_interval_ms = 0;
  settings.io_threads = 1;
  settings.file_system = &disk;
  // Time goes by calls: the same run each time.
  auto time = std::make_shared<int64_t>(1'000'000);
  settings.now_ms = [time] { return ++*time; };
  return settings;
}

// The number at a place of the cache: it depends on all tokens up to there.
inline uint32_t element(const Digest& prefix, uint32_t plane, uint32_t index) {
  uint32_t words[8];
  std::memcpy(words, prefix.data(), 32);
  return words[(plane + index) % 8] * 2654435761u + plane * 40503u + index;
}

// Keys and values of all layers, [heads, tokens, head_size] each, and the state behind the tokens.
class Cache {
 public:
  explicit Cache(uint64_t tokens) : tokens_(tokens) {
    for (uint32_t plane = 0; plane < 2 * kLayers; ++plane) {
      data_.emplace_back(kHeads * tokens * kHeadSize);
    }
    if (kStateBytes > 0) data_.emplace_back(kStateBytes / 4);
  }
  static Cache of(const std::vector<int32_t>& tokens) {
    Cache cache(tokens.size());
    Digest prefix{};
    for (uint64_t token = 0; token < tokens.size(); ++token) {
      prefix = chain_key(prefix, token, {&tokens[token], 1});
      for (uint32_t plane = 0; plane < 2 * kLayers; ++plane) {
        for (uint32_t i = 0; i < kHeads * kHeadSize; ++i) {
          cache.data_[plane][(i / kHeadSize * tokens.size() + token) * kHeadSize + i % kHeadSize] =
              element(prefix, plane, i);
        }
      }
    }
    for (uint32_t i = 0; i < kStateBytes / 4 && !tokens.empty(); ++i) {
      cache.data_.back()[i] = element(prefix, 2 * kLayers, i);
    }
    return cache;
  }
  std::vector<TensorPlane> planes() {
    std::vector<TensorPlane> result;
    const auto tokens = static_cast<int64_t>(tokens_);
    for (auto& plane : data_) {
      auto* const data = reinterpret_cast<char*>(plane.data());
      if (result.size() < 2 * kLayers) {
        result.push_back({data, {4 * kHeadSize * tokens, 4 * kHeadSize, 4}, tokens_});
      } else {
        result.push_back({data, {kStateBytes, kStateBytes, 1}, std::min<uint64_t>(tokens_, 1)});
      }
    }
    return result;
  }
  bool operator==(const Cache& other) const = default;

 private:
  uint64_t tokens_;
  std::vector<std::vector<uint32_t>> data_;
};

enum class Found { kMiss, kRight, kWrong };

// Looks a prefix up, loads it and compares every byte.
inline Found check_prefix(StoreEngine& engine, const std::vector<int32_t>& tokens,
                          uint64_t* num_tokens = nullptr) {
  Hit hit = engine.lookup({}, tokens);
  if (num_tokens != nullptr) *num_tokens = hit.num_tokens();
  if (hit.num_tokens() == 0) return Found::kMiss;
  const std::vector<int32_t> prefix(tokens.begin(), tokens.begin() + hit.num_tokens());
  Cache loaded(hit.num_tokens());
  if (!engine.load(hit, 0, kLoaded, loaded.planes())) {
    if (num_tokens != nullptr) *num_tokens = 0;
    return Found::kMiss;
  }
  return loaded == Cache::of(prefix) ? Found::kRight : Found::kWrong;
}

inline uint64_t put(StoreEngine& engine, const std::vector<int32_t>& tokens) {
  Cache cache = Cache::of(tokens);
  return engine.put({}, tokens, cache.planes(), {});
}

inline uint64_t commit(StoreEngine& engine, const std::string& session,
                       const std::vector<int32_t>& tokens) {
  Cache cache = Cache::of(tokens);
  return engine.commit_session({}, session, tokens, tokens.size(), cache.planes(), {});
}

}  // namespace lmdecode::store::small
