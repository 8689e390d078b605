#include "store/store_engine.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "store/bytes.h"

namespace lmdecode::store {

namespace {

constexpr uint32_t kFormatVersion = 1;
constexpr uint32_t kStatesVersion = 2;  // of a superblock with state_bytes
constexpr size_t kMaxUsesPerCommit = 1024;

int64_t system_now_ms() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

struct Superblock {
  std::string fingerprint;
  SlotLayout layout;
  uint32_t slots_per_slab = 0;
};

std::vector<uint8_t> encode(const Superblock& block) {
  const ModelShape& shape = block.layout.shape;
  ByteWriter fields;
  fields.u32(shape.state_bytes > 0 ? kStatesVersion : kFormatVersion).counted(block.fingerprint);
  fields.u32(shape.num_layers).u32(shape.num_kv_heads).u32(shape.head_size);
  fields.u32(shape.element_size).u32(static_cast<uint32_t>(shape.windows.size()));
  for (const uint32_t window : shape.windows) fields.u32(window);
  fields.u32(block.layout.chunk_tokens).u32(block.layout.values_by_column ? 1 : 0);
  fields.u32(block.slots_per_slab);
  if (shape.state_bytes > 0) fields.u64(shape.state_bytes);
  return fields.bytes();
}

Superblock decode(const std::vector<uint8_t>& bytes) {
  ByteReader fields(bytes, "superblock");
  const uint32_t version = fields.u32();
  if (version != kFormatVersion && version != kStatesVersion) {
    throw StoreError(ErrorKind::kMismatch, "KVStore: the store has another format version");
  }
  Superblock block;
  const auto fingerprint = fields.counted();
  block.fingerprint.assign(fingerprint.begin(), fingerprint.end());
  ModelShape& shape = block.layout.shape;
  for (uint32_t* field :
       {&shape.num_layers, &shape.num_kv_heads, &shape.head_size, &shape.element_size}) {
    *field = fields.u32();
  }
  for (uint32_t left = fields.u32(); left > 0; --left) shape.windows.push_back(fields.u32());
  block.layout.chunk_tokens = fields.u32();
  block.layout.values_by_column = fields.u32() != 0;
  block.slots_per_slab = fields.u32();
  if (version == kStatesVersion) shape.state_bytes = fields.u64();
  check_layout(block.layout);
  if (block.slots_per_slab == 0) throw StoreError(ErrorKind::kDamaged, "superblock: no slots");
  return block;
}

}  // namespace

void parallel_items(size_t size, int threads, const std::function<void(size_t)>& body,
                    const GoesOn& goes_on) {
  const size_t workers = std::min<size_t>(size, static_cast<size_t>(std::max(threads, 1)));
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t item = next++; item < size; item = next++) body(item);
  };
  std::vector<std::thread> others;
  try {
    for (size_t worker = 1; worker < workers; ++worker) others.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads are available: the existing ones do the work.
  }
  for (size_t item = next++; item < size; item = next++) {
    if (goes_on && !goes_on()) {
      next = size;
      break;
    }
    body(item);
  }
  for (std::thread& other : others) other.join();
}

// ---- opening and closing

StoreEngine::StoreEngine(const StoreOptions& options)
    : options_(options),
      file_system_(options.file_system != nullptr ? *options.file_system : posix_file_system()),
      process_(::getpid()),
      prefixes_(
          layout_, [this] { return now(); },
          [this](const Entry& entry) { return read_tokens(entry); }),
      commits_([this] { return prefixes_.take_uses(kMaxUsesPerCommit); },
               [this](const std::vector<uint32_t>& areas) { space_.take_freed(areas); },
               [this](IndexDatabase& index, int attempt) {
                 return space_.make_room_for_index(index, attempt);
               }),
      space_(options_, layout_, file_system_, prefixes_, commits_, stats_) {
  if (!options_.now_ms) options_.now_ms = system_now_ms;
}

std::shared_ptr<StoreEngine> StoreEngine::open(const StoreOptions& options) {
  std::shared_ptr<StoreEngine> engine(new StoreEngine(options));
  engine->open_files();
  return engine;
}

void StoreEngine::open_files() {
  const std::string& directory = options_.directory;
  const std::string index = directory + "/index.sqlite";
  layout_.shape = options_.shape;
  layout_.chunk_tokens =
      options_.chunk_tokens != 0 ? options_.chunk_tokens : default_chunk_tokens(options_.shape);
  layout_.values_by_column = options_.values_by_column;
  check_layout(layout_);
  if (options_.readonly) {
    if (!file_system_.exists(index)) throw_errno(ENOENT, "KVStore: nothing to read in", directory);
  } else {
    if (const int error = file_system_.make_directory(directory); error != 0) {
      throw_errno(-error, "KVStore: cannot make", directory);
    }
    int error = 0;
    writer_lock_ = file_system_.lock(directory + "/lock", &error);
    if (writer_lock_ == nullptr) {
      if (error != EWOULDBLOCK) throw_errno(error, "KVStore: cannot lock", directory);
      throw StoreError(ErrorKind::kLocked, "KVStore: " + directory +
                                               " has a writer; open it with readonly=True, or "
                                               "close the other one");
    }
  }
  IndexReserve& reserve = space_.index_reserve();
  try {
    index_ = std::make_unique<IndexDatabase>(file_system_, index, options_.readonly);
  } catch (const StoreError& error) {
    // Its log may need space that only the reserve has.
    if (options_.readonly || error.kind() != ErrorKind::kInputOutput || !reserve.release()) throw;
    index_ = std::make_unique<IndexDatabase>(file_system_, index, false);
  }
  if (!options_.readonly) index_->limit_log(options_.index_reserve_bytes);
  const auto stored = index_->superblock();
  if (stored.has_value()) {
    const Superblock block = decode(*stored);
    const auto mismatch = [&](const std::string& what) {
      throw StoreError(ErrorKind::kMismatch, "KVStore: " + directory + " was made with " + what);
    };
    if (block.fingerprint != options_.fingerprint) mismatch("another fingerprint");
    if (options_.chunk_tokens != 0 && block.layout.chunk_tokens != options_.chunk_tokens) {
      mismatch("chunk_tokens = " + std::to_string(block.layout.chunk_tokens) + ", not " +
               std::to_string(options_.chunk_tokens));
    }
    if (block.layout.values_by_column != options_.values_by_column) {
      mismatch(block.layout.values_by_column ? "v_layout = 'column', not 'row'"
                                             : "v_layout = 'row', not 'column'");
    }
    layout_.chunk_tokens = block.layout.chunk_tokens;
    check_layout(layout_);
    slots_per_slab_ = block.slots_per_slab;
    slot_bytes_ = layout_.slot_bytes();
  } else {
    if (options_.readonly) throw_errno(ENOENT, "KVStore: nothing to read in", directory);
    slot_bytes_ = layout_.slot_bytes();
    slots_per_slab_ =
        static_cast<uint32_t>(std::max<uint64_t>(1, options_.slab_bytes / slot_bytes_));
    if (const int error = reserve.fill(); is_full(error)) {
      reserve.release();
      throw_errno(-error, "KVStore: no space for a new store in", directory);
    }
    index_->set_superblock(encode({options_.fingerprint, layout_, slots_per_slab_}));
    index_->recycle_log();
    // The directory and the names in it are durable before anything is acknowledged.
    const std::string parent = directory.substr(0, directory.rfind('/'));
    for (const std::string& path : {directory, parent}) {
      if (const int error = file_system_.sync_directory(path); error != 0) {
        throw_errno(-error, "KVStore: cannot sync", path);
      }
    }
  }
  if (!options_.readonly && space_.capacity() == 0) {
    throw std::invalid_argument(
        "KVStore: capacity_bytes is " + std::to_string(options_.capacity_bytes) +
        "; expected at least one slot of " + std::to_string(slot_bytes_) + " bytes");
  }
  slabs_ = std::make_unique<SlabFiles>(file_system_, directory, slot_bytes_, slots_per_slab_,
                                       options_.readonly);
  commits_.start(*slabs_, *index_);
  space_.start(*slabs_);
  if (!options_.readonly) {
    recover_unsynced();
    reserve.fill();  // a full disk fills it later
  }
  load_index();
  if (options_.relaxed && !options_.readonly && options_.flush_interval_ms > 0) {
    flush_thread_ = std::thread([this] { run_flush_timer(); });
  }
}

StoreEngine::~StoreEngine() {
  if (::getpid() != process_) {  // SQLite and threads do not survive a fork
    if (flush_thread_.joinable()) flush_thread_.detach();
    if (index_ != nullptr) index_->abandon();
    return;
  }
  close();
}

void StoreEngine::close() {
  if (::getpid() != process_) return;
  Lock lock(mutex_);
  if (std::exchange(closed_, true)) return;
  stopping_ = true;
  timer_.notify_all();
  if (flush_thread_.joinable()) {
    lock.unlock();
    flush_thread_.join();
    lock.lock();
  }
  close_locked(lock);
}

void StoreEngine::close_locked(Lock& lock) {
  idle_.wait(lock, [&] { return active_ == 0; });
  commits_.wait(lock);
  if (index_ != nullptr && !options_.readonly) {
    while (commits_.has_changes() || prefixes_.has_uses()) {
      if (!commits_.commit(lock)) break;
    }
  }
  commits_.stop();
  index_.reset();
  slabs_.reset();
  // The log is gone: the next process that opens the store may need its space.
  if (writer_lock_ != nullptr) space_.index_reserve().fill();
  writer_lock_.reset();
}

void StoreEngine::check_usable() const {
  if (::getpid() != process_) {
    throw StoreError(ErrorKind::kUnusable,
                     "KVStore: opened by another process; open it again after a fork");
  }
  if (closed_) throw StoreError(ErrorKind::kUnusable, "KVStore: closed");
}

void StoreEngine::require_writer() const {
  check_usable();
  if (options_.readonly)
    throw StoreError(ErrorKind::kUnusable, "KVStore: opened with readonly=True");
}

void StoreEngine::run_flush_timer() {
  Lock lock(mutex_);
  while (!stopping_) {
    timer_.wait_for(lock, std::chrono::milliseconds(options_.flush_interval_ms));
    if (stopping_ || !commits_.has_changes()) continue;
    lock.unlock();
    slabs_->sync();  // most of it, while puts go on; an error comes again. close() waits for this
    lock.lock();
    commits_.commit(lock);
  }
}

// ---- the index

// Changes that were not durable when the last writer was killed: their slots are intact unless the
// system has restarted since. An error leaves them for the next open.
void StoreEngine::recover_unsynced() {
  const std::optional<std::string> boot = index_->unsynced_boot();
  if (!boot.has_value()) return;
  if (boot->empty() || *boot != file_system_.boot()) {
    index_->drop_unsynced();
    return;
  }
  int error = slabs_->doubt_all();
  if (error == 0) error = slabs_->sync();
  if (error != 0) throw_errno(-error, "KVStore: cannot sync the slots of", options_.directory);
  std::string reason;
  const auto commit = [&] { return index_->commit({}, Survives::kPowerLoss, &reason); };
  CommitResult result = commit();
  if (result == CommitResult::kDiskFull && space_.index_reserve().release()) result = commit();
  if (result == CommitResult::kDone) return;
  const int number = result == CommitResult::kDiskFull ? ENOSPC : EIO;
  throw StoreError(ErrorKind::kInputOutput, reason, number);
}

void StoreEngine::load_index() {
  std::vector<AreaRow> rows, free;
  rows.reserve(index_->count_areas());
  uint32_t used = 0;
  index_->read_areas(0, [&](const AreaRow& row) {
    used = std::max(used, row.area + 1);
    commits_.follow_sequence(std::max(commits_.sequence(), row.sequence));
    (row.count == 0 ? free : rows).push_back(row);
  });
  prefixes_.reserve(rows.size(), used);
  // Insertion counts as use; among equals, children come before parents.
  std::sort(rows.begin(), rows.end(), [](const AreaRow& a, const AreaRow& b) {
    return a.used_ms != b.used_ms ? a.used_ms < b.used_ms : a.num_tokens > b.num_tokens;
  });
  prefixes_.add_rows(rows, [&](EntryId id) { space_.drop_subtree(id); });
  if (options_.readonly) return;
  const uint32_t capacity = space_.capacity();
  for (uint32_t area = capacity; area < used; ++area) {
    if (prefixes_.at(area) != kNoEntry)
      space_.drop_subtree(prefixes_.at(area));  // the store is smaller
  }
  FreeAreas& free_areas = space_.free_areas();
  free_areas.reset(std::min(used, capacity), capacity, options_.idle_ms);
  std::vector<bool> known(used, false);
  for (uint32_t area = 0; area < used; ++area) known[area] = prefixes_.at(area) != kNoEntry;
  for (const uint32_t area : commits_.freed()) known[area] = true;
  std::sort(free.begin(), free.end(),
            [](const AreaRow& a, const AreaRow& b) { return a.used_ms < b.used_ms; });
  const int64_t time = now();
  std::vector<uint32_t> erased;  // and not overwritten, when the last writer died
  for (const AreaRow& row : free) {
    known[row.area] = true;
    if (row.pinned && row.area < capacity) {
      erased.push_back(row.area);
    } else if (row.area < capacity) {
      free_areas.add_freed(row.area, row.used_ms, time);
    }
  }
  // Written, but not committed when the last writer died.
  for (uint32_t area = 0; area < std::min(used, capacity); ++area) {
    if (!known[area]) free_areas.add_freed(area, 0, time);
  }
  if (!erased.empty()) {
    Lock lock(mutex_);
    overwrite(lock, erased);
  }
  if (used > capacity) {
    Lock lock(mutex_);
    if (commits_.commit(lock)) slabs_->truncate(capacity);
  }
}

void StoreEngine::refresh() {
  if (!options_.readonly || !index_->changed()) return;
  std::vector<AreaRow> rows;
  uint64_t newest = commits_.sequence();
  index_->read_areas(newest, [&](const AreaRow& row) {
    newest = std::max(newest, row.sequence);
    rows.push_back(row);
  });
  commits_.follow_sequence(newest);
  prefixes_.follow(std::move(rows), [&](EntryId id) { space_.drop_subtree(id); });
}

void StoreEngine::wait_for_commit(Lock& lock) {
  commits_.wait(lock);
  check_usable();
}

StoreEngine::Activity::Activity(StoreEngine& engine, Lock& lock) : engine_(engine), lock_(lock) {
  ++engine_.active_;
}

StoreEngine::Activity::~Activity() {
  if (!lock_.owns_lock()) lock_.lock();
  --engine_.active_;
  engine_.idle_.notify_all();
}

void StoreEngine::touch(EntryId leaf) {
  prefixes_.touch(leaf);
  if (options_.readonly) prefixes_.forget_uses();  // only a writer tells the index
}

Digest StoreEngine::root(const Scope& scope) const {
  return root_key(options_.fingerprint, layout_.chunk_tokens, scope);
}

bool StoreEngine::flush() {
  Lock lock(mutex_);
  require_writer();
  const bool is_clean = !commits_.has_changes() && !commits_.is_committing();
  return is_clean ? commits_.failure().empty() : commits_.commit(lock);
}

uint64_t StoreEngine::collect() {
  Lock lock(mutex_);
  require_writer();
  const uint64_t dropped = space_.drop_expired();
  if (commits_.has_changes() && !commits_.commit(lock)) return dropped;
  wait_for_commit(lock);
  // Areas that a put has taken, but not published, are in neither list: they stay.
  const uint64_t known = prefixes_.size() + space_.free_areas().listed().size() + space_.held();
  if (known == space_.free_areas().used()) slabs_->truncate(prefixes_.areas_end());
  index_->compact();
  return dropped;
}

std::optional<int64_t> StoreEngine::oldest_use() {
  const Lock lock(mutex_);
  require_writer();
  return space_.oldest_use();
}

uint64_t StoreEngine::give_space_back(uint64_t bytes, int64_t used_until_ms) {
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  return space_.give_space_back(lock, bytes, used_until_ms);
}

StoreStats StoreEngine::stats() {
  Lock lock(mutex_);
  check_usable();
  refresh();
  StoreStats stats = stats_;
  stats.entries = prefixes_.size();
  stats.commits = commits_.commits();
  wait_for_commit(lock);
  stats.sessions = index_->count_sessions();
  stats.capacity_areas = options_.readonly ? 0 : space_.capacity();
  stats.used_areas = prefixes_.size();
  stats.idle_areas = space_.free_areas().idle();
  stats.unusable_areas = space_.free_areas().refused();
  stats.freed_areas = space_.free_areas().freed() + commits_.num_freed() + space_.held();
  stats.slot_bytes = slot_bytes_;
  stats.chunk_tokens = layout_.chunk_tokens;
  return stats;
}

std::string StoreEngine::failure() {
  const Lock lock(mutex_);
  return commits_.failure().empty() ? space_.no_space() : commits_.failure();
}

std::vector<AreaRow> StoreEngine::entries() {
  const Lock lock(mutex_);
  check_usable();
  refresh();
  return prefixes_.rows();
}

// --- sessions

std::optional<std::vector<int32_t>> StoreEngine::read_session(const Scope& scope,
                                                              const std::string& name) {
  const Digest root_of_scope = root(scope);
  Lock lock(mutex_);
  check_usable();
  const auto known = sessions_.find({root_of_scope, name});
  if (known != sessions_.end()) return known->second;
  wait_for_commit(lock);
  const auto row = index_->read_session(root_of_scope, name);
  if (!row.has_value()) return std::nullopt;
  if (!options_.readonly) sessions_[{root_of_scope, name}] = row->tokens;
  return row->tokens;
}

uint64_t StoreEngine::commit_session(const Scope& scope, const std::string& name,
                                     std::span<const int32_t> tokens, uint64_t num_computed,
                                     std::span<const TensorPlane> planes,
                                     const PutOptions& options) {
  check_token_ids(tokens);
  if (num_computed > tokens.size()) {
    throw std::invalid_argument("commit: keys and values of " + std::to_string(num_computed) +
                                " tokens; expected at most the session's " +
                                std::to_string(tokens.size()));
  }
  check_planes(layout_, planes, 0, layout_.shape.num_layers_with_state(), num_computed, false);
  PrefixKeys keys = keys_of(root(scope), tokens.first(num_computed));
  keys.whole();  // hashed before others have to wait
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  const bool had_space = put_locked(lock, keys, tenant_id(scope.salt), planes, options);
  record_session(lock, keys.root(), tenant_id(scope.salt), name, tokens);
  const uint64_t batch = commits_.open_number();
  const uint64_t stored = acknowledge(lock, keys, had_space);
  // Not the session's tokens: then nothing is acknowledged.
  if (commits_.commit(lock, batch, survives()) || commits_.is_session_durable(batch)) return stored;
  space_.note_stored(false, false);
  return 0;
}

void StoreEngine::record_session(Lock& lock, const Digest& root, uint64_t tenant,
                                 const std::string& name, std::span<const int32_t> tokens) {
  const auto key = std::make_pair(root, name);
  auto known = sessions_.find(key);
  if (known == sessions_.end()) {
    wait_for_commit(lock);
    std::optional<SessionRow> row;
    try {
      row = index_->read_session(root, name);
    } catch (const StoreError&) {
      // Damaged tokens are replaced as a whole.
    }
    known = sessions_.emplace(key, row.has_value() ? row->tokens : std::vector<int32_t>()).first;
  }
  SessionRow row{.root = root, .name = name, .tenant = tenant, .updated_ms = now()};
  const auto end =
      std::mismatch(tokens.begin(), tokens.end(), known->second.begin(), known->second.end());
  row.unchanged = static_cast<size_t>(end.first - tokens.begin());
  row.tokens.assign(tokens.begin(), tokens.end());
  known->second = row.tokens;
  commits_.add(std::move(row));
}

bool StoreEngine::write_session(const Scope& scope, const std::string& name,
                                std::span<const int32_t> tokens) {
  check_token_ids(tokens);
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  if (!commits_.failure().empty()) return false;
  record_session(lock, root(scope), tenant_id(scope.salt), name, tokens);
  return commits_.commit(lock, commits_.open_number(), survives());
}

bool StoreEngine::remove_session(const Scope& scope, const std::string& name) {
  const Digest root_of_scope = root(scope);
  Lock lock(mutex_);
  require_writer();
  if (!commits_.failure().empty()) return false;
  sessions_.erase({root_of_scope, name});
  SessionRow row{.root = root_of_scope, .name = name};
  row.removed = true;
  commits_.add(std::move(row));
  return commits_.commit(lock);
}

std::vector<SessionRow> StoreEngine::list_sessions() {
  Lock lock(mutex_);
  check_usable();
  wait_for_commit(lock);
  return index_->list_sessions();
}

}  // namespace lmdecode::store
