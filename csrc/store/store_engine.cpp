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
constexpr uint32_t kMaxAreas = UINT32_MAX - 1;

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
  fields.u32(kFormatVersion).counted(block.fingerprint);
  fields.u32(shape.num_layers).u32(shape.num_kv_heads).u32(shape.head_size);
  fields.u32(shape.element_size).u32(static_cast<uint32_t>(shape.windows.size()));
  for (const uint32_t window : shape.windows) fields.u32(window);
  fields.u32(block.layout.chunk_tokens).u32(block.layout.values_by_column ? 1 : 0);
  fields.u32(block.slots_per_slab);
  return fields.bytes();
}

Superblock decode(const std::vector<uint8_t>& bytes) {
  ByteReader fields(bytes, "superblock");
  if (fields.u32() != kFormatVersion) {
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
    // No more threads to be had: those there are do the work.
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
      process_(::getpid()) {
  if (!options_.now_ms) options_.now_ms = system_now_ms;
}

std::shared_ptr<StoreEngine> StoreEngine::open(const StoreOptions& options) {
  std::shared_ptr<StoreEngine> engine(new StoreEngine(options));
  engine->open_files();
  return engine;
}

uint32_t StoreEngine::capacity_areas() const {
  return static_cast<uint32_t>(
      std::min<uint64_t>(options_.capacity_bytes / slot_bytes_, kMaxAreas));
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
  index_ = std::make_unique<IndexDatabase>(file_system_, index, options_.readonly);
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
    index_->set_superblock(encode({options_.fingerprint, layout_, slots_per_slab_}));
    // The directory and the names in it are durable before anything is acknowledged.
    const std::string parent = directory.substr(0, directory.rfind('/'));
    for (const std::string& path : {directory, parent}) {
      if (const int error = file_system_.sync_directory(path); error != 0) {
        throw_errno(-error, "KVStore: cannot sync", path);
      }
    }
  }
  if (!options_.readonly && capacity_areas() == 0) {
    throw std::invalid_argument(
        "KVStore: capacity_bytes is " + std::to_string(options_.capacity_bytes) +
        "; expected at least one slot of " + std::to_string(slot_bytes_) + " bytes");
  }
  slabs_ = std::make_unique<SlabFiles>(file_system_, directory, slot_bytes_, slots_per_slab_,
                                       options_.readonly);
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
  const auto is_idle = [&] { return active_ == 0 && !committing_; };
  committed_changed_.wait(lock, is_idle);
  if (index_ != nullptr && !options_.readonly) {
    while (failure_.empty() && (!open_batch_.changes.empty() || !touched_.empty())) {
      if (!commit(lock, open_number_)) break;
    }
  }
  index_.reset();
  slabs_.reset();
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
    if (!stopping_ && !open_batch_.changes.empty()) commit(lock, open_number_);
  }
}

// ---- the index in memory

EntryId StoreEngine::add_entry(const Entry& entry, EntryId parent) {
  const EntryId id = map_.insert(entry);
  map_.link(id, parent);
  if (by_area_.size() <= entry.area) by_area_.resize(entry.area + 1, kNoEntry);
  by_area_[entry.area] = id;
  ++tenant_areas_[entry.tenant];
  if (entry.expires_ms != 0) expiry_.insert({entry.expires_ms, id});
  return id;
}

void StoreEngine::remove_entry(EntryId id) {
  const Entry& entry = map_[id];
  by_area_[entry.area] = kNoEntry;
  if (const auto count = tenant_areas_.find(entry.tenant); --count->second == 0) {
    tenant_areas_.erase(count);
  }
  if (entry.expires_ms != 0) expiry_.erase({entry.expires_ms, id});
  if (const auto cached = token_cache_.find(id); cached != token_cache_.end()) {
    cached_tokens_ -= cached->second.size();
    token_cache_.erase(cached);
  }
  map_.remove(id);
}

void StoreEngine::load_index() {
  std::vector<AreaRow> rows, free;
  rows.reserve(index_->count_areas());
  uint32_t used = 0;
  index_->read_areas(0, [&](const AreaRow& row) {
    used = std::max(used, row.area + 1);
    sequence_ = std::max(sequence_, row.sequence);
    (row.count == 0 ? free : rows).push_back(row);
  });
  map_.reserve(rows.size());
  by_area_.reserve(used);
  // Insertion is use; among equals parents come after what continues them.
  std::sort(rows.begin(), rows.end(), [](const AreaRow& a, const AreaRow& b) {
    return a.used_ms != b.used_ms ? a.used_ms < b.used_ms : a.num_tokens > b.num_tokens;
  });
  apply_rows(rows);
  if (options_.readonly) return;
  const uint32_t capacity = capacity_areas();
  for (uint32_t area = capacity; area < by_area_.size(); ++area) {
    if (by_area_[area] != kNoEntry) drop_subtree(by_area_[area]);  // the store became smaller
  }
  free_areas_.reset(std::min(used, capacity), capacity, options_.idle_ms);
  std::vector<bool> known(used, false);
  for (uint32_t area = 0; area < by_area_.size(); ++area) known[area] = by_area_[area] != kNoEntry;
  for (const uint32_t area : open_batch_.freed) known[area] = true;
  std::sort(free.begin(), free.end(),
            [](const AreaRow& a, const AreaRow& b) { return a.used_ms < b.used_ms; });
  const int64_t time = now();
  for (const AreaRow& row : free) {
    known[row.area] = true;
    if (row.area < capacity) free_areas_.add_freed(row.area, row.used_ms, time);
  }
  // Written, but not committed when the last writer died.
  for (uint32_t area = 0; area < std::min(used, capacity); ++area) {
    if (!known[area]) free_areas_.add_freed(area, 0, time);
  }
  if (used > capacity) {
    Lock lock(mutex_);
    if (commit(lock, open_number_)) slabs_->truncate(capacity);
  }
}

void StoreEngine::apply_rows(std::vector<AreaRow>& rows) {
  std::vector<std::pair<EntryId, Digest>> unlinked;
  for (const AreaRow& row : rows) {
    if (row.area < by_area_.size() && by_area_[row.area] != kNoEntry) continue;
    if (row.num_tokens < row.count || map_.find(row.num_tokens, row.key) != kNoEntry) continue;
    Entry entry;
    entry.key = row.key;
    entry.num_tokens = row.num_tokens;
    entry.area = row.area;
    entry.count = row.count;
    entry.header_crc = row.header_crc;
    entry.usable_from = row.usable_from;
    entry.tenant = row.tenant;
    entry.sequence = row.sequence;
    entry.created_ms = row.created_ms;
    entry.used_ms = row.used_ms;
    entry.expires_ms = row.expires_ms;
    entry.pinned = row.pinned;
    const EntryId id = map_.insert(entry);
    if (by_area_.size() <= entry.area) by_area_.resize(entry.area + 1, kNoEntry);
    by_area_[entry.area] = id;
    ++tenant_areas_[entry.tenant];
    if (entry.expires_ms != 0) expiry_.insert({entry.expires_ms, id});
    unlinked.push_back({id, row.parent});
  }
  std::vector<std::pair<EntryId, uint64_t>> orphans;
  for (const auto& [id, parent_key] : unlinked) {
    const uint64_t before = map_[id].num_tokens - map_[id].count;
    const EntryId parent = before == 0 ? map_.root(parent_key) : map_.find(before, parent_key);
    if (parent != kNoEntry) {
      map_.link(id, parent);
    } else {
      orphans.push_back({id, map_[id].sequence});
    }
  }
  for (const auto& [id, sequence] : orphans) {
    if (map_.holds(id, sequence)) drop_subtree(id);
  }
}

void StoreEngine::refresh() {
  if (!options_.readonly || !index_->changed()) return;
  std::vector<AreaRow> rows;
  uint64_t newest = sequence_;
  index_->read_areas(sequence_, [&](const AreaRow& row) {
    newest = std::max(newest, row.sequence);
    rows.push_back(row);
  });
  sequence_ = newest;
  // The same prefix in another slot: what continues it stays.
  for (const AreaRow& row : rows) {
    const EntryId id = row.count == 0 ? kNoEntry : map_.find(row.num_tokens, row.key);
    if (id == kNoEntry) continue;
    Entry& entry = map_[id];
    if (by_area_.size() <= row.area) by_area_.resize(row.area + 1, kNoEntry);
    if (const EntryId other = by_area_[row.area]; other != kNoEntry && other != id) continue;
    by_area_[entry.area] = kNoEntry;
    by_area_[row.area] = id;
    entry.area = row.area;
    entry.header_crc = row.header_crc;
    entry.usable_from = row.usable_from;
    entry.sequence = row.sequence;
    set_expiry(id, row.expires_ms);
    entry.pinned = row.pinned;
  }
  for (const AreaRow& row : rows) {
    const EntryId id = row.area < by_area_.size() ? by_area_[row.area] : kNoEntry;
    if (id != kNoEntry && map_[id].sequence != row.sequence) drop_subtree(id);
  }
  std::erase_if(rows, [](const AreaRow& row) { return row.count == 0; });
  apply_rows(rows);
}

void StoreEngine::wait_for_commit(Lock& lock) {
  committed_changed_.wait(lock, [&] { return !committing_; });
  check_usable();
}

StoreEngine::Activity::Activity(StoreEngine& engine, Lock& lock) : engine_(engine), lock_(lock) {
  ++engine_.active_;
}

StoreEngine::Activity::~Activity() {
  if (!lock_.owns_lock()) lock_.lock();
  --engine_.active_;
  engine_.committed_changed_.notify_all();
}

void StoreEngine::set_expiry(EntryId id, int64_t expires_ms) {
  Entry& entry = map_[id];
  if (entry.expires_ms != 0) expiry_.erase({entry.expires_ms, id});
  entry.expires_ms = expires_ms;
  if (expires_ms != 0) expiry_.insert({expires_ms, id});
}

void StoreEngine::touch(EntryId leaf) {
  map_.touch(leaf, now(), &touched_);
  if (options_.readonly) touched_.clear();  // only a writer tells the index
}

// A prefix that is stored again lives as long as the new one would, and so does what it continues.
void StoreEngine::renew(EntryId id, const PutOptions& options) {
  const int64_t expires_ms = options.ttl_ms == 0 ? 0 : now() + options.ttl_ms;
  for (; id != kNoEntry && !map_[id].is_root(); id = map_[id].parent) {
    Entry& entry = map_[id];
    const bool lives_longer =
        entry.expires_ms != 0 && (expires_ms == 0 || expires_ms > entry.expires_ms);
    const bool is_pinned = options.pin && !entry.pinned;
    if (!lives_longer && !is_pinned) return;
    if (lives_longer) set_expiry(id, expires_ms);
    entry.pinned = entry.pinned || options.pin;
    open_batch_.changes.areas.push_back(row_of(entry));
    entry.batch = open_number_;
  }
}

Digest StoreEngine::root(const Scope& scope) const {
  return root_key(options_.fingerprint, layout_.chunk_tokens, scope);
}

bool StoreEngine::flush() {
  Lock lock(mutex_);
  require_writer();
  return open_batch_.changes.empty() && !committing_ ? failure_.empty()
                                                     : commit(lock, open_number_);
}

StoreStats StoreEngine::stats() {
  Lock lock(mutex_);
  check_usable();
  refresh();
  StoreStats stats = stats_;
  stats.entries = map_.size();
  wait_for_commit(lock);
  stats.sessions = index_->count_sessions();
  stats.capacity_areas = options_.readonly ? 0 : capacity_areas();
  stats.used_areas = map_.size();
  stats.idle_areas = free_areas_.idle();
  stats.unusable_areas = unusable_areas_;
  stats.freed_areas = free_areas_.freed() + open_batch_.freed.size() + held_.size();
  stats.slot_bytes = slot_bytes_;
  stats.chunk_tokens = layout_.chunk_tokens;
  return stats;
}

std::string StoreEngine::failure() {
  const Lock lock(mutex_);
  return failure_;
}

std::vector<AreaRow> StoreEngine::list_entries() const {
  std::vector<AreaRow> rows;
  for (const EntryId id : by_area_) {
    if (id != kNoEntry) rows.push_back(row_of(map_[id]));
  }
  std::sort(rows.begin(), rows.end(), [](const AreaRow& a, const AreaRow& b) {
    return a.num_tokens != b.num_tokens ? a.num_tokens < b.num_tokens : a.area < b.area;
  });
  return rows;
}

std::vector<AreaRow> StoreEngine::entries() {
  const Lock lock(mutex_);
  check_usable();
  refresh();
  return list_entries();
}

}  // namespace lmdecode::store
