// search_step_cpu under sanitizers: a search moves as it does alone, and nothing is allocated.
#include <algorithm>
#include <vector>

#include "check.h"
#include "decoder/exact_memory.h"
#include "search_step_case.h"

// Of the sanitizer's runtime, whose header not every compiler brings.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));

namespace lmdecode::beam::test {
namespace {

using decoder::Exactly;

int64_t allocations = 0;
void count_allocation(const volatile void*, size_t) { ++allocations; }
void ignore_free(const volatile void*) {}

// A step of some of the searches, in memory of exactly the size that it asks for.
struct Step : StepOfRequests {
  int64_t allocated = 0;

  Step(const Requests& r, const StateMemory& memory, const Buffer<int32_t>& nodes,
       const std::vector<GroupSearch>& of_requests, const float* logits, const int32_t* bitmask,
       int64_t num_candidates)
      : StepOfRequests(r, memory, nodes, of_requests, logits, DType::kFloat32, bitmask,
                       num_candidates) {
    Exactly<unsigned char> workspace(static_cast<int64_t>(search_step_workspace_bytes(sizes)));
    const int64_t before = allocations;
    search_step_cpu(params, sizes, workspace.get());
    allocated = allocations - before;
  }
};

TEST(searches_move_as_alone) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Requests r(seed);
    for (int step = 0; step < 8; ++step) {
      std::vector<GroupSearch> all;
      for (const GroupSearch& search : r.searches) {
        if (r.goes_on(search.numbers.slot)) all.push_back(search);
      }
      // Where a group has ended, what later ones would look at is not written.
      if (all.size() < r.searches.size()) break;
      Buffer<float> logits(r.rows * kVocab);
      for (int64_t i = 0; i < logits.size(); ++i) {
        logits[i] = static_cast<float>(r.random.normal() * 2);
      }
      if (r.random.chance(0.05)) logits[r.random.below(logits.size())] = std::nanf("");
      Buffer<int32_t> bitmask(r.rows * ((kVocab + 31) / 32));
      fill(bitmask, r.random.chance(0.3) ? int32_t{0x5f5f5f5f} : int32_t{-1});
      const int64_t k = 2 * kBeams;
      StateMemory alone = r.memory.copy();
      Buffer<int32_t> nodes_alone = copy_of(r.nodes);
      const Step together(r, r.memory, r.nodes, all, logits.data(), bitmask.data(), k);
      for (const GroupSearch& first : all) {
        if (first.group != 0) continue;
        std::vector<GroupSearch> request;
        for (const GroupSearch& search : all) {
          const SearchOfStep& s = search.numbers;
          if (s.next_row - s.num_earlier == first.numbers.next_row) request.push_back(search);
        }
        const Step own(r, alone, nodes_alone, request, logits.data(), bitmask.data(), k);
        for (const GroupSearch& search : request) {
          const SearchOfStep& s = search.numbers;
          for (int64_t beam = 0; beam < r.num_beams[s.slot]; ++beam) {
            CHECK_EQ(own.tokens[s.next_row + beam], together.tokens[s.next_row + beam]);
            CHECK_EQ(own.parents[s.next_row + beam], together.parents[s.next_row + beam]);
          }
        }
      }
      CHECK(alone == r.memory);
      CHECK(nodes_alone == r.nodes);
    }
  }
}

TEST(steps_allocate_nothing) {
  __sanitizer_install_malloc_and_free_hooks(count_allocation, ignore_free);
  Requests r(3);
  Buffer<float> logits(r.rows * kVocab);
  for (int64_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(r.random.normal());
  Buffer<int32_t> bitmask(r.rows * ((kVocab + 31) / 32));
  fill(bitmask, int32_t{-1});
  for (int step = 0; step < 3; ++step) {
    const Step done(r, r.memory, r.nodes, r.searches, logits.data(), bitmask.data(), 2 * kBeams);
    // What a thread keeps between calls it takes in the first one.
    CHECK(step == 0 || done.allocated == 0);
  }
}

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
