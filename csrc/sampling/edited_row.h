// A row of logits of which some tokens count with other values than those in memory. A kernel
// header: see simd/vec.h.
#pragma once

#include "sampling/list_stages.h"
#include "sampling/sampler_edits.h"

namespace lmdecode::LMD_SIMD::sampling {

using namespace lmdecode::sampling;

// The touched tokens' logits, and the tokens that a bitmask allows: see NoEdits in row_passes.h.
struct RowEdits {
  static constexpr bool kAny = true;

  const uint64_t* touched_bits;
  const int32_t* allowed;  // [allowed_words], or null
  int64_t allowed_words;
  const uint32_t* ids;  // [count] touched tokens, in any order
  const float* edited;  // [count] their logits
  int64_t count;

  bool any() const { return count > 0 || allowed != nullptr; }

  bool allows(int64_t token) const {
    return allowed == nullptr ||
           (static_cast<uint32_t>(allowed[token / 32]) >> (token % 32) & 1) != 0;
  }

  uint64_t allowed_word(int64_t block) const {
    if (allowed == nullptr) return ~uint64_t{0};
    const int64_t i = 2 * block;
    const uint64_t low = static_cast<uint32_t>(allowed[i]);
    const uint64_t high = i + 1 < allowed_words ? static_cast<uint32_t>(allowed[i + 1]) : 0;
    return high << 32 | low;
  }

  uint64_t word(int64_t block) const {
    return count == 0 ? allowed_word(block) : allowed_word(block) & ~touched_bits[block];
  }

  // The list stays in ascending token order.
  void append(float threshold, CandidateList* list) const {
    const int64_t before = list->size;
    const F32 bound = splat(threshold);
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32 y = load(edited + i);
      uint32_t mask = bits(y >= bound);
      if (count - i < kLanes) mask &= (1u << (count - i)) - 1;
      push(list, mask, y, load(ids + i));
    }
    // Token and value of the new ones, as numbers that sort by token.
    uint64_t* added = list->spare_mass;
    int64_t n = 0;
    for (int64_t i = before; i < list->size; ++i) {
      if (!allows(list->token[i])) continue;
      added[n++] = static_cast<uint64_t>(list->token[i]) << 32 | bits_of(list->value[i]);
    }
    sort(added, n);
    list->size = before + n;
    int64_t old = before - 1;
    for (int64_t to = list->size - 1; n > 0; --to) {
      const uint32_t token = static_cast<uint32_t>(added[n - 1] >> 32);
      if (old >= 0 && list->token[old] > token) {
        list->token[to] = list->token[old];
        list->value[to] = list->value[old];
        --old;
      } else {
        --n;
        list->token[to] = token;
        list->value[to] = float_of(static_cast<uint32_t>(added[n]));
      }
    }
  }

  // The whole row as it counts, to `out`, without NaN. Reports those of x.
  template <class T>
  bool write(const T* x, int64_t n, float* out) const {
    const F32 zero = splat(0.0f), off = splat(minus_infinity());
    uint32_t nan = 0;
    for (int64_t i = 0; i < n; i += kBlock) {
      const uint64_t word = allowed_word(i / kBlock);
      for (int64_t j = i; j < i + kBlock && j < n; j += kLanes) {
        const F32 a = j + kLanes <= n ? load(x + j)
                                      : load_part(x + j, static_cast<int>(n - j), minus_infinity());
        const Mask is_number = a == a;
        nan |= bits(is_nan(a, zero));
        store(out + j, select(is_number, a, off));  // `out` has room for whole vectors
        uint32_t banned = ~static_cast<uint32_t>(word >> (j - i)) & kAllLanes;
        for (; banned != 0; banned &= banned - 1) out[j + __builtin_ctz(banned)] = minus_infinity();
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const float y = edited[i];
      out[ids[i]] = y == y && allows(ids[i]) ? y : minus_infinity();
    }
    return nan != 0;
  }

 private:
  // Shell's sort: a few hundred numbers, often in order already.
  static void sort(uint64_t* number, int64_t n) {
    constexpr int64_t kGaps[] = {4193, 1073, 281, 77, 23, 8, 1};
    for (const int64_t gap : kGaps) {
      for (int64_t i = gap; i < n; ++i) {
        const uint64_t a = number[i];
        int64_t j = i;
        for (; j >= gap && number[j - gap] > a; j -= gap) number[j] = number[j - gap];
        number[j] = a;
      }
    }
  }
};

// The logits of the touched tokens of a row: as the model gave them, then after penalties. What
// depends on the text comes after: apply_text_rules().
template <class T>
void edit_touched(const T* x, const SamplerRowView& view, const SamplerPenalties& penalties,
                  const TouchedLogits& logits) {
  const int64_t count = view.row->touched;
  for (int64_t i = 0; i < count; ++i) logits.raw[i] = to_float(x[view.ids[i]]);
  const F32 repetition = splat(penalties.repetition), presence = splat(penalties.presence),
            frequency = splat(penalties.frequency), zero = splat(0.0f),
            off = splat(minus_infinity());
  const U32 one = splat_u32(1);
  // Lanes behind the last token compute anything: the arrays have room.
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 bias = load(view.biases + i);
    const U32 prompt = load(view.prompt_counts + i), output = load(view.output_counts + i);
    F32 y = select(bias == off, off, load(logits.raw + i) + bias);
    if (penalties.repetition != 1.0f) {
      const F32 repeated = select(zero > y, y * repetition, y / repetition);
      y = select(prompt + output >= one, repeated, y);
    }
    const U32 counted = penalties.counts_see_prompt ? prompt + output : output;
    y = select(counted >= one, (y - frequency * convert_u32(counted)) - presence, y);
    store(logits.edited + i, y);
  }
}

}  // namespace lmdecode::LMD_SIMD::sampling
