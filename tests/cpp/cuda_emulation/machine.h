// The machine that runs a cluster: its threads, warps, blocks, barriers, shared memory and
// schedule. machine.cpp has the life of a run and the schedule, cuda_emulation.cpp what kernels
// call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_emulation.h"
#include "fiber.h"
#include "race_checker.h"

namespace lmdecode::emulation {

constexpr unsigned kWarp = 32;
constexpr std::size_t kSharedGuard = 4096;  // on both sides of each block's shared memory

struct Failure {};  // unwinds the fiber that failed

struct Copy {
  void* shared;
  const void* global;
  unsigned valid_bytes;
};

struct Lane {  // what a lane brought to the exchange it waits in
  Resolve resolve;
  const char* name;
  unsigned mask;
  unsigned with;  // the lowest lane of those that wait together: all of them; others: any of them
  std::uint64_t argument, result;
  Location where;
};

struct Warp {
  unsigned waiting = 0;  // lanes in an exchange
  unsigned missing = 0;  // lanes that exited, or are beyond the block
  unsigned epoch = 0;    // __syncwarps passed
  std::uint64_t values[kWarp];
  Lane lanes[kWarp];
};

struct Barrier {
  unsigned alive = 0, waiting = 0, epoch = 0;
  Location where;             // of the first to wait
  unsigned first = 0;         // who that is
  int count = 0, result = 0;  // of predicates; result: of the barrier passed last
  Vote vote = Vote::kNone;
};

struct Block {
  uint3 index;
  Barrier barrier;
  char* shared = nullptr;
};

enum class State { kReady, kBarrier, kClusterBarrier, kExchange, kExited };

struct Thread {
  Context context;
  uint3 index;
  unsigned block = 0, warp = 0, lane = 0;  // block and warp: of the cluster
  State state = State::kReady;
  bool started = false,
       dirty = false;  // dirty: abandoned half way, its stack still holds poisoned redzones
  Location where;
  std::vector<Copy> copies;          // under way, in order of issue
  std::vector<unsigned> group_ends;  // committed groups end before copies[...]
};

class Machine {
 public:
  void run(const LaunchShape& shape, void (*body)(void*), void* argument);

  int block_barrier(Vote vote, int predicate, Location where);
  void cluster_barrier(Location where);
  std::uint64_t exchange(const char* name, Resolve resolve, Ordering ordering, unsigned mask,
                         std::uint64_t value, std::uint64_t argument, Location where);
  void schedule_point();
  void copy_async(void* shared, const void* global, unsigned valid_bytes, const void* code);
  void commit_copies() { self().group_ends.push_back(unsigned(self().copies.size())); }
  void wait_copies(int pending);
  void* shared_memory(std::size_t bytes);
  void* map_shared(void* pointer, unsigned rank);
  Place place_of(const void* address, std::size_t bytes) const;
  bool actor(Actor* actor) const;
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail_without_unwinding(const char* what);

  bool running() const { return current_ >= 0; }
  unsigned lane() const { return threads_[current_].lane; }
  unsigned rank() const { return threads_[current_].block; }
  unsigned cluster_size() const { return shape_.cluster_size; }

 private:
  Thread& self() { return threads_[current_]; }
  Warp& warp_of(unsigned thread) { return warps_[threads_[thread].warp]; }
  void check_shape(const LaunchShape& shape) const;
  void plan_schedule();
  void start_cluster(unsigned cluster);
  void run_cluster();
  static void entry();
  [[noreturn]] void abandon();
  void exit_thread();
  void leave_block(Block& block);
  void arrive_at(Barrier& barrier, State state, Location where, const char* name);
  void release(Barrier& barrier, State state, unsigned first, unsigned last);
  void finish_copies(Thread& thread, std::size_t count);
  void set_ready(unsigned thread);
  int first_ready(unsigned from) const;
  int pick();
  void block_self(State state, Location where);
  void switch_to(int thread);
  std::string describe(unsigned thread) const;
  std::string waiting_places() const;
  std::uint64_t random() {
    random_ += 0x9E3779B97F4A7C15ull;  // splitmix64
    std::uint64_t z = random_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  LaunchShape shape_;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  unsigned block_threads_ = 0, warps_per_block_ = 0, total_threads_ = 0;
  std::vector<Thread>
      threads_;  // of the cluster, block after block; grows, never shrinks, and so do the next two
  std::vector<Warp> warps_;
  std::vector<Block> blocks_;
  Barrier cluster_barrier_;
  StackPool stacks_;
  char* shared_ = nullptr;  // of the whole cluster, guards between
  std::size_t shared_capacity_ = 0, shared_stride_ = 0;

  // The schedule: threads by priority, and a bit for each that can run, at its priority.
  std::vector<unsigned> thread_at_, priority_of_;
  std::vector<std::uint64_t> ready_;
  bool uniform_ = false;           // pick any ready thread rather than the first
  unsigned switch_chance_ = 0;     // of 256, at a schedule point
  unsigned points_ = 0;            // since the last switch
  std::uint64_t idle_points_ = 0;  // since the last barrier, exchange or exit
  std::uint64_t random_ = 0;

  int current_ = -1;
  unsigned alive_ = 0;
  Context caller_;
  Context* previous_ = nullptr;
  std::string error_;
};

Machine& machine();

}  // namespace lmdecode::emulation
