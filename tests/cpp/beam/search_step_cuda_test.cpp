// A step of beam searches by its emulated CUDA kernels against the bits of search_step_cpu.
#include <iostream>

#include "beam/greedy_rows_kernel.cuh"
#include "beam/search_step_kernel.cuh"
#include "check.h"
#include "decoder/exact_memory.h"
#include "emulated_log_softmax_top_k.h"
#include "search_step_case.h"

namespace lmdecode::beam::test {
namespace {

using decoder::Exactly;

int64_t steps_run = 0;

struct EmulatedLaunches {
  Random& random;
  uint64_t schedule;

  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t most_blocks, size_t shared_bytes,
              const Arguments&... arguments) const {
    const dim3 blocks(static_cast<unsigned>(1 + random.below(most_blocks)));
    const dim3 threads(static_cast<unsigned>(random.any_of({32, 64, 128})));
    emulation::launch(kernel, blocks, threads, 1, shared_bytes, schedule, arguments...);
  }

  void store_tries(const TokenTrie* tries, int64_t count, TokenTrie* to) const {
    for (int64_t first = 0; first < count; first += cuda_kernels::TrieList::kMost) {
      const cuda_kernels::TrieList list(tries + first, count - first);
      emulation::launch(&cuda_kernels::store_tries_kernel, 1, cuda_kernels::TrieList::kMost, 1, 0,
                        schedule, list, to + first);
    }
  }
  void tables(const SearchPass& pass) const {
    launch(&cuda_kernels::search_tables_kernel, pass.count, 0, pass);
  }
  void free_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors* processors,
                 float* values) const {
    rows_by_type(top, processors, values, false);
  }
  void held_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors& processors,
                 float* values) const {
    rows_by_type(top, &processors, values, true);
  }
  void greedy_rows(const LogSoftmaxTopKParams& top, const LogitsProcessors& processors,
                   float* values) const {
    const ProcessedParams all{top, processors, values};
    if (top.dtype == DType::kFloat32) {
      launch_rows(&cuda_kernels::greedy_row_kernel<float>, all, random_plan(random, top, 4),
                  schedule);
    } else {
      launch_rows(&cuda_kernels::greedy_row_kernel<BFloat16>, all, random_plan(random, top, 2),
                  schedule);
    }
  }
  void requests(const LogSoftmaxTopKParams& top) const {
    launch(&cuda_kernels::log_softmax_top_k_request_kernel, top.requests,
           sizeof(sampling::cuda_kernels::RowStorage), top);
  }
  void step(const SearchPass& pass, const BeamStepParams& step) const {
    launch(&cuda_kernels::search_step_kernel, pass.count,
           cuda_kernels::beam_step_shared_bytes(step.state.beams, step.state.hypotheses), pass,
           step);
  }

  void rows_by_type(const LogSoftmaxTopKParams& top, const LogitsProcessors* processors,
                    float* values, bool are_held) const {
    if (top.dtype == DType::kFloat32) {
      rows<float>(top, processors, values, are_held);
    } else {
      rows<BFloat16>(top, processors, values, are_held);
    }
  }
  template <class T>
  void rows(const LogSoftmaxTopKParams& top, const LogitsProcessors* processors, float* values,
            bool are_held) const {
    const auto plan = random_plan(random, top, sizeof(T));
    if (processors == nullptr) {
      return launch_rows(&cuda_kernels::log_softmax_top_k_row_kernel<T>, top, plan, schedule);
    }
    const ProcessedParams all{top, *processors, values};
    launch_rows(are_held ? &cuda_kernels::trie_processor_row_kernel<T>
                         : &cuda_kernels::processor_row_kernel<T>,
                all, plan, schedule);
    launch_rows(are_held ? &cuda_kernels::trie_row_kernel : &cuda_kernels::processed_row_kernel,
                all, random_plan(random, top, sizeof(float)), schedule);
  }
};

void run_cpu(const StepOfRequests& step) {
  Exactly<unsigned char> memory(static_cast<int64_t>(search_step_workspace_bytes(step.sizes)), 77);
  search_step_cpu(step.params, step.sizes, memory.get());
}

void run_emulated(const StepOfRequests& step, Random& random, uint64_t schedule) {
  const size_t bytes = CudaWorkspace{}.split(step.sizes, nullptr);
  Exactly<unsigned char> memory(static_cast<int64_t>(bytes), 77);
  launch_search_step(step.params, step.sizes, memory.get(), EmulatedLaunches{random, schedule});
  ++steps_run;
}

// A step in which nothing is left out: logits, which tokens are allowed, and what is chosen of.
struct Inputs {
  DType dtype;
  Buffer<float> values;
  Buffer<uint16_t> halves;
  Buffer<int32_t> bitmask;
  Buffer<float> bonus;
  bool has_bitmask, has_bonus, fills_missing;
  int64_t num_candidates;

  explicit Inputs(Requests& r)
      : dtype(r.random.any_of({DType::kFloat32, DType::kFloat32, DType::kBFloat16})),
        values(r.rows * kVocab),
        halves(r.rows * kVocab),
        bitmask(r.rows * ((kVocab + 31) / 32)),
        bonus(r.rows * kBeams),
        has_bitmask(r.random.chance(0.4)),
        has_bonus(r.random.chance(0.3)),
        fills_missing(r.random.chance(0.3)),
        num_candidates(r.random.any_of<int64_t>({2 * kBeams, 2 * kBeams, 3, 1, 60})) {
    const bool ties = r.random.chance(0.3);
    for (int64_t i = 0; i < values.size(); ++i) {
      const double value = r.random.normal() * 2;
      values[i] = static_cast<float>(ties ? std::round(value) : value);
    }
    if (r.random.chance(0.1)) values[r.random.below(values.size())] = std::nanf("");
    if (r.random.chance(0.1)) {
      const int64_t row = r.random.below(r.rows);
      std::fill_n(values.data() + row * kVocab, kVocab, minus_infinity());
    }
    for (int64_t i = 0; i < values.size(); ++i) {
      halves[i] = static_cast<uint16_t>(bits_of(values[i]) >> 16);
    }
    fill(bitmask, r.random.any_of({0x5f5f5f5f, 0x00100401, -1}));
    for (int64_t i = 0; i < bonus.size(); ++i) bonus[i] = static_cast<float>(r.random.normal());
  }

  StepOfRequests step(const Requests& r, const StateMemory& memory, const Buffer<int32_t>& nodes,
                      const std::vector<GroupSearch>& searches) const {
    const void* const logits =
        dtype == DType::kFloat32 ? static_cast<const void*>(values.data()) : halves.data();
    return StepOfRequests(r, memory, nodes, searches, logits, dtype,
                          has_bitmask ? bitmask.data() : nullptr, num_candidates);
  }

  void finish(StepOfRequests& step) const {
    step.params.fills_missing = fills_missing;
    if (has_bonus) step.params.bonus = bonus.data();
  }
};

#if !defined(LMD_PLANT_MISSING_BARRIER)

// Searches that have just begun: one row each, which the groups of a request share.
void begin(Requests& r) {
  for (GroupSearch& search : r.searches) {
    SearchOfStep& s = search.numbers;
    s.num_rows = 1;
    s.first_row = s.next_row - s.num_earlier;
    for (int64_t beam = 1; beam < kBeams; ++beam) {
      r.memory.scores[s.slot * kBeams + beam] = kUnusedBeamScore;
    }
  }
}

// After the first step: a row for each beam.
void spread(Requests& r) {
  for (GroupSearch& search : r.searches) {
    SearchOfStep& s = search.numbers;
    s.num_rows = s.next_end - s.next_row;
    s.first_row = s.next_row;
  }
}

void run_life(uint64_t seed, int steps, int schedules) {
  Requests r(seed);
  if (r.random.chance(0.5)) begin(r);
  for (int number = 0; number < steps; ++number) {
    for (const GroupSearch& search : r.searches) {
      // On the CPU full sequences are an error.
      if (r.memory.lengths[search.numbers.slot] >= kCapacity) return;
    }
    const Inputs inputs(r);
    const StateMemory before = r.memory.copy();
    const Buffer<int32_t> nodes_before = copy_of(r.nodes);
    StepOfRequests expected = inputs.step(r, r.memory, r.nodes, r.searches);
    inputs.finish(expected);
    run_cpu(expected);
    for (int schedule = 0; schedule < schedules; ++schedule) {
      const StateMemory memory = before.copy();
      const Buffer<int32_t> nodes = copy_of(nodes_before);
      StepOfRequests got = inputs.step(r, memory, nodes, r.searches);
      inputs.finish(got);
      std::string wrong;
      try {
        run_emulated(got, r.random, (seed + static_cast<uint64_t>(schedule)) % 6);
        if (!(got == expected)) wrong = "another result";
        if (!(memory == r.memory)) wrong = "another state";
        if (!(nodes == r.nodes)) wrong = "other nodes";
      } catch (const std::exception& error) {
        wrong = error.what();
      }
      CHECK_EQ(wrong, "");
      if (!wrong.empty()) {
        std::cout << "seed " << seed << " step " << number << ": " << wrong << std::endl;
        return;
      }
    }
    spread(r);
  }
}

TEST(steps_are_those_of_the_cpu) {
  for (uint64_t seed = 0; seed < 80; ++seed) run_life(seed, 4, 1);
}

TEST(on_all_schedules) {
  for (uint64_t seed = 1000; seed < 1015; ++seed) run_life(seed, 2, 6);
}

// The log-probability of a token, before any rule.
double log_prob_of(const float* logits, int64_t token) {
  double sum = 0.0;
  for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(static_cast<double>(logits[i]));
  return static_cast<double>(logits[token]) - std::log(sum);
}

// All but the log-probabilities is equal. The CPU takes those from the logits after the rules.
void run_greedy_life(uint64_t seed) {
  Requests r(seed, /*greedy=*/true);
  for (int number = 0; number < 4; ++number) {
    Inputs inputs(r);
    inputs.has_bitmask = false;
    inputs.num_candidates = 1;
    const StateMemory memory = r.memory.copy();
    const Buffer<float> scores = copy_of(memory.scores);
    StepOfRequests got = inputs.step(r, memory, r.nodes, r.searches);
    StepOfRequests expected = inputs.step(r, r.memory, r.nodes, r.searches);
    Exactly<float> rows(r.rows * kVocab);
    Buffer<float> logits(rows.size());
    for (int64_t i = 0; i < rows.size(); ++i) {
      rows[i] = logits[i] =
          inputs.dtype == DType::kFloat32 ? inputs.values[i] : to_float(BFloat16{inputs.halves[i]});
    }
    expected.params.logits = rows.get();
    expected.params.dtype = DType::kFloat32;
    expected.params.greedy = got.params.greedy = expected.sizes.is_row_by_row = true;
    run_cpu(expected);
    run_emulated(got, r.random, seed % 6);
    const bool same = got.tokens == expected.tokens && got.parents == expected.parents &&
                      got.ended == expected.ended && got.candidates == expected.candidates &&
                      got.decisions == expected.decisions && got.status == expected.status &&
                      memory.sequences == r.memory.sequences &&
                      memory.lengths == r.memory.lengths &&
                      memory.hypothesis_sequences == r.memory.hypothesis_sequences;
    CHECK(same);
    for (int64_t i = 0; i < got.params.count; ++i) {
      if (got.status[i] != 0 || std::isnan(got.log_probs[i])) continue;
      const SearchOfStep& search = got.params.searches[i];
      const float* const row = logits.data() + search.first_row * kVocab;
      CHECK(std::abs(got.log_probs[i] - log_prob_of(row, got.candidates[i])) < 1e-5);
      CHECK_EQ(got.scores[i], scores[search.slot * kBeams] + got.log_probs[i]);
    }
    if (same) continue;
    std::cout << "seed " << seed << " step " << number << std::endl;
    return;
  }
}

TEST(greedy_steps_are_those_of_the_cpu) {
  for (uint64_t seed = 3000; seed < 3100; ++seed) run_greedy_life(seed);
}

// Numbers of searches that are none: nothing outside of the tensors is touched.
#if !defined(LMD_RACE_BUILD)
TEST(whatever_the_searches_hold) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Requests r(seed + 5000);
    const Inputs inputs(r);
    StepOfRequests step = inputs.step(r, r.memory, r.nodes, r.searches);
    inputs.finish(step);
    step.params.greedy = inputs.num_candidates == 1;
    for (SearchOfStep& s : step.searches) {
      int64_t* const numbers = &s.slot;
      for (size_t i = 0; i < sizeof(s) / sizeof(int64_t); ++i) {
        if (!r.random.chance(0.3)) continue;
        numbers[i] = r.random.any_of<int64_t>({-1, 0, 1, 5, r.rows, -1000000, int64_t{1} << 40,
                                               std::numeric_limits<int64_t>::max(),
                                               std::numeric_limits<int64_t>::min()});
      }
    }
    fill(r.trie_numbers, r.random.any_of<int64_t>({-5, 0, 1000, int64_t{1} << 50}));
    fill(r.nodes, r.random.any_of({-5, 0, 3, 1 << 30}));
    run_emulated(step, r.random, seed % 6);
  }
}
#endif

TEST(more_than_200_steps) {
  std::cout << steps_run << " steps" << std::endl;
  CHECK(steps_run > 200);
}

#else

TEST(planted_fault_is_noticed) {
  int noticed = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Requests r(seed);
    const Inputs inputs(r);
    StepOfRequests step = inputs.step(r, r.memory, r.nodes, r.searches);
    try {
      run_emulated(step, r.random, seed);
    } catch (const std::exception&) {
      ++noticed;
    }
  }
  CHECK(noticed > 0);
}

#endif

}  // namespace
}  // namespace lmdecode::beam::test

CHECK_MAIN()
