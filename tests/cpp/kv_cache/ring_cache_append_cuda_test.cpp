// The emulated CUDA kernel of ring_cache_append_ against tokens written one by one; slots.
#include <iostream>

#include "check.h"
#include "kv_cache/ring_cache_append_kernel.cuh"
#include "reorder_case.h"

namespace lmdecode::kv_cache::test {
namespace {

std::vector<unsigned char> random_bytes(Random& random, int64_t count) {
  std::vector<unsigned char> bytes;
  for (int64_t i = 0; i < count; ++i)
    bytes.push_back(static_cast<unsigned char>(random.below(256)));
  return bytes;
}

// Vectors [rows, heads, length], or [rows, length, heads], with gaps or without.
struct Layout {
  int64_t row_stride, head_stride, vector_stride, bytes;

  Layout(Random& random, int64_t rows, int64_t heads, int64_t length, int64_t vector_bytes) {
    const int64_t step =
        vector_bytes + (random.chance(40) ? random.any_of<int64_t>({1, 2, 8, 16}) : 0);
    const bool heads_first = random.chance(50);
    head_stride = heads_first ? step * length : step;
    vector_stride = heads_first ? step : step * heads;
    row_stride = step * length * heads;
    const bool empty = rows * heads * length * vector_bytes == 0;
    bytes = empty ? 0 : row_stride * rows - (step - vector_bytes);
  }
};

// A ring and a chunk of random layout, in buffers of exactly the size that their strides span.
struct Case {
  RingCacheAppendParams params;
  std::vector<unsigned char> rings[2], chunks[2];
  std::vector<int64_t> positions;

  Case(Random& random, bool valid) {
    params.rows = random.below(4);
    params.heads = 1 + random.below(3);
    params.tokens = random.below(12);
    params.slots = {random.below(3), 1 + random.below(6)};
    for (int64_t row = 0; row < params.rows; ++row) {
      positions.push_back(random.below(40));
      if (!valid && random.chance(50)) {
        positions.back() = random.any_of<int64_t>({-1, kMaxRingPosition + 1, INT64_MIN, INT64_MAX});
      }
    }
    params.positions.all = random.below(40);
    for (int i = 0; i < 2; ++i) {
      RingStates& s = params.states[i];
      s.vector_bytes = random.any_of<int64_t>({0, 1, 2, 6, 8, 16, 24, 32, 33});
      const int64_t slots = params.slots.num_sinks + params.slots.capacity;
      const Layout to(random, params.rows, params.heads, slots, s.vector_bytes);
      const Layout from(random, params.rows, params.heads, params.tokens, s.vector_bytes);
      rings[i] = random_bytes(random, to.bytes);
      chunks[i] = random_bytes(random, from.bytes);
      s.ring_row_stride = to.row_stride;
      s.ring_head_stride = to.head_stride;
      s.slot_stride = to.vector_stride;
      s.row_stride = from.row_stride;
      s.head_stride = from.head_stride;
      s.token_stride = from.vector_stride;
    }
  }

  void use_row_positions() { params.positions.rows.data = positions.data(); }

  void set_pointers() {
    for (int i = 0; i < 2; ++i) {
      params.states[i].ring = rings[i].data();
      params.states[i].states = chunks[i].data();
    }
  }

  // Ring `i` after every token has been written, in order.
  std::vector<unsigned char> expected(int i) const {
    std::vector<unsigned char> after = rings[i];
    const RingStates& s = params.states[i];
    for (int64_t row = 0; row < params.rows; ++row) {
      const int64_t begin = params.positions.at(row);
      if (begin < 0 || begin > kMaxRingPosition) continue;
      for (int64_t token = 0; token < params.tokens; ++token) {
        const int64_t behind = begin + token - params.slots.num_sinks;
        const int64_t slot =
            behind < 0 ? begin + token : params.slots.num_sinks + behind % params.slots.capacity;
        for (int64_t head = 0; head < params.heads; ++head) {
          for (int64_t byte = 0; byte < s.vector_bytes; ++byte) {
            after[static_cast<size_t>(row * s.ring_row_stride + head * s.ring_head_stride +
                                      slot * s.slot_stride + byte)] =
                chunks[i][static_cast<size_t>(row * s.row_stride + head * s.head_stride +
                                              token * s.token_stride + byte)];
          }
        }
      }
    }
    return after;
  }
};

void check(uint64_t seed, bool valid) {
  Random random(seed);
  Case c(random, valid);
  if (!valid || random.chance(50)) c.use_row_positions();
  const std::vector<unsigned char> expected[2] = {c.expected(0), c.expected(1)};
  c.set_pointers();
  const RingAppendLaunch launch = ring_append_launch(c.params);
  if (ring_append_units(launch) > 0) {
    const int64_t blocks = ring_append_blocks(launch, static_cast<int>(1 + random.below(2)), 32);
    emulation::launch(ring_append_cuda::ring_cache_append_kernel,
                      dim3(static_cast<unsigned>(blocks)), dim3(32), 1, size_t{0}, seed % 6,
                      launch);
  }
  for (int i = 0; i < 2; ++i) CHECK(c.rings[i] == expected[i]);
}

TEST(random_rings_and_chunks) {
  for (uint64_t seed = 0; seed < 600; ++seed) check(seed, true);
}

TEST(rows_out_of_range_stay_as_they_are) {
  for (uint64_t seed = 0; seed < 200; ++seed) check(seed + 1000, false);
}

TEST(runs_lie_in_slots_that_follow_each_other) {
  for (int64_t sinks = 0; sinks < 4; ++sinks) {
    for (int64_t capacity = 1; capacity < 6; ++capacity) {
      const RingSlots slots{sinks, capacity};
      for (int64_t position = 0; position < 20; ++position) {
        for (int64_t end = position + 1; end < 24; ++end) {
          const int64_t count = slots.run_length(position, end);
          CHECK(count >= 1 && count <= end - position);
          for (int64_t i = 0; i < count; ++i) {
            CHECK_EQ(slots.slot(position + i), slots.slot(position) + i);
          }
          // The next one lies elsewhere, or is of the ring and not of the sinks.
          const int64_t next = position + count;
          CHECK(next == end || next == sinks || slots.slot(next) == sinks);
        }
      }
    }
  }
}

TEST(a_ring_holds_the_sinks_and_the_last_tokens) {
  const RingSlots slots{2, 4};
  for (int64_t end = 1; end < 20; ++end) {
    for (int64_t position = 0; position < end; ++position) {
      bool overwritten = false;
      for (int64_t later = position + 1; later < end; ++later) {
        overwritten = overwritten || slots.slot(later) == slots.slot(position);
      }
      CHECK_EQ(slots.holds(position, end), !overwritten);
    }
  }
}

TEST(units_are_as_wide_as_the_layout_allows) {
  alignas(16) static unsigned char memory[64];
  RingCacheAppendParams params;
  for (RingStates& s : params.states) {
    s.ring = memory;
    s.states = memory;
    s.vector_bytes = s.slot_stride = s.token_stride = s.head_stride = s.row_stride = 32;
    s.ring_head_stride = s.ring_row_stride = 32;
  }
  CHECK_EQ(ring_append_launch(params).unit_bytes[0], 16);
  params.states[0].states += 8;
  CHECK_EQ(ring_append_launch(params).unit_bytes[0], 8);
  CHECK_EQ(ring_append_launch(params).unit_bytes[1], 16);
  params.states[0].ring_row_stride = 36;
  CHECK_EQ(ring_append_launch(params).unit_bytes[0], 4);
  params.states[0].vector_bytes = 31;
  CHECK_EQ(ring_append_launch(params).unit_bytes[0], 1);
}

}  // namespace
}  // namespace lmdecode::kv_cache::test

CHECK_MAIN()
