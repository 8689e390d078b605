// A step of a decoder-only model under sanitizers: logits depend on neither company nor parts.
#include <memory>
#include <vector>

#include "check.h"
#include "decoder/causal_forward.h"
#include "exact_memory.h"
#include "random_weights.h"

namespace lmdecode::decoder {
namespace {

constexpr int64_t kWindow = 5, kBlockSize = 4, kMaxBlocks = 8, kSequences = 3, kVocab = 29;

// Layers without a window, with one in a cache of its own, and with the keys of this.
class Model {
 public:
  explicit Model(linear::LinearFormat format) {
    DecoderConfig& c = model.config;
    c.layers = 3;
    c.model_size = 10;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_size = 7;
    c.ffn_size = 19;
    c.vocab = kVocab;
    c.norm = NormKind::kRmsNorm;
    c.norm_first = c.gated = true;
    c.activation = linear::Activation::kSilu;
    c.format = format;
    c.norm_epsilon = 1e-5f;
    c.attention_scale = 0.4f;
    model.heads[0] = {1, 9, 8};
    model.heads[1] = {c.kv_heads, c.head_size, 6};
    c.widest_projection = c.heads * 9 + 2 * 9;
    c.widest_mixed = c.heads * 9;
    model.norms_values = true;
    model.last_with_keys = 1;
    model.num_rotary = 1;
    model.frequencies = floats(4, 1.0f);
    model.rotary_scales = floats(1, 1.0f);
    model.attention_softcap = 2.0f;
    model.logits_softcap = 3.0f;
    model.embedding.values = floats(kVocab * c.model_size, 2.0f);
    model.per_layer.size = 5;
    model.per_layer.rows.values = floats(kVocab * c.layers * 5, 2.0f);
    model.per_layer.projection = linear(c.model_size, c.layers * 5);
    model.per_layer.norm = floats(5, 1.0f);
    model.per_layer.norm_epsilon = 1e-5f;
    model.weights.final_norm = norm();
    model.weights.logits = linear(c.model_size, kVocab);
    for (int64_t i = 0; i < c.layers; ++i) {
      CausalLayer layer;
      LayerWeights& w = layer.weights;
      w.self_norm = norm();
      w.self_out_norm = norm();
      w.ffn_norm = norm();
      w.ffn_out_norm = norm();
      layer.heads = model.heads[i == 0 ? 0 : 1];
      if (i < 2) layer.keys = i == 0 ? KeySource::kAreValues : KeySource::kOwn;
      if (i == 2) layer.keys = KeySource::kShared;
      const int64_t query_size = c.heads * layer.heads.size, key_size = layer.heads.key_size();
      const int64_t parts[] = {1, 2, 0};
      w.qkv = linear(c.model_size, query_size + parts[i] * key_size);
      w.qkv_stride = query_size + (i < 2 ? 2 * key_size : 0);
      w.self_out = linear(query_size, c.model_size);
      w.ffn_up = linear(c.model_size, c.ffn_size);
      w.ffn_gate = linear(c.model_size, c.ffn_size);
      w.ffn_down = linear(c.ffn_size, c.model_size);
      layer.per_layer.gate = linear(c.model_size, 5);
      layer.per_layer.out = linear(5, c.model_size);
      layer.per_layer.out_norm = norm();
      layer.per_layer.scale = floats(1, 1.0f);
      layer.query_norm = floats(layer.heads.size, 1.0f);
      if (i < 2) layer.key_norm = floats(layer.heads.size, 1.0f);
      layer.rotary = 0;
      layer.cache = i == 0 ? 0 : 1;
      if (i > 0) layer.window = kWindow;
      layers_.push_back(layer);
    }
    model.layers = layers_.data();
  }
  Model(const Model&) = delete;

  CausalModel model;

 private:
  float* floats(int64_t count, float scale) { return random_.floats(count, scale); }
  NormWeights norm() { return {floats(model.config.model_size, 1.0f), nullptr}; }
  LinearWeights linear(int64_t in, int64_t out) {
    return random_.linear(in, out, *model.config.format);
  }

  RandomWeights random_;
  std::vector<CausalLayer> layers_;
};

enum class CacheFormat { kFloat32, kBFloat16, kInt8 };

// The memory of a cache, NaN at first.
class Cache {
 public:
  Cache(const HeadSizes& heads, CacheFormat format, int64_t window)
      : blocks_(kSequences * kMaxBlocks, kv_cache::kNoBlock),
        lengths_(kSequences),
        ref_counts_(kBlocks),
        free_blocks_(kBlocks),
        counters_(kv_cache::kBlockCounters) {
    for (int32_t b = 0; b < kBlocks; ++b) free_blocks_[b] = b;
    counters_[kv_cache::kFreeBlocks] = kBlocks;
    cache.dtype = format == CacheFormat::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    cache.is_int8 = format == CacheFormat::kInt8;
    cache.layers = 1;
    cache.kv_heads = heads.kv_heads;
    cache.head_size = heads.size;
    cache.window = window;
    kv_cache::BlockTable& t = cache.table;
    t.blocks = blocks_.get();
    t.row_stride = t.max_blocks = kMaxBlocks;
    t.lengths = lengths_.get();
    t.ref_counts = ref_counts_.get();
    t.free_blocks = free_blocks_.get();
    t.counters = counters_.get();
    t.rows = kSequences;
    t.num_blocks = kBlocks;
    t.block_size = kBlockSize;
    pool_ = std::make_unique<Exactly<unsigned char>>(
        cache.layers * 2 * cache.part_stride() * cache.element_size(), 255);
    cache.pool = pool_->get();
  }
  Cache(const Cache&) = delete;

  int32_t free() { return counters_[kv_cache::kFreeBlocks]; }

  static constexpr int32_t kBlocks = kSequences * kMaxBlocks;
  PagedCache cache;

 private:
  Exactly<int32_t> blocks_, lengths_, ref_counts_, free_blocks_, counters_;
  std::unique_ptr<Exactly<unsigned char>> pool_;
};

// Sequences of a model, and what is read of them.
class Texts {
 public:
  Texts(const Model& model, CacheFormat format, int64_t max_rows)
      : full(model.model.heads[0], format, 0), window(model.model.heads[1], format, kWindow) {
    params_.model = &model.model;
    params_.num_caches = 2;
    params_.caches[0] = full.cache;
    params_.caches[1] = window.cache;
    params_.max_rows = max_rows;
    workspace_ = std::make_unique<Exactly<uint8_t>>(
        static_cast<int64_t>(causal_workspace_bytes(model.model, max_rows, kSequences, kMaxBlocks)),
        255);
    params_.workspace = workspace_->get();
  }

  // Entries, whose tokens follow from sequence and position.
  std::vector<float> read(const std::vector<CausalEntry>& entries) {
    int64_t count = 0, num_logits = 0;
    for (const CausalEntry& entry : entries) {
      count += entry.count;
      num_logits += entry.num_logits;
    }
    Exactly<int64_t> tokens(count);
    Exactly<float> logits(num_logits * kVocab);
    int64_t at = 0;
    for (const CausalEntry& entry : entries) {
      const int64_t length = full.cache.table.lengths[entry.sequence];
      for (int64_t t = 0; t < entry.count; ++t) {
        tokens[at++] = ((length + t) * 11 + entry.sequence * 5) % kVocab;
      }
    }
    params_.entries = entries.data();
    params_.num_entries = static_cast<int64_t>(entries.size());
    params_.tokens = tokens.get();
    params_.logits = logits.get();
    causal_forward_cpu(params_);
    return {logits.get(), logits.get() + logits.size()};
  }

  Cache full, window;

 private:
  CausalForwardParams params_;
  std::unique_ptr<Exactly<uint8_t>> workspace_;
};

// With logits of all its tokens, or of the last so many.
CausalEntry entry(int64_t sequence, int64_t count, bool is_prompt, int64_t num_logits = -1) {
  return {sequence, count, is_prompt, num_logits < 0 ? count : num_logits};
}

template <class Body>
void for_formats(const Body& body) {
  for (const auto format : {linear::LinearFormat::kFloat32, linear::LinearFormat::kBFloat16,
                            linear::LinearFormat::kInt8}) {
    const Model model(format);
    for (const auto cache : {CacheFormat::kFloat32, CacheFormat::kBFloat16, CacheFormat::kInt8}) {
      body(model, cache);
    }
  }
}

std::vector<float> part(const std::vector<float>& logits, int64_t first, int64_t count) {
  return {logits.begin() + first * kVocab, logits.begin() + (first + count) * kVocab};
}

TEST(a_text_in_any_parts_and_company) {
  for_formats([](const Model& model, CacheFormat format) {
    Texts alone(model, format, 64);
    const std::vector<float> prompt = alone.read({entry(1, 21, true)});
    const std::vector<float> rest = alone.read({entry(1, 11, false)});
    for (const float logit : prompt) CHECK(logit > -3.0f && logit < 3.0f);  // within the cap
    for (const int64_t max_rows : {1, 5, 64}) {
      Texts texts(model, format, max_rows);
      std::vector<float> got =
          texts.read({entry(0, 3, true), entry(1, 8, true), entry(2, 1, false)});
      CHECK(part(got, 3, 8) == part(prompt, 0, 8));
      got = texts.read({entry(1, 13, true), entry(2, 14, true)});
      CHECK(part(got, 0, 13) == part(prompt, 8, 13));
      got = texts.read({entry(0, 9, true), entry(1, 1, false)});
      CHECK(part(got, 9, 1) == part(rest, 0, 1));
      got = texts.read({entry(1, 10, false)});
      CHECK(got == part(rest, 1, 10));
      CHECK_EQ(texts.full.free(), Cache::kBlocks - 3 - 8 - 4);
      // Of 12, 32 and 15 positions: the block of the first key that the next token sees, and on.
      CHECK_EQ(texts.window.free(), Cache::kBlocks - 1 - 1 - 2);

      Texts some(model, format, max_rows);
      got = some.read({entry(2, 3, false, 1), entry(1, 17, true, 6), entry(0, 8, true, 0)});
      CHECK(part(got, 1, 6) == part(prompt, 11, 6));
      got = some.read({entry(2, 4, true, 0), entry(1, 4, true, 0)});
      got = some.read({entry(0, 2, true, 1), entry(1, 7, false, 2), entry(2, 1, false)});
      CHECK(part(got, 1, 2) == part(rest, 5, 2));
    }
  });
}

TEST(sequences_that_share) {
  for_formats([](const Model& model, CacheFormat format) {
    Texts texts(model, format, 6), alone(model, format, 64);
    texts.read({entry(0, 10, true)});
    Exactly<int64_t> zeros(kSequences);
    kv_cache::ParentRows parents;
    parents.data = zeros.get();
    parents.rows = kSequences;
    for (const Cache* cache : {&texts.full, &texts.window}) {
      reorder_block_table(cache->cache.table, kSequences, parents);
    }
    const std::vector<float> got = texts.read({entry(2, 4, false), entry(0, 5, true)});
    alone.read({entry(0, 10, true)});
    CHECK(part(got, 4, 5) == alone.read({entry(0, 5, true)}));
  });
}

}  // namespace
}  // namespace lmdecode::decoder

CHECK_MAIN()
