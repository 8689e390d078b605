#include "machine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace lmdecode::emulation {
namespace {

constexpr unsigned char kGuardByte = 0xC7, kUnwrittenByte = 0xA5, kLeftByte = 0x5A;
constexpr unsigned kPointsBeforeSwitch =
    4096;  // a spinning thread under a greedy schedule gives way
constexpr std::uint64_t kPointsWithoutProgress = 1ull << 27;  // then all threads spin

}  // namespace

Machine& machine() {
  static Machine* const instance = new Machine;  // never destroyed: its stacks are not objects
  return *instance;
}

// ---- a run

void Machine::check_shape(const LaunchShape& shape) const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::runtime_error(std::string("emulation::launch: ") + what);
  };
  const std::size_t threads = std::size_t(shape.block.x) * shape.block.y * shape.block.z;
  require(current_ < 0, "called by a kernel");
  require(threads >= 1 && threads <= 1024, "a block has 1 to 1024 threads");
  require(std::size_t(shape.grid.x) * shape.grid.y * shape.grid.z >= 1, "the grid is empty");
  require(shape.cluster_size >= 1 && shape.cluster_size <= 16, "a cluster has 1 to 16 blocks");
  require(shape.grid.x % shape.cluster_size == 0, "grid.x must be a multiple of cluster_size");
  require(shape.shared_bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
}

void Machine::run(const LaunchShape& shape, void (*body)(void*), void* argument) {
  check_shape(shape);
  shape_ = shape;
  body_ = body;
  argument_ = argument;
  block_threads_ = shape.block.x * shape.block.y * shape.block.z;
  warps_per_block_ = (block_threads_ + kWarp - 1) / kWarp;
  total_threads_ = block_threads_ * shape.cluster_size;
  if (threads_.size() < total_threads_) threads_.resize(total_threads_);
  warps_.resize(std::size_t{warps_per_block_} * shape.cluster_size);
  blocks_.resize(shape.cluster_size);
  shared_stride_ =
      kSharedGuard + (shape.shared_bytes + kSharedGuard - 1) / kSharedGuard * kSharedGuard;
  const std::size_t shared_total = shared_stride_ * shape.cluster_size + kSharedGuard;
  if (shared_capacity_ < shared_total) {
    if (shared_ != nullptr) munmap(shared_, shared_capacity_);
    void* memory =
        mmap(nullptr, shared_total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    shared_ = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
    shared_capacity_ = shared_ == nullptr ? 0 : shared_total;
    if (shared_ == nullptr) throw std::runtime_error("emulation: no memory for shared memory");
  }
  blockDim = shape.block;
  gridDim = shape.grid;
  random_ = shape.seed;
  plan_schedule();

  const unsigned clusters = shape.grid.x / shape.cluster_size * shape.grid.y * shape.grid.z;
  std::vector<unsigned> order(clusters);
  std::iota(order.begin(), order.end(), 0u);
  if (shape.seed == 1 || shape.seed == 2) std::reverse(order.begin(), order.end());
  if (shape.seed >= 3) {
    for (unsigned i = clusters; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  }
  for (const unsigned cluster : order) {
    start_cluster(cluster);
    run_cluster();
  }
}

// Seeds 0..2 and odd ones run the ready thread of the highest priority, each by its own order.
void Machine::plan_schedule() {
  thread_at_.resize(total_threads_);
  priority_of_.resize(total_threads_);
  std::iota(thread_at_.begin(), thread_at_.end(), 0u);
  const std::uint64_t seed = shape_.seed;
  if (seed == 1 || seed == 2) std::reverse(thread_at_.begin(), thread_at_.end());
  if (seed == 2) {  // warps descend, lanes ascend
    for (unsigned begin = 0; begin < total_threads_;) {
      const unsigned size = (thread_at_[begin] % block_threads_) % kWarp + 1;
      std::reverse(thread_at_.begin() + begin, thread_at_.begin() + begin + size);
      begin += size;
    }
  }
  if (seed >= 3) {
    for (unsigned i = total_threads_; i > 1; --i)
      std::swap(thread_at_[i - 1], thread_at_[random() % i]);
  }
  uniform_ = seed >= 3 && seed % 2 == 0;
  switch_chance_ = seed < 3 ? 0 : uniform_ ? 96 : 16;
  for (unsigned priority = 0; priority < total_threads_; ++priority)
    priority_of_[thread_at_[priority]] = priority;
}

void Machine::start_cluster(unsigned cluster) {
  const unsigned along_x = shape_.grid.x / shape_.cluster_size;
  std::fill(warps_.begin(), warps_.end(), Warp{});
  cluster_barrier_ = Barrier{};
  cluster_barrier_.alive = alive_ = total_threads_;
  for (unsigned b = 0; b < shape_.cluster_size; ++b) {
    Block& block = blocks_[b];
    block.index = {cluster % along_x * shape_.cluster_size + b, cluster / along_x % shape_.grid.y,
                   cluster / along_x / shape_.grid.y};
    block.barrier = Barrier{};
    block.barrier.alive = block_threads_;
    block.shared = shared_ + b * shared_stride_ + kSharedGuard;
    if (block_threads_ % kWarp != 0) {
      warps_[(b + 1) * warps_per_block_ - 1].missing = ~0u << (block_threads_ % kWarp);
    }
  }
  unpoison(shared_, shared_capacity_);
  std::memset(shared_, kGuardByte, shared_stride_ * shape_.cluster_size + kSharedGuard);
  poison(shared_, shared_capacity_);
  for (const Block& block : blocks_) {
    unpoison(block.shared, shape_.shared_bytes);
    std::memset(block.shared, kUnwrittenByte, shape_.shared_bytes);
  }
  ready_.assign((total_threads_ + 63) / 64, 0);
  const unsigned width = shape_.block.x, height = shape_.block.y;
  for (unsigned t = 0; t < total_threads_; ++t) {
    Thread& thread = threads_[t];
    const unsigned inside = t % block_threads_;
    thread.index = {inside % width, inside / width % height, inside / width / height};
    thread.block = t / block_threads_;
    thread.warp = thread.block * warps_per_block_ + inside / kWarp;
    thread.lane = inside % kWarp;
    thread.started = false;
    thread.copies.clear();
    thread.group_ends.clear();
    char* stack = stacks_.stack(t);
    if (thread.dirty) unpoison(stack, StackPool::kSlot - StackPool::kGuard);
    thread.dirty = true;
    thread.context.start(stack, StackPool::kSlot - StackPool::kGuard, entry);
    set_ready(t);
  }
  points_ = 0;
  idle_points_ = 0;
  if (race_checker::active) race_checker::start_cluster(shape_.cluster_size, shape_.shared_bytes);
}

void Machine::run_cluster() {
  error_.clear();
  switch_to(pick());
  current_ = -1;
  if (!error_.empty()) throw std::runtime_error(error_);
}

// A fiber's life. It never returns: the last thread of a cluster switches to the caller of run().
void Machine::entry() {
  Machine& m = machine();
  arrive(m.self().context, *m.previous_);
  m.self().started = true;
  try {
    m.body_(m.argument_);
    m.exit_thread();
  } catch (const Failure&) {
  } catch (const std::exception& error) {
    m.error_ = m.describe(unsigned(m.current_)) + ": threw " + error.what();
  }
  m.abandon();
}

void Machine::exit_thread() {
  Thread& thread = self();
  finish_copies(thread, thread.copies.size());
  Warp& warp = warp_of(unsigned(current_));
  const unsigned bit = 1u << lane();
  for (unsigned rest = warp.waiting; rest != 0; rest &= rest - 1) {
    const Lane& other = warp.lanes[std::countr_zero(rest)];
    if (other.mask & bit) {
      fail("exits while lane " + std::to_string(std::countr_zero(rest)) + " waits for it in " +
           other.name + " at line " + std::to_string(other.where.line()));
    }
  }
  warp.missing |= bit;
  thread.state = State::kExited;
  thread.dirty = false;
  ready_[priority_of_[current_] / 64] &= ~(1ull << priority_of_[current_] % 64);
  idle_points_ = 0;
  --alive_;
  // Threads that exited count as arrived.
  Block& block = blocks_[thread.block];
  const unsigned first = thread.block * block_threads_;
  --block.barrier.alive;
  --cluster_barrier_.alive;
  if (block.barrier.alive == 0) leave_block(block);
  if (block.barrier.waiting != 0 && block.barrier.waiting == block.barrier.alive) {
    release(block.barrier, State::kBarrier, first, first + block_threads_);
  }
  if (cluster_barrier_.waiting != 0 && cluster_barrier_.waiting == cluster_barrier_.alive) {
    release(cluster_barrier_, State::kClusterBarrier, 0, total_threads_);
  }
  const int next = alive_ == 0 ? -1 : pick();
  Context& to = next < 0 ? caller_ : threads_[next].context;
  previous_ = &thread.context;
  if (next >= 0) {
    current_ = next;
    threadIdx = threads_[next].index;
    blockIdx = blocks_[threads_[next].block].index;
  }
  switch_context(thread.context, to, /*leaves=*/true);
}

// The block's last thread has exited: nobody may touch its shared memory any more.
void Machine::leave_block(Block& block) {
#if !defined(__SANITIZE_ADDRESS__)  // ASan has the guards poisoned and reports the access itself
  const auto intact = [](const char* begin, const char* end) {
    return std::all_of(begin, end,
                       [](char byte) { return static_cast<unsigned char>(byte) == kGuardByte; });
  };
  const char* end = block.shared + shape_.shared_bytes;
  if (!intact(block.shared - kSharedGuard, block.shared))
    fail("something was written before shared memory");
  const char* guard_end = block.shared + shared_stride_;
  if (!intact(end, guard_end)) fail("something was written past the end of shared memory");
#endif
  std::memset(block.shared, kLeftByte, shape_.shared_bytes);
  poison(block.shared, shape_.shared_bytes);
}

// ---- the schedule

void Machine::set_ready(unsigned thread) {
  threads_[thread].state = State::kReady;
  ready_[priority_of_[thread] / 64] |= 1ull << priority_of_[thread] % 64;
}

// The ready thread of the highest priority from `from` on, around the end; -1: none.
int Machine::first_ready(unsigned from) const {
  const std::size_t words = ready_.size();
  std::uint64_t word = ready_[from / 64] & (~0ull << from % 64);
  for (std::size_t i = from / 64, seen = 0; seen <= words; ++seen) {
    if (word != 0) return int(thread_at_[i * 64 + unsigned(std::countr_zero(word))]);
    i = i + 1 == words ? 0 : i + 1;
    word = ready_[i];
  }
  return -1;
}

int Machine::pick() {
  const int next = first_ready(uniform_ ? unsigned(random() % total_threads_) : 0);
  if (next < 0) fail("deadlock, or threads at different barriers: " + waiting_places());
  return next;
}

void Machine::switch_to(int thread) {
  points_ = 0;
  if (thread == current_) return;
  Context& from = current_ < 0 ? caller_ : self().context;
  previous_ = &from;
  current_ = thread;
  threadIdx = self().index;
  blockIdx = blocks_[self().block].index;
  switch_context(from, self().context);
}

void Machine::block_self(State state, Location where) {
  self().state = state;
  self().where = where;
  ready_[priority_of_[current_] / 64] &= ~(1ull << priority_of_[current_] % 64);
  switch_to(pick());
}

void Machine::schedule_point() {
  if (!running()) return;  // host code may share functions with kernels
  if (++idle_points_ > kPointsWithoutProgress)
    fail("no progress: threads spin; " + waiting_places());
  if (++points_ > kPointsBeforeSwitch) {
    switch_to(first_ready((priority_of_[current_] + 1) % total_threads_));
  } else if (switch_chance_ != 0 && random() % 256 < switch_chance_) {
    switch_to(first_ready(unsigned(random() % total_threads_)));
  }
}

// ---- errors

std::string Machine::describe(unsigned thread) const {
  const uint3& block = blocks_[threads_[thread].block].index;
  const uint3& index = threads_[thread].index;
  const auto text = [](const uint3& i, const dim3& size) {
    std::string result = std::to_string(i.x);
    if (size.y > 1 || size.z > 1) result += "," + std::to_string(i.y) + "," + std::to_string(i.z);
    return result;
  };
  return "block " + text(block, shape_.grid) + " thread " + text(index, shape_.block);
}

// Where threads wait, a place once, with how many and one of them.
std::string Machine::waiting_places() const {
  static constexpr const char* kNames[] = {"ready", "barrier", "cluster_sync", "warp exchange",
                                           "exited"};
  struct Group {
    unsigned first, count;
  };
  std::vector<Group> groups;
  for (unsigned t = 0; t < total_threads_; ++t) {
    const Thread& thread = threads_[t];
    if (thread.state == State::kExited || thread.state == State::kReady) continue;
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      const Thread& other = threads_[group.first];
      return other.state == thread.state && other.where.line() == thread.where.line();
    });
    if (same == groups.end())
      groups.push_back({t, 1});
    else
      ++same->count;
  }
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(groups.size(), 4); ++i) {
    const Thread& thread = threads_[groups[i].first];
    text += (i == 0 ? "" : "; ") + std::to_string(groups[i].count) + " in " +
            kNames[int(thread.state)] + " at " + thread.where.file_name() + ":" +
            std::to_string(thread.where.line()) + " (" + describe(groups[i].first) + ")";
  }
  return text;
}

void Machine::fail(const std::string& what) {
  if (!running()) throw std::runtime_error("emulation: outside of a kernel: " + what);
  error_ = describe(unsigned(current_)) + ": " + what;
  throw Failure{};
}

void Machine::fail_without_unwinding(const char* what) {
  error_ = describe(unsigned(current_)) + ": " + what;
  abandon();
}

// Back to the caller of run(); the other fibers hold nothing that needs destroying.
void Machine::abandon() {
  switch_context(self().context, caller_, /*leaves=*/true);
  __builtin_unreachable();
}

}  // namespace lmdecode::emulation
