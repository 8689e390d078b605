// Random calls of reorder_cache_ in heap buffers of exactly the size that strides span.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "common/row_copies.h"
#include "kv_cache/reorder_cache.h"
#include "kv_cache/strided_tensor.h"

namespace lmdecode::kv_cache::test {

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  // In [0, bound).
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(bound));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T any_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }

 private:
  std::mt19937_64 generator_;
};

using Map = std::vector<int64_t>;

// The memory of a tensor, and the tensor.
struct Cache {
  StridedTensor tensor;
  int64_t batch_dim = 0, length_dim = -1, length = 0;
  std::unique_ptr<unsigned char[]> memory;
  int64_t bytes = 0;

  CacheRows rows() const {
    CacheRows rows;
    if (!make_cache_rows(tensor, batch_dim, length_dim, length, &rows)) {
      throw std::runtime_error("too many dimensions");
    }
    return rows;
  }

  // Calls visit(offset of an element in row 0) for every element of a row.
  template <class Visit>
  void each_element(Visit visit, size_t dim = 0, int64_t offset = 0) const {
    if (dim == tensor.dims.size()) return visit(offset);
    if (static_cast<int64_t>(dim) == batch_dim) return each_element(visit, dim + 1, offset);
    const int64_t size = static_cast<int64_t>(dim) == length_dim ? length : tensor.dims[dim].size;
    for (int64_t i = 0; i < size; ++i) {
      each_element(visit, dim + 1, offset + i * tensor.dims[dim].stride);
    }
  }

  // The memory as it should be after a call, element by element.
  std::vector<unsigned char> expected(const Map& parents) const {
    std::vector<unsigned char> after(memory.get(), memory.get() + bytes);
    const int64_t row_stride = tensor.dims[static_cast<size_t>(batch_dim)].stride;
    const size_t element = static_cast<size_t>(tensor.element_bytes);
    for (size_t row = 0; row < parents.size(); ++row) {
      if (parents[row] < 0 || parents[row] >= static_cast<int64_t>(parents.size())) continue;
      each_element([&](int64_t offset) {
        std::memcpy(after.data() + offset + static_cast<int64_t>(row) * row_stride,
                    memory.get() + offset + parents[row] * row_stride, element);
      });
    }
    return after;
  }
};

inline Cache random_cache(Random& random, int64_t rows, bool large) {
  Cache cache;
  cache.tensor.element_bytes = random.any_of<int64_t>({1, 2, 2, 4, 8, 16});
  const size_t rank = static_cast<size_t>(1 + random.below(4));
  cache.batch_dim = random.below(static_cast<int64_t>(rank));
  std::vector<size_t> order;
  for (size_t d = 0; d < rank; ++d) {
    int64_t size = 1 + random.below(large ? 40 : 6);
    if (random.chance(3)) size = 0;
    if (static_cast<int64_t>(d) == cache.batch_dim) size = rows;
    cache.tensor.dims.push_back({size, 0});
    order.insert(order.begin() + static_cast<int64_t>(random.below(static_cast<int64_t>(d) + 1)),
                 d);
  }
  if (rank > 1 && random.chance(40)) {
    cache.length_dim = random.below(static_cast<int64_t>(rank));
    if (cache.length_dim == cache.batch_dim)
      cache.length_dim = (cache.length_dim + 1) % static_cast<int64_t>(rank);
    cache.length = random.below(cache.tensor.dims[static_cast<size_t>(cache.length_dim)].size + 1);
  }
  // Dense in a random order of the dimensions, with gaps at times.
  int64_t stride = cache.tensor.element_bytes;
  for (const size_t d : order) {
    if (random.chance(20)) stride += cache.tensor.element_bytes * (1 + random.below(3));
    cache.tensor.dims[d].stride = stride;
    stride *= cache.tensor.dims[d].size > 0 ? cache.tensor.dims[d].size : 1;
  }
  cache.bytes = cache.tensor.is_empty() ? 0 : cache.tensor.extent();
  cache.memory = std::make_unique<unsigned char[]>(static_cast<size_t>(cache.bytes));
  for (int64_t i = 0; i < cache.bytes; ++i)
    cache.memory[static_cast<size_t>(i)] = static_cast<unsigned char>(random.below(256));
  cache.tensor.data = cache.memory.get();
  return cache;
}

inline Map random_map(Random& random, int64_t rows) {
  Map map(static_cast<size_t>(rows));
  const int kind = static_cast<int>(random.below(3));
  for (int64_t r = 0; r < rows; ++r) {
    const size_t row = static_cast<size_t>(r);
    map[row] = kind == 0 && random.chance(60) ? r : random.below(rows);
    if (kind == 2) {  // a permutation
      map[row] = r;
      std::swap(map[row], map[static_cast<size_t>(random.below(r + 1))]);
    }
  }
  return map;
}

// Calls visit(map) for each of the rows ^ rows maps.
template <class Visit>
void every_map(int64_t rows, Visit visit) {
  Map map(static_cast<size_t>(rows), 0);
  while (true) {
    visit(map);
    size_t digit = 0;
    while (digit < map.size() && ++map[digit] == rows) map[digit++] = 0;
    if (digit == map.size()) return;
  }
}

inline std::string text(const Map& map) {
  std::ostringstream out;
  for (const int64_t parent : map) out << parent << ' ';
  return out.str();
}

}  // namespace lmdecode::kv_cache::test
