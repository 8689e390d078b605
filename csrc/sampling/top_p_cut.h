// Where top-p cuts a row: the guess before, and what is kept.
#pragma once

#include "sampling/kept_set.h"

namespace lmdecode::sampling {

// Logits between which the cut is looked for: the list holds the tokens from `lower` on, and below
// `upper` where bounded.
struct Band {
  float lower, upper;
  bool bounded;
};

// A prefix of the list of candidates.
struct ListCut {
  KeptSet set;
  int64_t kept;
  uint64_t mass;
};

// What top-p keeps of the row.
struct RowCut {
  KeptSet set;
  int64_t kept;   // tokens, -1 where not counted
  uint64_t mass;  // of the kept tokens, 0 where not summed
  bool listed;    // the list holds all of them
};

}  // namespace lmdecode::sampling
