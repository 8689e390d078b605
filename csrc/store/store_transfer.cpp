// Verification, backup, and the files by which stores exchange entries.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "store/bytes.h"
#include "store/crc32c.h"
#include "store/store_engine.h"

namespace lmdecode::store {

namespace {

constexpr char kMagic[8] = {'L', 'M', 'D', 'K', 'V', 'E', 'X', 'P'};
constexpr uint32_t kVersion = 1;
enum : uint32_t { kEndRecord = 0, kEntryRecord = 1, kSessionRecord = 2 };
constexpr uint64_t kMaxFingerprintBytes = uint64_t{1} << 20;
constexpr uint64_t kMaxSessionBytes = uint64_t{1} << 32;
constexpr uint64_t kRecordHead = 12;  // kind, length

void check_errno(int error, const char* what, const std::string& path) {
  if (error < 0) throw_errno(-error, what, path);
}

[[noreturn]] void damaged(const std::string& what) { throw StoreError(ErrorKind::kDamaged, what); }

// Appends records: kind, length, content, CRC-32C of the three.
class RecordWriter {
 public:
  RecordWriter(File& file, const std::string& path) : file_(file), path_(path) {}

  void raw(std::span<const uint8_t> bytes) {
    check_errno(write_all(file_, offset_, bytes.data(), bytes.size()), "cannot write", path_);
    offset_ += bytes.size();
  }
  void record(uint32_t kind, std::span<const uint8_t> content) {
    ByteWriter head;
    head.u32(kind).u64(content.size());
    uint32_t crc = crc32c(head.bytes().data(), head.bytes().size());
    crc = crc32c(content.data(), content.size(), crc);
    raw(head.bytes());
    raw(content);
    raw(ByteWriter().u32(crc).bytes());
    ++records_;
  }
  void end() { record(kEndRecord, ByteWriter().u64(records_).bytes()); }

 private:
  File& file_;
  const std::string& path_;
  uint64_t offset_ = 0;
  uint64_t records_ = 0;
};

// Trusts nothing that it reads.
class RecordReader {
 public:
  RecordReader(File& file, const std::string& path) : file_(file), path_(path) {
    const int64_t size = file.size();
    check_errno(static_cast<int>(std::min<int64_t>(size, 0)), "cannot read", path);
    size_ = static_cast<uint64_t>(size);
  }
  std::vector<uint8_t> raw(uint64_t size) {
    if (size > size_ - offset_) damaged("import: " + path_ + " ends too early");
    std::vector<uint8_t> bytes(size);
    check_errno(read_all(file_, offset_, bytes.data(), size), "cannot read", path_);
    offset_ += size;
    return bytes;
  }
  uint32_t record(uint64_t max_entry, std::vector<uint8_t>* content) {
    const auto head = raw(kRecordHead);
    ByteReader fields(head, "record");
    const uint32_t kind = fields.u32();
    const uint64_t length = fields.u64();
    const uint64_t limit = kind == kEntryRecord     ? max_entry
                           : kind == kSessionRecord ? kMaxSessionBytes
                           : kind == kEndRecord     ? 8
                                                    : 0;
    if (length == 0 || length > limit) damaged("import: " + path_ + " has a record that is none");
    *content = raw(length);
    const auto tail = raw(4);
    const uint32_t crc = crc32c(content->data(), length, crc32c(head.data(), head.size()));
    if (ByteReader(tail, "record").u32() != crc) {
      damaged("import: " + path_ + " is damaged: checksum of a record");
    }
    return kind;
  }
  uint64_t offset() const { return offset_; }
  uint64_t size() const { return size_; }

 private:
  File& file_;
  const std::string& path_;
  uint64_t offset_ = 0;
  uint64_t size_ = 0;
};

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace

VerifyReport StoreEngine::verify(const Progress& progress) {
  const std::vector<AreaRow> rows = entries();
  VerifyReport report;
  Lock lock(mutex_);
  wait_for_commit(lock);
  index_->check_structure();
  const std::vector<SessionRow> sessions = index_->list_sessions();
  const Activity activity(*this, lock);
  lock.unlock();
  StagingBuffer staging;
  bool goes_on = true;
  for (size_t i = 0; i < rows.size() && (goes_on = progress(i, rows.size())); ++i) {
    const AreaRow& row = rows[i];
    const auto image = staging.resized(layout_.image_bytes(row.count, row.usable_from));
    int error = 0;
    const bool whole = read_whole(layout_, *slabs_, row, image, &error).has_value();
    ++report.entries;
    report.bytes += image.size();
    if (whole) continue;
    const Lock relock(mutex_);
    refresh();
    const EntryId id = prefixes_.at(row.area);
    if (id == kNoEntry || prefixes_[id].sequence != row.sequence) continue;  // evicted meanwhile
    report.damage.push_back("slot " + std::to_string(row.area) + ", prefix of " +
                            std::to_string(row.num_tokens) + " tokens, key " + hex(row.key));
    ++stats_.damaged;
    space_.drop_subtree(id);
  }
  lock.lock();
  for (const SessionRow& session : sessions) {
    if (!goes_on) break;
    wait_for_commit(lock);
    ++report.sessions;
    try {
      index_->read_session(session.root, session.name);
    } catch (const StoreError& error) {
      report.damage.push_back("session '" + session.name + "': " + error.what());
    }
  }
  if (!options_.readonly && commits_.has_changes()) commits_.commit(lock);
  lock.unlock();
  if (!goes_on) throw StoreError(ErrorKind::kUnusable, "verify: interrupted");
  progress(rows.size(), rows.size());
  return report;
}

void StoreEngine::backup(const std::string& directory, const Progress& progress) {
  if (file_system_.exists(directory)) throw_errno(EEXIST, "backup: cannot make", directory);
  const std::string partial = directory + ".partial";
  check_errno(file_system_.make_directory(partial), "backup: cannot make", partial);
  std::vector<std::string> stale;
  check_errno(file_system_.list(partial, &stale), "backup: cannot read", partial);
  for (const std::string& name : stale) file_system_.remove(partial + "/" + name);
  std::vector<AreaRow> rows;
  SlabFiles copies(file_system_, partial, slot_bytes_, slots_per_slab_, false);
  Lock lock(mutex_);
  check_usable();
  const Activity activity(*this, lock);
  if (!options_.readonly && commits_.has_changes()) commits_.commit(lock);
  wait_for_commit(lock);
  // Rows of the copied index, not of the map, which may have changed since.
  index_->read_areas(0, [&](const AreaRow& row) {
    if (row.count != 0) rows.push_back(row);
  });
  index_->copy_to(partial + "/index.sqlite");
  space_.hold();  // no slot of the copied index is written again before it is copied
  lock.unlock();
  const auto release = [&] {
    const Lock relock(mutex_);
    space_.end_hold();
  };
  try {
    StagingBuffer staging;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!progress(i, rows.size())) {
        throw StoreError(ErrorKind::kUnusable, "backup: interrupted");
      }
      const auto image = staging.resized(layout_.image_bytes(rows[i].count, rows[i].usable_from));
      // A slot that cannot be read is damaged there as it is here.
      if (slabs_->read(rows[i].area, 0, image.data(), image.size()) != 0) continue;
      check_errno(copies.write(rows[i].area, image.data(), image.size()), "backup: cannot write to",
                  partial);
    }
    check_errno(copies.sync(), "backup: cannot sync", partial);
    check_errno(file_system_.sync_directory(partial), "backup: cannot sync", partial);
    check_errno(file_system_.rename(partial, directory), "backup: cannot rename", partial);
    const std::string parent = directory.substr(0, directory.rfind('/'));
    check_errno(file_system_.sync_directory(parent), "backup: cannot sync", parent);
  } catch (...) {
    release();
    throw;
  }
  release();
  progress(rows.size(), rows.size());
}

// The entries of a session, parents first.
std::vector<AreaRow> StoreEngine::chain_rows(const Scope& scope, const std::string& session) {
  const auto tokens = read_session(scope, session);
  if (!tokens.has_value()) {
    throw std::invalid_argument("export: there is no session '" + session + "'");
  }
  PrefixKeys keys = keys_of(root(scope), *tokens);
  const Lock lock(mutex_);
  std::vector<AreaRow> rows;
  for (const auto& [id, take] : prefixes_.longest(keys).parts) {
    rows.push_back(prefixes_.row_of(prefixes_[id]));
  }
  return rows;
}

void StoreEngine::export_to(const std::string& path, const Scope* scope, const std::string& session,
                            const Progress& progress) {
  const std::vector<AreaRow> rows = scope != nullptr ? chain_rows(*scope, session) : entries();
  std::vector<SessionRow> sessions;
  Lock lock(mutex_);
  wait_for_commit(lock);
  const Activity activity(*this, lock);
  for (const SessionRow& row : index_->list_sessions()) {
    if (scope == nullptr || (row.root == root(*scope) && row.name == session)) {
      sessions.push_back(row);
    }
  }
  lock.unlock();
  const std::string partial = path + ".partial";
  file_system_.remove(partial);
  int error = 0;
  const auto file = file_system_.open(partial, OpenMode::kCreate, &error);
  if (file == nullptr) throw_errno(error, "export: cannot make", partial);
  RecordWriter out(*file, partial);
  ByteWriter head;
  head.raw(kMagic, sizeof(kMagic)).u32(kVersion).counted(options_.fingerprint);
  head.u32(layout_.chunk_tokens).u32(layout_.values_by_column ? 1 : 0);
  out.raw(head.bytes());
  StagingBuffer staging;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!progress(i, rows.size())) {
      throw StoreError(ErrorKind::kUnusable, "export: interrupted");
    }
    const AreaRow& row = rows[i];
    const auto image = staging.resized(layout_.image_bytes(row.count, row.usable_from));
    // Damaged, or evicted meanwhile; its children find no parent at the import.
    if (!read_whole(layout_, *slabs_, row, image, &error).has_value()) continue;
    out.record(kEntryRecord, image);
  }
  for (const SessionRow& row : sessions) {
    std::optional<SessionRow> whole;
    {
      Lock relock(mutex_);
      wait_for_commit(relock);
      whole = index_->read_session(row.root, row.name);
    }
    if (!whole.has_value()) continue;
    ByteWriter content;
    content.digest(whole->root).u64(whole->tenant).counted(whole->name);
    content.u64(whole->tokens.size()).raw(whole->tokens.data(), 4 * whole->tokens.size());
    out.record(kSessionRecord, content.bytes());
  }
  out.end();
  check_errno(file->sync(), "export: cannot sync", partial);
  check_errno(file_system_.rename(partial, path), "export: cannot rename", partial);
  const size_t slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash);
  check_errno(file_system_.sync_directory(parent), "export: cannot sync", parent);
  progress(rows.size(), rows.size());
}

void StoreEngine::import_session(Lock& lock, std::span<const uint8_t> content) {
  ByteReader fields(content, "import: a session");
  const Digest root_of_session = fields.digest();
  const uint64_t tenant = fields.u64();
  const auto name_bytes = fields.counted();
  const std::string name(name_bytes.begin(), name_bytes.end());
  const uint64_t size = fields.u64();
  const auto bytes = fields.raw(size > content.size() ? UINT64_MAX : 4 * size);
  if (!fields.empty()) damaged("import: a session is damaged");
  std::vector<int32_t> tokens(size);
  if (size > 0) std::memcpy(tokens.data(), bytes.data(), bytes.size());
  check_token_ids(tokens);
  wait_for_commit(lock);
  const auto known = index_->read_session(root_of_session, name);
  // A session that is longer or different here is kept.
  if (known.has_value() &&
      (known->tokens.size() > size ||
       !std::equal(known->tokens.begin(), known->tokens.end(), tokens.begin()))) {
    return;
  }
  record_session(lock, root_of_session, tenant, name, tokens);
}

uint64_t StoreEngine::import_from(const std::string& path, const Progress& progress) {
  int error = 0;
  const auto file = file_system_.open(path, OpenMode::kRead, &error);
  if (file == nullptr) throw_errno(error, "import: cannot read", path);
  RecordReader in(*file, path);
  const auto magic = in.raw(sizeof(kMagic));
  if (std::memcmp(magic.data(), kMagic, sizeof(kMagic)) != 0) {
    damaged("import: " + path + " is no file that export wrote");
  }
  const auto head = in.raw(12);
  ByteReader fields(head, "import");
  if (const uint32_t version = fields.u32(); version != kVersion) {
    throw StoreError(ErrorKind::kMismatch,
                     "import: " + path + " has format version " + std::to_string(version));
  }
  const uint64_t length = fields.u64();
  if (length > kMaxFingerprintBytes) damaged("import: " + path + ": a fingerprint too long");
  const auto fingerprint = in.raw(length);
  if (std::string(fingerprint.begin(), fingerprint.end()) != options_.fingerprint) {
    throw StoreError(ErrorKind::kMismatch,
                     "import: " + path + " was made with another fingerprint");
  }
  const auto layout = in.raw(8);
  ByteReader numbers(layout, "import");
  const uint32_t chunk_tokens = numbers.u32(), by_column = numbers.u32();
  if (chunk_tokens != layout_.chunk_tokens || by_column != (layout_.values_by_column ? 1u : 0u)) {
    throw StoreError(ErrorKind::kMismatch,
                     "import: " + path + " has chunk_tokens = " + std::to_string(chunk_tokens) +
                         ", v_layout = " + (by_column != 0 ? "'column'" : "'row'") + "; expected " +
                         std::to_string(layout_.chunk_tokens) + ", " +
                         (layout_.values_by_column ? "'column'" : "'row'"));
  }
  Lock lock(mutex_);
  require_writer();
  const Activity activity(*this, lock);
  uint64_t added = 0;
  bool goes_on = true;
  std::vector<uint8_t> content;
  for (uint64_t records = 0;; ++records) {
    lock.unlock();
    goes_on = progress(in.offset(), in.size());
    const uint32_t kind = goes_on ? in.record(slot_bytes_, &content) : 0;
    lock.lock();
    require_writer();
    if (const std::string& failure = commits_.failure(); !failure.empty()) {
      throw StoreError(ErrorKind::kUnusable, "import: the store no longer writes: " + failure);
    }
    if (!goes_on) break;
    if (kind == kEndRecord) {
      if (content.size() != 8 || ByteReader(content, "record").u64() != records) {
        damaged("import: " + path + " lacks records");
      }
      break;
    }
    if (kind == kEntryRecord) {
      SlotHeader header = check_image(layout_, content);
      added += place_image(lock, header, content, PutOptions()) ? 1 : 0;
    } else {
      import_session(lock, content);
    }
  }
  if (commits_.has_changes() && !commits_.commit(lock)) {
    throw StoreError(ErrorKind::kInputOutput, "import: cannot be made durable", EIO);
  }
  if (!goes_on) throw StoreError(ErrorKind::kUnusable, "import: interrupted");
  return added;
}

// --- images: a whole entry, header and planes, as other stores' files and a second tier hold it

SlotHeader check_image(const SlotLayout& layout, std::span<const uint8_t> image) {
  SlotHeader header = decode_header(layout, image);
  if (image.size() != layout.image_bytes(header.count, header.usable_from) ||
      !planes_are_whole(layout, header, image) ||
      chain_key(header.parent, header.num_tokens, header.tokens) != header.key ||
      std::any_of(header.tokens.begin(), header.tokens.end(), [](int32_t id) { return id < 0; })) {
    throw StoreError(ErrorKind::kDamaged, "import: an entry is damaged");
  }
  return header;
}

// Writes a checked image to a slot of its own. True: it is new. False: it is known, its parent is
// not, or there is no room. Throws StoreError if the slot cannot be written.
bool StoreEngine::place_image(Lock& lock, SlotHeader& header, std::span<uint8_t> image,
                              const PutOptions& options) {
  const Step step{header.num_tokens - header.count, header.count, header.usable_from, header.key,
                  header.parent};
  const EntryId known = prefixes_.find(header.num_tokens, header.key);
  if (known != kNoEntry && prefixes_[known].usable_from <= header.usable_from) return false;
  const EntryId parent = prefixes_.find(step.begin, step.parent);
  if (step.begin > 0 && parent == kNoEntry) return false;
  const uint64_t parent_sequence = step.begin > 0 ? prefixes_[parent].sequence : 0;
  if (step.begin > 0) ++prefixes_[parent].leases;
  const auto areas = space_.allocate(lock, 1, header.tenant, options.quota_bytes);
  if (step.begin > 0 && prefixes_.holds(parent, parent_sequence)) --prefixes_[parent].leases;
  if (areas.empty()) return false;
  header.area = areas[0];
  const auto header_bytes = image.first(layout_.header_bytes(header.count));
  encode_header(layout_, header, header_bytes);
  const uint32_t crc = crc32c(header_bytes.data(), header_bytes.size());
  const int error = slabs_->write(areas[0], image.data(), image.size());
  // The tokens of the prefix before are not here: only the entry's own are looked at.
  std::vector<int32_t> tokens(step.begin, 0);
  tokens.insert(tokens.end(), header.tokens.begin(), header.tokens.end());
  if (error != 0 || !publish(step, areas[0], crc, header.tenant, options, tokens)) {
    is_full(error) ? space_.refuse(areas[0]) : space_.free_areas().give_back(areas[0]);
    if (error != 0) throw_errno(-error, "import: cannot write to", options_.directory);
    return false;
  }
  return true;
}

std::vector<AreaRow> StoreEngine::entries_of(const Hit& hit) {
  const Lock lock(mutex_);
  check_usable();
  std::vector<AreaRow> rows;
  for (const HitPart& part : hit.parts_) {
    if (!prefixes_.holds(part.id, part.sequence)) break;
    rows.push_back(prefixes_.row_of(prefixes_[part.id]));
  }
  return rows;
}

bool StoreEngine::read_image(const Hit& hit, size_t index, std::span<uint8_t> image) {
  if (hit.engine_.get() != this || index >= hit.parts_.size()) {
    throw std::invalid_argument("read_image: not an entry of a hit of this store");
  }
  const HitPart& part = hit.parts_[index];
  const uint64_t size = layout_.image_bytes(part.count, part.usable_from);
  if (image.size() != size) {
    throw std::invalid_argument("read_image: " + std::to_string(image.size()) +
                                " bytes; expected " + std::to_string(size));
  }
  Lock lock(mutex_);
  check_usable();
  const Activity activity(*this, lock);
  lock.unlock();
  int error = 0;
  auto header = read_whole(layout_, *slabs_, part, image, &error);
  if (!header.has_value()) {
    lock.lock();
    if (error == 0) drop_damaged(part);
    return false;
  }
  header->area = 0;  // a place means nothing elsewhere
  encode_header(layout_, *header, image.first(layout_.header_bytes(part.count)));
  return true;
}

bool StoreEngine::insert_image(const Scope& scope, const Digest& key, std::span<uint8_t> image,
                               const PutOptions& options) {
  try {
    SlotHeader header = check_image(layout_, image);
    if (header.key != key) return false;
    header.tenant = tenant_id(scope.salt);  // the key says so, the header might lie
    Lock lock(mutex_);
    require_writer();
    const Activity activity(*this, lock);
    if (!commits_.failure().empty()) return false;
    return place_image(lock, header, image, options) ||
           prefixes_.find(header.num_tokens, key) != kNoEntry;
  } catch (const StoreError& error) {
    if (error.kind() == ErrorKind::kUnusable) throw;
    return false;
  }
}

}  // namespace lmdecode::store
