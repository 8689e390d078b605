// Free slots in two queues: those that have stored nothing for a set time, and those that a
// deletion freed within it. Which one serves an export is decided by how many each has left.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "store/address_map.h"

namespace lmdecode::store {

class FreeAreas {
 public:
  // Areas are numbered from 0 to capacity - 1; those from `used` on have never stored anything.
  void reset(uint32_t used, uint32_t capacity, int64_t idle_ms);
  // Freed at this time; into the first queue where that is long ago. Times do not decrease.
  void add_freed(uint32_t area, int64_t freed_ms, int64_t now_ms);
  // Handed out, but nothing refers to it: back to where it serves next.
  void give_back(uint32_t area);
  // From the queue that has more left, from the first where they have the same; kNoArea: none.
  uint32_t take(int64_t now_ms);
  // No area that was never used is handed out any more: the disk is full.
  void keep_to_used() { capacity_ = used_; }

  uint64_t idle() const { return idle_.size() + (capacity_ - used_); }
  uint64_t freed() const { return freed_.size(); }
  uint64_t total() const { return idle() + freed(); }
  uint32_t used() const { return used_; }
  std::vector<uint32_t> listed() const;  // both queues, without those never used

 private:
  struct Freed {
    uint32_t area;
    int64_t freed_ms;
  };
  void age(int64_t now_ms);

  uint32_t used_ = 0;
  uint32_t capacity_ = 0;
  int64_t idle_ms_ = 0;
  std::deque<uint32_t> idle_;
  std::deque<Freed> freed_;
};

}  // namespace lmdecode::store
