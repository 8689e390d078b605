// Free slots in two queues: slots idle for a set time, and slots freed since then. Which one serves
// an export is decided by how many each has left.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

#include "store/address_map.h"

namespace lmdecode::store {

class FreeAreas {
 public:
  // Areas are numbered from 0 to capacity - 1; areas from `used` on have never stored anything.
  void reset(uint32_t used, uint32_t capacity, int64_t idle_ms);
  // Freed at this time; into the first queue where that is long ago. Times do not decrease.
  void add_freed(uint32_t area, int64_t freed_ms, int64_t now_ms);
  // Handed out, but nothing refers to it: back to where it serves next.
  void give_back(uint32_t area);
  // One that is listed is so no longer; false: it is not.
  bool remove(uint32_t area);
  // From the queue that has more left, from the first where they have the same; kNoArea: none.
  uint32_t take(int64_t now_ms);
  // The disk had no space for it: it serves last.
  void refuse(uint32_t area) { refused_.push_back(area); }
  // The disk is full: no area that was never used, or was refused, is handed out ...
  void keep_to_used() { only_used_ = true; }
  void use_all() { only_used_ = false; }  // ... until it is not.
  // Treats both queues as refused: their space was returned to the disk.
  void refuse_all();
  // Returns the areas of both queues that still have disk space, and marks it as returned.
  std::vector<uint32_t> take_space();

  uint64_t idle() const { return idle_.size() + (only_used_ ? 0 : capacity_ - used_); }
  uint64_t freed() const { return freed_.size(); }
  uint64_t refused() const { return refused_.size(); }
  uint64_t total() const { return idle() + freed() + (only_used_ ? 0 : refused()); }
  uint32_t used() const { return used_; }
  std::vector<uint32_t> listed() const;  // all queues, without areas never used

 private:
  struct Freed {
    uint32_t area;
    int64_t freed_ms;
  };
  void age(int64_t now_ms);

  uint32_t used_ = 0;
  uint32_t capacity_ = 0;
  int64_t idle_ms_ = 0;
  bool only_used_ = false;
  std::deque<uint32_t> idle_;
  std::deque<uint32_t> refused_;
  std::deque<Freed> freed_;
  std::unordered_set<uint32_t> without_space_;
};

}  // namespace lmdecode::store
