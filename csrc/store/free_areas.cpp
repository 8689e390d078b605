#include "store/free_areas.h"

#include <algorithm>

namespace lmdecode::store {

void FreeAreas::reset(uint32_t used, uint32_t capacity, int64_t idle_ms) {
  used_ = used;
  capacity_ = std::max(used, capacity);
  idle_ms_ = idle_ms;
  idle_.clear();
  freed_.clear();
  refused_.clear();
  only_used_ = false;
  without_space_.clear();
}

void FreeAreas::add_freed(uint32_t area, int64_t freed_ms, int64_t now_ms) {
  if (now_ms - freed_ms >= idle_ms_) {
    idle_.push_back(area);
  } else {
    freed_.push_back({area, freed_ms});
  }
}

void FreeAreas::give_back(uint32_t area) { idle_.push_front(area); }

void FreeAreas::age(int64_t now_ms) {
  while (!freed_.empty() && now_ms - freed_.front().freed_ms >= idle_ms_) {
    idle_.push_back(freed_.front().area);
    freed_.pop_front();
  }
}

uint32_t FreeAreas::take(int64_t now_ms) {
  age(now_ms);
  if (total() == 0) return kNoArea;
  uint32_t area;
  if (freed() > idle()) {
    area = freed_.front().area;
    freed_.pop_front();
  } else if (!idle_.empty()) {
    area = idle_.front();
    idle_.pop_front();
  } else if (idle() > 0) {
    area = used_++;
  } else {
    area = refused_.front();
    refused_.pop_front();
  }
  without_space_.erase(area);
  return area;
}

bool FreeAreas::remove(uint32_t area) {
  without_space_.erase(area);
  return std::erase(idle_, area) + std::erase(refused_, area) +
             std::erase_if(freed_, [&](const Freed& freed) { return freed.area == area; }) >
         0;
}

std::vector<uint32_t> FreeAreas::listed() const {
  std::vector<uint32_t> areas(idle_.begin(), idle_.end());
  for (const Freed& freed : freed_) areas.push_back(freed.area);
  areas.insert(areas.end(), refused_.begin(), refused_.end());
  return areas;
}

std::vector<uint32_t> FreeAreas::take_space() {
  std::vector<uint32_t> areas;
  const auto take = [&](uint32_t area) {
    if (without_space_.insert(area).second) areas.push_back(area);
  };
  for (const uint32_t area : idle_) take(area);
  for (const Freed& freed : freed_) take(freed.area);
  return areas;
}

void FreeAreas::refuse_all() {
  refused_.insert(refused_.end(), idle_.begin(), idle_.end());
  for (const Freed& freed : freed_) refused_.push_back(freed.area);
  idle_.clear();
  freed_.clear();
}

}  // namespace lmdecode::store
