// decoding_steps under sanitizers: no step allocates, and searches do not depend on company.
#include <malloc.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "beam/token_trie_build.h"
#include "check.h"
#include "decoder/decoding.h"
#include "decoder/faster_transformer_search.h"
#include "exact_memory.h"
#include "random_weights.h"

// Of the sanitizer's runtime, whose header not every compiler brings.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*,
                                                                             size_t),
                                                         void (*free_hook)(const volatile void*));

namespace lmdecode::decoder {
namespace {

int64_t allocations = 0;
void count_allocation(const volatile void*, size_t) { ++allocations; }
void ignore_free(const volatile void*) {}

constexpr int64_t kCapacity = 24, kSource = 16, kBeams = 3, kRequests = 2;

DecoderConfig small_config(bool norm_first, bool gated) {
  DecoderConfig c;
  c.layers = 2;
  c.model_size = 10;
  c.heads = 2;
  c.head_size = 7;
  c.ffn_size = 19;
  c.vocab = 37;
  c.memory_size = 10;
  c.norm_first = norm_first;
  c.gated = gated;
  c.activation = linear::Activation::kGelu;
  c.norm_epsilon = 1e-5f;
  c.attention_scale = 0.4f;
  return c;
}

// Weights, packed, and everything else that a decoder refers to.
class Model {
 public:
  explicit Model(const DecoderConfig& c) : config(c) {
    const int64_t attention = c.attention_size();
    for (int64_t i = 0; i < c.layers; ++i) {
      LayerWeights w;
      w.self_norm = w.cross_norm = w.ffn_norm = norm();
      w.qkv = linear(c.model_size, 3 * attention);
      w.self_out = linear(attention, c.model_size);
      w.cross_query = linear(c.model_size, attention);
      w.cross_key_value = linear(c.memory_size, 2 * attention);
      w.cross_out = linear(attention, c.model_size);
      w.ffn_up = linear(c.model_size, c.ffn_size);
      if (c.gated) w.ffn_gate = linear(c.model_size, c.ffn_size);
      w.ffn_down = linear(c.ffn_size, c.model_size);
      layers_.push_back(w);
    }
    weights.embedding = floats(c.vocab * c.model_size, 2.0f);
    weights.positions = floats(kCapacity * c.model_size, 1.0f);
    weights.num_positions = kCapacity;
    weights.relative_bias = floats(c.heads * kCapacity, 1.0f);
    weights.num_distances = kCapacity;
    if (c.norm_first) weights.final_norm = norm();
    weights.logits = linear(c.model_size, c.vocab);
    weights.layers = layers_.data();
  }

  const DecoderConfig config;
  DecoderWeights weights;

 private:
  float* floats(int64_t count, float scale) { return random_.floats(count, scale); }
  NormWeights norm() { return {floats(config.model_size, 1.0f), floats(config.model_size, 0.1f)}; }
  LinearWeights linear(int64_t in, int64_t out) { return random_.linear(in, out, *config.format); }

  RandomWeights random_;
  std::vector<LayerWeights> layers_;
};

struct Caches {
  Exactly<float> self_keys, self_values, cross_keys, cross_values;
  Exactly<int64_t> memory_lengths, cached_lengths;
  Exactly<int32_t> table;
  DecoderCaches caches;

  Caches(const DecoderConfig& c, int64_t rows, int64_t requests)
      : self_keys(c.layers * rows * c.heads * kCapacity * padded_to_block(c.head_size), NAN),
        self_values(self_keys.size(), NAN),
        cross_keys(c.layers * requests * c.heads * kSource * padded_to_block(c.head_size)),
        cross_values(cross_keys.size()),
        memory_lengths(requests, 9),
        cached_lengths(requests),
        table(rows * kCapacity, -1) {
    Random random;
    for (int64_t i = 0; i < cross_keys.size(); ++i) {
      cross_keys[i] = random.next();
      cross_values[i] = random.next();
    }
    caches.rows = rows;
    caches.requests = requests;
    caches.capacity = kCapacity;
    caches.source = kSource;
    caches.self_keys = self_keys.get();
    caches.self_values = self_values.get();
    caches.cross_keys = cross_keys.get();
    caches.cross_values = cross_values.get();
    caches.memory_lengths = memory_lengths.get();
    caches.table = table.get();
  }
};

// kRequests searches of kBeams beams, of which the second has a prompt of three tokens.
class Searches {
 public:
  Searches(const Model& model, bool greedy)
      : beams_(greedy ? 1 : kBeams),
        caches_(model.config, kRequests * beams_, kRequests),
        sequences(kRequests * beams_ * kCapacity, 1),
        scores(kRequests * beams_, -1.0e9f),
        lengths(kRequests, 1),
        hypothesis_scores(kRequests * beams_),
        done(kRequests),
        prompt_lengths(kRequests, 1),
        log_probs_(sequences.size()),
        hypotheses_(sequences.size()),
        hypothesis_log_probs_(sequences.size()),
        hypothesis_lengths_(hypothesis_scores.size()),
        numbers_(hypothesis_scores.size(), -1),
        worst_(kRequests, 1e9),
        status_(kRequests),
        num_beams_(kRequests, beams_),
        max_lengths_(kRequests, kCapacity),
        early_stopping_(kRequests, 1),
        end_tokens_(kRequests, 2),
        length_penalty_(kRequests, 1.0),
        repetition_penalty_(kRequests, 1.3f),
        ngram_(kRequests, 3),
        diversity_(kRequests),
        bans_(kRequests * 4) {
    for (int64_t slot = 0; slot < kRequests; ++slot) {
      scores[slot * beams_] = 0.0f;
      const int64_t ban[] = {5, 0, 100, 1};
      for (int i = 0; i < 4; ++i) bans_[slot * 4 + i] = ban[i];
    }
    lengths[1] = prompt_lengths[1] = 3;
    beam::BeamSearchState& s = params.state;
    s.slots = kRequests;
    s.beams = s.hypotheses = beams_;
    s.capacity = s.log_prob_capacity = kCapacity;
    s.sequences = sequences.get();
    s.log_probs = log_probs_.get();
    s.scores = scores.get();
    s.lengths = lengths.get();
    s.hypothesis_sequences = hypotheses_.get();
    s.hypothesis_log_probs = hypothesis_log_probs_.get();
    s.hypothesis_lengths = hypothesis_lengths_.get();
    s.hypothesis_scores = hypothesis_scores.get();
    s.hypothesis_numbers = numbers_.get();
    s.worst_scores = worst_.get();
    s.done = done.get();
    s.status = status_.get();
    beam::BeamSearchParameters& p = params.parameters;
    p.num_beams = p.num_hypotheses = num_beams_.get();
    p.prompt_lengths = prompt_lengths.get();
    p.max_lengths = max_lengths_.get();
    p.length_penalty = length_penalty_.get();
    p.early_stopping = early_stopping_.get();
    p.end_tokens = p.pad_tokens = end_tokens_.get();
    p.num_end_tokens = 1;
    params.config = model.config;
    params.weights = model.weights;
    params.token_rules.rows = params.state.slots;
    params.token_rules.repetition_penalty = repetition_penalty_.get();
    params.token_rules.no_repeat_ngram_size = ngram_.get();
    params.token_rules.diversity_penalty = diversity_.get();
    params.token_rules.bans = bans_.get();
    params.token_rules.num_bans = 1;
    params.greedy = greedy;
    params.num_candidates = 2 * beams_;
    params.caches = caches_.caches;
    params.cached_lengths = caches_.cached_lengths.get();
    workspace_ =
        std::make_unique<Exactly<uint8_t>>(static_cast<int64_t>(decoding_workspace_bytes(params)));
    params.workspace = workspace_->get();
  }

  int64_t run(int64_t steps) {
    params.max_steps = steps;
    return decoding_steps_cpu(params);
  }

  DecodingParams params;

 private:
  const int64_t beams_;
  Caches caches_;

 public:
  Exactly<int64_t> sequences;
  Exactly<float> scores;
  Exactly<int64_t> lengths;
  Exactly<double> hypothesis_scores;
  Exactly<uint8_t> done;
  Exactly<int64_t> prompt_lengths;

 private:
  Exactly<float> log_probs_;
  Exactly<int64_t> hypotheses_;
  Exactly<float> hypothesis_log_probs_;
  Exactly<int64_t> hypothesis_lengths_, numbers_;
  Exactly<double> worst_;
  Exactly<uint8_t> status_;
  Exactly<int64_t> num_beams_, max_lengths_, early_stopping_, end_tokens_;
  Exactly<double> length_penalty_;
  Exactly<float> repetition_penalty_;
  Exactly<int64_t> ngram_;
  Exactly<float> diversity_;
  Exactly<int64_t> bans_;
  std::unique_ptr<Exactly<uint8_t>> workspace_;
};

TEST(a_step_allocates_nothing) {
  for (const bool greedy : {false, true}) {
    const Model model(small_config(!greedy, !greedy));
    Searches searches(model, greedy);
    searches.params.parameters.end_tokens = nullptr;  // so that searches are long
    searches.params.parameters.num_end_tokens = 0;
    searches.run(14);  // threads keep their scratch, which grows with the history for a while
    allocations = 0;
    CHECK_EQ(searches.run(4), int64_t{4});
    CHECK_EQ(allocations, int64_t{0});
  }
}

TEST(steps_one_by_one_are_steps_at_once) {
  for (const linear::LinearFormat format :
       {linear::LinearFormat::kFloat32, linear::LinearFormat::kBFloat16,
        linear::LinearFormat::kInt8}) {
    for (const bool greedy : {false, true}) {
      DecoderConfig config = small_config(greedy, true);
      config.format = format;
      const Model model(config);
      Searches whole(model, greedy), parts(model, greedy);
      const int64_t steps = whole.run(100);
      int64_t done = 0;
      while (parts.run(1) == 1) ++done;
      CHECK_EQ(done, steps);
      CHECK(steps > 0);
      for (int64_t i = 0; i < whole.sequences.size(); ++i) {
        CHECK_EQ(whole.sequences[i], parts.sequences[i]);
      }
      for (int64_t i = 0; i < whole.hypothesis_scores.size(); ++i) {
        CHECK_EQ(whole.hypothesis_scores[i], parts.hypothesis_scores[i]);
      }
    }
  }
}

TEST(a_search_does_not_depend_on_the_others) {
  const Model model(small_config(true, false));
  Searches both(model, false);
  both.run(100);
  for (int64_t slot = 0; slot < kRequests; ++slot) {
    Searches alone(model, false);
    alone.done[1 - slot] = 1;
    alone.run(100);
    for (int64_t i = 0; i < kBeams; ++i) {
      const int64_t at = slot * kBeams + i;
      CHECK_EQ(alone.hypothesis_scores[at], both.hypothesis_scores[at]);
    }
    CHECK_EQ(alone.lengths[slot], both.lengths[slot]);
  }
}

// A padded prompt, whose positions are those of the same prompt without padding.
TEST(padding_in_front_of_a_prompt_changes_nothing) {
  constexpr int64_t kPads = 2, kSteps = 8;
  for (const bool greedy : {false, true}) {
    const Model model(small_config(!greedy, false));
    const int64_t beams = greedy ? 1 : kBeams;
    Searches plain(model, greedy), padded(model, greedy);
    for (Searches* searches : {&plain, &padded}) searches->params.parameters.end_tokens = nullptr;
    for (Searches* searches : {&plain, &padded}) searches->params.parameters.num_end_tokens = 0;
    const int64_t first = beams * kCapacity;  // of the second request
    for (int64_t beam = 0; beam < beams; ++beam) {
      for (int64_t i = 0; i < kPads; ++i) padded.sequences[first + beam * kCapacity + i] = kPadding;
    }
    padded.lengths[1] += kPads;
    padded.prompt_lengths[1] += kPads;
    CHECK_EQ(plain.run(kSteps), kSteps);
    CHECK_EQ(padded.run(kSteps), kSteps);
    CHECK_EQ(padded.lengths[1], plain.lengths[1] + kPads);
    for (int64_t row = 0; row < kRequests * beams; ++row) {
      const int64_t shift = row < beams ? 0 : kPads;
      for (int64_t i = 0; i < plain.lengths[row / beams]; ++i) {
        CHECK_EQ(padded.sequences[row * kCapacity + shift + i],
                 plain.sequences[row * kCapacity + i]);
      }
      CHECK_EQ(padded.scores[row], plain.scores[row]);
    }
  }
}

// Of 37 tokens 30 to 36 are timestamps, 29 is "no timestamps", and 2 is an end.
TEST(timestamps_come_in_pairs_and_do_not_go_back) {
  constexpr int64_t kFirst = 30, kLastInitial = 32;
  for (const bool greedy : {false, true}) {
    const Model model(small_config(!greedy, true));
    const int64_t beams = greedy ? 1 : kBeams;
    Searches searches(model, greedy);
    searches.params.parameters.end_tokens = nullptr;
    searches.params.parameters.num_end_tokens = 0;
    Exactly<int64_t> rules(kRequests * 4);
    for (int64_t slot = 0; slot < kRequests; ++slot) {
      rules[slot * 4] = kFirst;
      rules[slot * 4 + 1] = 3;
      rules[slot * 4 + 2] = searches.lengths[slot];
      rules[slot * 4 + 3] = kLastInitial;
    }
    const int64_t begins[] = {searches.lengths[0], searches.lengths[1]};
    searches.params.token_rules.timestamps = rules.get();
    Exactly<float> scores(kRequests * beams * model.config.vocab);
    searches.params.scores = scores.get();
    CHECK(searches.run(12) > 0);
    for (int64_t row = 0; row < kRequests * beams; ++row) {
      const int64_t slot = row / beams, length = searches.lengths[slot];
      const int64_t* const tokens = &searches.sequences[row * kCapacity];
      CHECK(tokens[begins[slot]] >= kFirst && tokens[begins[slot]] <= kLastInitial);
      int64_t latest = 0, in_a_row = 0;
      for (int64_t i = begins[slot]; i < length; ++i) {
        CHECK(tokens[i] != kFirst - 1);
        in_a_row = tokens[i] >= kFirst ? in_a_row + 1 : 0;
        CHECK(in_a_row <= 2);
        if (tokens[i] < kFirst) continue;
        CHECK(tokens[i] >= latest);
        latest = tokens[i];
      }
    }
  }
}

// The one search; the other one has none, and goes on as without it.
TEST(a_search_is_held_to_its_trie) {
  std::vector<int64_t> tokens, offsets{0};
  for (int64_t i = 0; i < 400; ++i) {
    for (int64_t n = 0; n < 1 + i % 4; ++n) tokens.push_back(6 + (i * 7 + n * i) % 31);
    tokens.push_back(2);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  const beam::TokenTrieArrays arrays = beam::build_token_trie(tokens.data(), offsets.data(), 400);
  const beam::TokenTrie trie{arrays.tokens.data(), arrays.child_begin.data(),
                             static_cast<int64_t>(arrays.tokens.size())};
  const int64_t numbers[] = {0, -1};
  for (const bool greedy : {false, true}) {
    const Model model(small_config(!greedy, true));
    Searches whole(model, greedy), parts(model, greedy), free(model, greedy);
    for (Searches* searches : {&whole, &parts}) {
      searches->params.token_rules.trie_numbers = numbers;
      searches->params.token_rules.tries = &trie;
      searches->params.token_rules.num_tries = 1;
    }
    const int64_t steps = whole.run(100);
    free.run(100);
    int64_t done = 0;
    while (parts.run(1) == 1) ++done;
    CHECK_EQ(done, steps);
    const beam::BeamSearchState& state = whole.params.state;
    const auto in_trie = [&](const int64_t* sequence, int64_t length) {
      const int32_t node = trie.find(sequence + 1, length - 1);
      return node != beam::kOffTrie && arrays.ends[static_cast<size_t>(node)] == 1;
    };
    if (greedy) {
      CHECK(in_trie(state.sequences, state.lengths[0]));
    } else {
      for (int64_t place = 0; place < kBeams; ++place) {
        CHECK(state.hypothesis_numbers[place] >= 0);
        CHECK(in_trie(state.hypothesis_sequences + place * kCapacity,
                      state.hypothesis_lengths[place]));
        CHECK_EQ(whole.hypothesis_scores[place], parts.hypothesis_scores[place]);
        CHECK_EQ(whole.hypothesis_scores[kBeams + place], free.hypothesis_scores[kBeams + place]);
      }
    }
    const int64_t rows = greedy ? 1 : kBeams;
    for (int64_t i = 0; i < rows * kCapacity; ++i) {
      CHECK_EQ(whole.sequences[i], parts.sequences[i]);
      CHECK_EQ(whole.sequences[rows * kCapacity + i], free.sequences[rows * kCapacity + i]);
    }
  }
}

TEST(it_stops_when_one_has_ended) {
  const Model model(small_config(false, false));
  Searches searches(model, false);
  searches.params.stop_when_done = true;
  searches.run(100);
  CHECK_EQ(int(searches.done[0]) + int(searches.done[1]), 1);
}

TEST(the_search_of_faster_transformer) {
  const Model model(small_config(true, false));
  for (const int64_t memory_rows : {int64_t{1}, kBeams}) {
    const int64_t rows = kRequests * kBeams;
    Caches caches(model.config, rows, rows / memory_rows);
    Exactly<int32_t> ids(kCapacity * rows), parents(kCapacity * rows), lengths(rows);
    FasterTransformerParams p;
    p.config = model.config;
    p.weights = model.weights;
    p.caches = caches.caches;
    p.memory_rows = memory_rows;
    p.batch = kRequests;
    p.beams = kBeams;
    p.max_steps = kCapacity;
    p.start_token = 1;
    p.end_token = 2;
    p.output_ids = ids.get();
    p.parent_ids = parents.get();
    p.sequence_lengths = lengths.get();
    Exactly<uint8_t> workspace(static_cast<int64_t>(faster_transformer_workspace_bytes(p)));
    p.workspace = workspace.get();
    CHECK_EQ(int(faster_transformer_search_cpu(p)), 0);
    allocations = 0;
    CHECK_EQ(int(faster_transformer_search_cpu(p)), 0);
    CHECK_EQ(allocations, int64_t{0});
    for (int64_t i = 0; i < ids.size(); ++i) {
      CHECK(ids[i] >= 0 && ids[i] < 37);
      CHECK_EQ(parents[i] / kBeams, static_cast<int32_t>(i % rows / kBeams));
    }
  }
}

const int kHooks = __sanitizer_install_malloc_and_free_hooks(count_allocation, ignore_free);

TEST(allocations_are_counted) {
  const int64_t before = allocations;
  void* volatile memory = std::malloc(100);
  std::free(memory);
  CHECK(kHooks > 0);
  CHECK_EQ(allocations, before + 1);
}

}  // namespace
}  // namespace lmdecode::decoder

CHECK_MAIN()
