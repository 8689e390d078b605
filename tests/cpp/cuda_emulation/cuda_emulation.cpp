#include "cuda_emulation.h"

#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "machine.h"

namespace lmdecode::emulation {

// ---- barriers and exchanges

static bool same_place(const Location& a, const Location& b) {
  if (a.line() != b.line() || a.column() != b.column()) return false;
  return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
}

void Machine::arrive_at(Barrier& barrier, State state, Location where, const char* name) {
  if (barrier.waiting == 0) {
    barrier.where = where;
    barrier.first = unsigned(current_);
  } else if (!same_place(barrier.where, where)) {
    fail(std::string(name) + " at line " + std::to_string(where.line()) + " while " +
         describe(barrier.first) + " waits at line " + std::to_string(barrier.where.line()) +
         " of " + barrier.where.file_name());
  }
  ++barrier.waiting;
  const bool whole_cluster = state == State::kClusterBarrier;
  const unsigned first = whole_cluster ? 0 : self().block * block_threads_;
  if (barrier.waiting == barrier.alive) {
    self().state = State::kReady;
    release(barrier, state, first, whole_cluster ? total_threads_ : first + block_threads_);
    switch_to(pick());
  } else {
    block_self(state, where);
  }
}

void Machine::release(Barrier& barrier, State state, unsigned first, unsigned last) {
  switch (barrier.vote) {
    case Vote::kNone:
      break;
    case Vote::kCount:
      barrier.result = barrier.count;
      break;
    case Vote::kAnd:
      barrier.result = barrier.count == int(barrier.waiting);
      break;
    case Vote::kOr:
      barrier.result = barrier.count != 0;
      break;
  }
  barrier.count = 0;
  barrier.waiting = 0;
  ++barrier.epoch;
  idle_points_ = 0;
  for (unsigned t = first; t < last; ++t) {
    if (threads_[t].state == state) set_ready(t);
  }
}

int Machine::block_barrier(Vote vote, int predicate, Location where) {
  Barrier& barrier = blocks_[self().block].barrier;
  if (barrier.waiting == 0) barrier.vote = vote;
  barrier.count += predicate != 0;
  arrive_at(barrier, State::kBarrier, where, "__syncthreads");
  return barrier.result;  // of this barrier still: the next one needs this thread
}

void Machine::cluster_barrier(Location where) {
  arrive_at(cluster_barrier_, State::kClusterBarrier, where, "cluster_sync");
}

std::uint64_t Machine::exchange(const char* name, Resolve resolve, Ordering ordering, unsigned mask,
                                std::uint64_t value, std::uint64_t argument, Location where) {
  Warp& warp = warp_of(unsigned(current_));
  const unsigned me = lane(), bit = 1u << me;
  const auto complain = [&](const std::string& what) {
    char text[128];
    std::snprintf(text, sizeof(text), "%s, mask %08x, line %u: ", name, mask,
                  unsigned(where.line()));
    fail(text + what);
  };
  if ((mask & bit) == 0) complain("the mask leaves out lane " + std::to_string(me) + " itself");
  if (const unsigned gone = mask & warp.missing; gone != 0) {
    complain("the mask names lane " + std::to_string(std::countr_zero(gone)) +
             ", which has exited or never was");
  }
  // The lowest lane speaks for all that wait with it: each was compared when it came.
  unsigned arrived = bit;
  for (unsigned rest = warp.waiting & mask; rest != 0; rest &= ~arrived) {
    const unsigned other = unsigned(std::countr_zero(rest));
    Lane& lane = warp.lanes[other];
    if ((lane.mask & bit) == 0) {  // waits for others first, and comes here later
      rest &= rest - 1;
      continue;
    }
    if (lane.mask != mask || lane.resolve != resolve || !same_place(lane.where, where)) {
      complain("meets lane " + std::to_string(other) + " in " + lane.name + " at line " +
               std::to_string(lane.where.line()));
    }
    lane.with |= bit;
    arrived |= lane.with;
  }
  warp.values[me] = value;
  warp.lanes[me] = {resolve, name, mask, arrived, argument, 0, where};
  if (arrived != mask) {
    warp.waiting |= bit;
    block_self(State::kExchange, where);
    return warp.lanes[me].result;
  }
  warp.waiting &= ~mask;
  if (ordering == Ordering::kMemory) ++warp.epoch;
  idle_points_ = 0;
  const unsigned first = unsigned(current_) - me;
  std::uint64_t asked = argument, result = resolve(warp.values, argument, mask);
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned other = unsigned(std::countr_zero(rest));
    Lane& lane = warp.lanes[other];
    if (lane.argument != asked) {
      asked = lane.argument;
      result = resolve(warp.values, asked, mask);
    }
    lane.result = result;
    if (other != me) set_ready(first + other);
  }
  switch_to(pick());
  return warp.lanes[me].result;
}

// ---- memory

void* Machine::shared_memory(std::size_t bytes) {
  if (bytes > shape_.shared_bytes) {
    fail("shared_storage needs " + std::to_string(bytes) + " bytes, the launch gave " +
         std::to_string(shape_.shared_bytes));
  }
  return blocks_[self().block].shared;
}

void* Machine::map_shared(void* pointer, unsigned rank) {
  const Place place = place_of(pointer, 1);
  if (place.kind != Place::kShared || place.block != self().block) {
    fail("map_shared_rank of a pointer that is not into the block's own shared memory");
  }
  if (rank >= shape_.cluster_size)
    fail("map_shared_rank: no block " + std::to_string(rank) + " in the cluster");
  return blocks_[rank].shared + place.offset;
}

Place Machine::place_of(const void* address, std::size_t bytes) const {
  if (const std::ptrdiff_t stack = stacks_.index_of(address); stack >= 0) {
    return {stack == current_ ? Place::kOwnStack : Place::kOtherStack, 0, 0};
  }
  const auto offset =
      reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(shared_);
  if (offset >= shared_stride_ * shape_.cluster_size + kSharedGuard)
    return {Place::kElsewhere, 0, 0};
  const std::size_t block = offset / shared_stride_, inside = offset - block * shared_stride_;
  if (block >= shape_.cluster_size || inside < kSharedGuard ||
      inside - kSharedGuard + bytes > shape_.shared_bytes) {
    return {Place::kOutsideShared, std::uint32_t(block), inside};
  }
  return {blocks_[block].barrier.alive == 0 ? Place::kLeftShared : Place::kShared,
          std::uint32_t(block), inside - kSharedGuard};
}

bool Machine::actor(Actor* actor) const {
  if (current_ < 0 || !threads_[current_].started) return false;
  const Thread& thread = threads_[current_];
  *actor = {unsigned(current_),
            thread.warp,
            thread.block,
            cluster_barrier_.epoch,
            blocks_[thread.block].barrier.epoch,
            warps_[thread.warp].epoch};
  return true;
}

// A copy lands at any time between its issue and the wait for it. Landing late shows who reads
// before the wait, landing early who still reads what was there before.
void Machine::copy_async(void* shared, const void* global, unsigned valid_bytes, const void* code) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if (!aligned(shared) || !aligned(global))
    fail("copy_async_16: addresses must be 16-byte aligned");
  if (valid_bytes > 16) fail("copy_async_16: valid_bytes is above 16");
  if (place_of(shared, 16).kind != Place::kShared)
    fail("copy_async_16: the destination is not in shared memory");
  announce(shared, 16, Access::kWrite, code);
  if (valid_bytes != 0) announce(global, valid_bytes, Access::kRead, code);
  Thread& thread = self();
  thread.copies.push_back({shared, global, valid_bytes});
  const bool early = shape_.seed == 1 || (shape_.seed >= 3 && random() % 2 == 0);
  if (early) {
    Copy& copy = thread.copies.back();
    std::memset(copy.shared, 0, 16);
    std::memcpy(copy.shared, copy.global, copy.valid_bytes);
    copy.shared = nullptr;  // done
  }
}

void Machine::wait_copies(int pending) {
  Thread& thread = self();
  const std::size_t groups = thread.group_ends.size();
  if (groups <= std::size_t(pending)) return;
  const std::size_t done = groups - std::size_t(pending);
  finish_copies(thread, thread.group_ends[done - 1]);
}

void Machine::finish_copies(Thread& thread, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const Copy& copy = thread.copies[i];
    if (copy.shared == nullptr) continue;
    std::memset(copy.shared, 0, 16);
    std::memcpy(copy.shared, copy.global, copy.valid_bytes);
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + std::ptrdiff_t(count));
  std::size_t finished = 0;
  for (unsigned& end : thread.group_ends) {
    if (end <= count)
      ++finished;
    else
      end -= unsigned(count);
  }
  thread.group_ends.erase(thread.group_ends.begin(),
                          thread.group_ends.begin() + std::ptrdiff_t(finished));
}

// ---- the functions of the headers

void run(const LaunchShape& shape, void (*body)(void*), void* argument) {
  machine().run(shape, body, argument);
}

int block_barrier(Vote vote, int predicate, Location where) {
  return machine().block_barrier(vote, predicate, where);
}
void cluster_barrier(Location where) { machine().cluster_barrier(where); }
std::uint64_t exchange(const char* name, Resolve resolve, Ordering ordering, unsigned mask,
                       std::uint64_t value, std::uint64_t argument, Location where) {
  return machine().exchange(name, resolve, ordering, mask, value, argument, where);
}
unsigned current_lane() { return machine().lane(); }
unsigned current_cluster_rank() { return machine().rank(); }
unsigned current_cluster_size() { return machine().cluster_size(); }
void schedule_point() { machine().schedule_point(); }
void* shared_memory(std::size_t bytes) { return machine().shared_memory(bytes); }
void* map_shared(void* pointer, unsigned rank) { return machine().map_shared(pointer, rank); }
void copy_async(void* shared, const void* global, unsigned valid_bytes, const void* code) {
  machine().copy_async(shared, global, valid_bytes, code);
}
void commit_copies() { machine().commit_copies(); }
void wait_copies(int pending) { machine().wait_copies(pending); }
bool current_actor(Actor* actor) { return machine().actor(actor); }
Place place_of(const void* address, std::size_t bytes) {
  return machine().place_of(address, bytes);
}

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  machine().fail(text);
}

void fail_without_unwinding(const char* what) { machine().fail_without_unwinding(what); }

std::uint64_t resolve_nothing(const std::uint64_t*, std::uint64_t, unsigned) { return 0; }

std::uint64_t resolve_shuffle(const std::uint64_t* values, std::uint64_t argument, unsigned) {
  return values[argument];
}

std::uint64_t resolve_ballot(const std::uint64_t* values, std::uint64_t, unsigned mask) {
  unsigned votes = 0;
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned lane = unsigned(std::countr_zero(rest));
    votes |= unsigned(values[lane] != 0) << lane;
  }
  return votes;
}

std::uint64_t resolve_match(const std::uint64_t* values, std::uint64_t argument, unsigned mask) {
  unsigned equal = 0;
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    const unsigned lane = unsigned(std::countr_zero(rest));
    equal |= unsigned(values[lane] == argument) << lane;
  }
  return equal;
}

}  // namespace lmdecode::emulation
