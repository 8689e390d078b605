#include "store/index_database.h"

#include <sqlite3.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "store/bytes.h"
#include "store/crc32c.h"
#include "store/token_chain.h"

namespace lmdecode::store {

// Places in kSql.
enum : size_t {
  kPutArea,
  kUse,
  kPutSession,
  kPutTokens,
  kCutTokens,
  kDropSession,
  kDropTokens,
  kPutUnsynced,
  kPutBoot,
  kTakeUnsynced,
  kDropUnsynced,
  kDropBoot
};
inline constexpr const char* kSql[] = {
    "INSERT OR REPLACE INTO areas VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "UPDATE areas SET used_ms = ?2 WHERE area = ?1 AND count > 0",
    "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
    "INSERT OR REPLACE INTO session_tokens VALUES (?, ?, ?, ?)",
    "DELETE FROM session_tokens WHERE root = ?1 AND name = ?2 AND block >= ?3",
    "DELETE FROM sessions WHERE root = ?1 AND name = ?2",
    "DELETE FROM session_tokens WHERE root = ?1 AND name = ?2",
    "INSERT OR REPLACE INTO unsynced_areas VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "INSERT OR REPLACE INTO unsynced_boot VALUES (0, ?)",
    "INSERT OR REPLACE INTO areas SELECT * FROM unsynced_areas",
    "DELETE FROM unsynced_areas",
    "DELETE FROM unsynced_boot",
};

#define LMD_COLUMNS_OF_AREAS                                                            \
  " (area INTEGER PRIMARY KEY, sequence INTEGER NOT NULL,"                              \
  " num_tokens INTEGER NOT NULL, count INTEGER NOT NULL, usable_from INTEGER NOT NULL," \
  " header_crc INTEGER NOT NULL, tenant INTEGER NOT NULL, created_ms INTEGER NOT NULL," \
  " used_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL, pinned INTEGER NOT NULL,"    \
  " keys BLOB NOT NULL);"

constexpr const char* kSchema =
    "CREATE TABLE superblock (id INTEGER PRIMARY KEY CHECK (id = 0), content BLOB NOT NULL);"
    "CREATE TABLE areas" LMD_COLUMNS_OF_AREAS "CREATE TABLE unsynced_areas" LMD_COLUMNS_OF_AREAS
    "CREATE TABLE unsynced_boot (id INTEGER PRIMARY KEY CHECK (id = 0), boot BLOB NOT NULL);"
    "CREATE INDEX areas_by_sequence ON areas (sequence);"
    "CREATE TABLE sessions (root BLOB NOT NULL, name BLOB NOT NULL, tenant INTEGER NOT NULL,"
    " updated_ms INTEGER NOT NULL, num_tokens INTEGER NOT NULL, digest BLOB NOT NULL,"
    " PRIMARY KEY (root, name)) WITHOUT ROWID;"
    "CREATE TABLE session_tokens (root BLOB NOT NULL, name BLOB NOT NULL,"
    " block INTEGER NOT NULL, tokens BLOB NOT NULL, PRIMARY KEY (root, name, block))"
    " WITHOUT ROWID;";

#undef LMD_COLUMNS_OF_AREAS

namespace {

constexpr int kApplicationId = 0x4c4d4b56;  // "LMKV"
constexpr int kFormatVersion = 1;
constexpr int kBusyTimeoutMs = 10000;
constexpr uint64_t kPage = 4096;       // of SQLite's files
constexpr size_t kBlockTokens = 1024;  // of a session in one row

bool is_damage(int code) {
  const int primary = code & 0xff;
  return primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB || primary == SQLITE_FORMAT;
}

}  // namespace

// A prepared statement, its parameters and columns by position.
struct IndexDatabase::Statement {
  Statement(const IndexDatabase& owner, const char* sql) : owner(owner) {
    if (sqlite3_prepare_v3(owner.database_, sql, -1, SQLITE_PREPARE_PERSISTENT, &handle, nullptr) !=
        SQLITE_OK) {
      owner.fail("cannot be read");
    }
  }
  ~Statement() { sqlite3_finalize(handle); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& integer(uint64_t value) {
    sqlite3_bind_int64(handle, ++bound, static_cast<int64_t>(value));
    return *this;
  }
  // The bytes stay where they are until the statement is reset.
  Statement& blob(const void* data, size_t size) {
    sqlite3_bind_blob64(handle, ++bound, size == 0 ? "" : data, size, SQLITE_STATIC);
    return *this;
  }
  Statement& blob(const Digest& digest) { return blob(digest.data(), digest.size()); }
  Statement& blob(const std::string& text) { return blob(text.data(), text.size()); }

  bool step() {  // to the next row
    const int code = sqlite3_step(handle);
    if (code == SQLITE_ROW) return true;
    if (code != SQLITE_DONE) owner.fail("cannot be read");
    return false;
  }
  int run() {  // a statement without rows
    const int code = sqlite3_step(handle);
    reset();
    return code == SQLITE_DONE ? SQLITE_OK : code;
  }
  void reset() {
    sqlite3_reset(handle);
    sqlite3_clear_bindings(handle);
    bound = 0;
  }
  int64_t integer_at(int column) const { return sqlite3_column_int64(handle, column); }
  std::span<const uint8_t> blob_at(int column) const {
    const auto* data = static_cast<const uint8_t*>(sqlite3_column_blob(handle, column));
    return {data, static_cast<size_t>(sqlite3_column_bytes(handle, column))};
  }
  Digest digest_at(int column) const {
    return ByteReader(blob_at(column), "the index: a key").digest();
  }

  const IndexDatabase& owner;
  sqlite3_stmt* handle = nullptr;
  int bound = 0;
};

IndexDatabase::IndexDatabase(FileSystem& file_system, const std::string& path, bool readonly)
    : file_system_(file_system), path_(path), readonly_(readonly), boot_(file_system.boot()) {
  if (!readonly && !file_system.exists(path)) {
    // Made here: SQLite would give it a mode by the umask. The log and its index follow the file.
    int error = 0;
    if (file_system.open(path, OpenMode::kCreate, &error) == nullptr) {
      throw_errno(error, "cannot make", path);
    }
  }
  const int access = readonly ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE;
  const int flags = access | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW | SQLITE_OPEN_URI;
  const auto open = [&](const std::string& name) {
    if (sqlite3_open_v2(name.c_str(), &database_, flags, file_system_.sqlite_vfs()) != SQLITE_OK) {
      fail("cannot be opened");
    }
    sqlite3_extended_result_codes(database_, 1);
    sqlite3_busy_timeout(database_, kBusyTimeoutMs);
    execute("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY");
    Statement(*this, "PRAGMA application_id").step();  // the first look into the file
  };
  try {
    try {
      open(path);
    } catch (const StoreError& error) {
      // A reader in a directory that it may not write, with no log to follow: nobody writes there.
      if (!readonly || error.kind() == ErrorKind::kDamaged || !file_system.exists(path) ||
          file_system.exists(path + "-wal")) {
        throw;
      }
      sqlite3_close_v2(std::exchange(database_, nullptr));
      std::string escaped;
      for (const char letter : path) {
        if (letter == '%' || letter == '?' || letter == '#') {
          const char* hex = "0123456789abcdef";
          escaped += {'%', hex[letter >> 4 & 15], hex[letter & 15]};
        } else {
          escaped += letter;
        }
      }
      open("file:" + escaped + "?immutable=1");
    }
    const auto pragma = [&](const char* sql) {
      Statement statement(*this, sql);
      return statement.step() ? statement.integer_at(0) : 0;
    };
    const int64_t id = pragma("PRAGMA application_id"), version = pragma("PRAGMA user_version");
    if (!readonly) {
      execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA secure_delete = ON");
      if (id == 0 && version == 0) create_tables();
    }
    if ((readonly || id != 0) && (id != kApplicationId || version != kFormatVersion)) {
      throw StoreError(id == kApplicationId ? ErrorKind::kMismatch : ErrorKind::kDamaged,
                       "KVStore: " + path + " is no index of format version " +
                           std::to_string(kFormatVersion) + " (application id " +
                           std::to_string(id) + ", version " + std::to_string(version) + ")");
    }
    if (!readonly) {
      for (const char* sql : kSql) statements_.push_back(std::make_unique<Statement>(*this, sql));
    }
    changed();
  } catch (...) {
    statements_.clear();
    sqlite3_close_v2(database_);
    throw;
  }
}

IndexDatabase::~IndexDatabase() {
  statements_.clear();
  sqlite3_close_v2(database_);
}

void IndexDatabase::abandon() {
  for (auto& statement : statements_) static_cast<void>(statement.release());
  statements_.clear();
  database_ = nullptr;
}

void IndexDatabase::fail(const std::string& doing) const {
  const int code = sqlite3_extended_errcode(database_);
  const std::string what =
      "KVStore: the index " + path_ + " " + doing + ": " + sqlite3_errmsg(database_);
  if (is_damage(code)) throw StoreError(ErrorKind::kDamaged, what);
  const int error = (code & 0xff) == SQLITE_FULL ? ENOSPC : sqlite3_system_errno(database_);
  throw StoreError(ErrorKind::kInputOutput, what, error != 0 ? error : EIO);
}

void IndexDatabase::execute(const char* sql) {
  if (sqlite3_exec(database_, sql, nullptr, nullptr, nullptr) != SQLITE_OK) fail("is not usable");
}

void IndexDatabase::create_tables() {
  const std::string sql = std::string("BEGIN IMMEDIATE;") + kSchema +
                          "PRAGMA application_id = " + std::to_string(kApplicationId) +
                          "; PRAGMA user_version = " + std::to_string(kFormatVersion) + "; COMMIT";
  execute(sql.c_str());
}

std::optional<std::vector<uint8_t>> IndexDatabase::superblock() {
  Statement statement(*this, "SELECT content FROM superblock");
  if (!statement.step()) return std::nullopt;
  const auto content = statement.blob_at(0);
  if (content.size() < 4) throw StoreError(ErrorKind::kDamaged, path_ + ": superblock too short");
  const auto body = content.first(content.size() - 4);
  if (ByteReader(content.last(4), "superblock").u32() != crc32c(body.data(), body.size())) {
    throw StoreError(ErrorKind::kDamaged,
                     "KVStore: the index " + path_ + " is damaged: checksum of the superblock");
  }
  return std::vector<uint8_t>(body.begin(), body.end());
}

void IndexDatabase::set_superblock(const std::vector<uint8_t>& content) {
  ByteWriter bytes;
  bytes.raw(content.data(), content.size()).u32(crc32c(content.data(), content.size()));
  Statement statement(*this, "INSERT INTO superblock VALUES (0, ?)");
  if (statement.blob(bytes.bytes().data(), bytes.bytes().size()).run() != SQLITE_OK) {
    fail("cannot be written");
  }
}

void IndexDatabase::write_session(const SessionRow& session) {
  const auto check = [&](int code) {
    if (code != SQLITE_OK) fail("cannot be written");
  };
  if (session.removed) {
    check(statements_[kDropTokens]->blob(session.root).blob(session.name).run());
    check(statements_[kDropSession]->blob(session.root).blob(session.name).run());
    return;
  }
  const size_t size = session.tokens.size();
  const size_t first = std::min(session.unchanged, size) / kBlockTokens;
  const size_t blocks = (size + kBlockTokens - 1) / kBlockTokens;
  for (size_t block = first; block < blocks; ++block) {
    const size_t begin = block * kBlockTokens, count = std::min(kBlockTokens, size - begin);
    check(statements_[kPutTokens]
              ->blob(session.root)
              .blob(session.name)
              .integer(block)
              .blob(session.tokens.data() + begin, count * sizeof(int32_t))
              .run());
  }
  check(statements_[kCutTokens]->blob(session.root).blob(session.name).integer(blocks).run());
  const Digest digest = prefix_key(session.root, session.tokens, kBlockTokens);
  check(statements_[kPutSession]
            ->blob(session.root)
            .blob(session.name)
            .integer(session.tenant)
            .integer(session.updated_ms)
            .integer(size)
            .blob(digest)
            .run());
}

std::optional<std::string> IndexDatabase::unsynced_boot() {
  Statement statement(*this, "SELECT boot FROM unsynced_boot");
  if (!statement.step()) return std::nullopt;
  has_unsynced_ = true;
  const auto boot = statement.blob_at(0);
  return std::string(boot.begin(), boot.end());
}

void IndexDatabase::run(size_t statement) {
  if (statements_[statement]->run() != SQLITE_OK) fail("cannot be written");
}

CommitResult IndexDatabase::commit(const IndexBatch& batch, Survives survives, std::string* error) {
  const bool syncs = survives == Survives::kPowerLoss;
  try {
    if (syncs != syncs_) {
      // NORMAL: the log is synced before it is moved into the file alone.
      execute(syncs ? "PRAGMA synchronous = FULL" : "PRAGMA synchronous = NORMAL");
      syncs_ = syncs;
    }
    execute("BEGIN IMMEDIATE");
    if (has_unsynced_ && (syncs || drops_unsynced_)) {
      if (!drops_unsynced_) run(kTakeUnsynced);
      run(kDropUnsynced);
      run(kDropBoot);
    }
    if (!syncs && (!has_unsynced_ || drops_unsynced_)) {
      statements_[kPutBoot]->blob(boot_);
      run(kPutBoot);
    }
    for (const AreaRow& row : batch.areas) {
      uint8_t keys[64];
      std::memcpy(keys, row.key.data(), 32);
      std::memcpy(keys + 32, row.parent.data(), 32);
      Statement& put = *statements_[syncs ? kPutArea : kPutUnsynced];
      put.integer(row.area).integer(row.sequence).integer(row.num_tokens).integer(row.count);
      put.integer(row.usable_from).integer(row.header_crc).integer(row.tenant);
      put.integer(row.created_ms).integer(row.used_ms).integer(row.expires_ms).integer(row.pinned);
      if (put.blob(keys, row.count == 0 ? 0 : sizeof(keys)).run() != SQLITE_OK) {
        fail("cannot be written");
      }
    }
    for (const UseTime& use : batch.uses) {
      if (statements_[kUse]->integer(use.area).integer(use.used_ms).run() != SQLITE_OK) {
        fail("cannot be written");
      }
    }
    for (const SessionRow& session : batch.sessions) write_session(session);
    execute("COMMIT");
    has_unsynced_ = !syncs;
    drops_unsynced_ = false;
    return CommitResult::kDone;
  } catch (const StoreError& failure) {
    *error = failure.what();
    const bool full = (sqlite3_extended_errcode(database_) & 0xff) == SQLITE_FULL;
    if (sqlite3_get_autocommit(database_) == 0) {
      if (sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr) != SQLITE_OK) {
        return CommitResult::kFailed;
      }
    }
    return full ? CommitResult::kDiskFull : CommitResult::kFailed;
  }
}

bool IndexDatabase::changed() {
  Statement statement(*this, "PRAGMA data_version");
  const int64_t version = statement.step() ? statement.integer_at(0) : 0;
  return std::exchange(data_version_, version) != version;
}

uint64_t IndexDatabase::count_areas() {
  Statement statement(*this, "SELECT count(*) FROM areas");
  return statement.step() ? statement.integer_at(0) : 0;
}

void IndexDatabase::read_areas(uint64_t after_sequence,
                               const std::function<void(const AreaRow&)>& visit) {
  Statement statement(*this, after_sequence == 0 ? "SELECT * FROM areas"
                                                 : "SELECT * FROM areas WHERE sequence > ?");
  if (after_sequence != 0) statement.integer(after_sequence);
  while (statement.step()) {
    AreaRow row;
    const int64_t area = statement.integer_at(0), count = statement.integer_at(3);
    const int64_t from = statement.integer_at(4);
    if (area < 0 || area >= UINT32_MAX || count < 0 || count > INT32_MAX || from < 0 ||
        from > UINT32_MAX) {
      throw StoreError(ErrorKind::kDamaged,
                       "KVStore: the index " + path_ + " is damaged: area " + std::to_string(area));
    }
    row.area = static_cast<uint32_t>(area);
    row.sequence = statement.integer_at(1);
    row.num_tokens = statement.integer_at(2);
    row.count = static_cast<uint32_t>(count);
    row.usable_from = static_cast<uint32_t>(from);
    row.header_crc = static_cast<uint32_t>(statement.integer_at(5));
    row.tenant = statement.integer_at(6);
    row.created_ms = statement.integer_at(7);
    row.used_ms = statement.integer_at(8);
    row.expires_ms = statement.integer_at(9);
    row.pinned = statement.integer_at(10) != 0;
    if (row.count != 0) {
      ByteReader keys(statement.blob_at(11), "the index: keys");
      row.key = keys.digest();
      row.parent = keys.digest();
    }
    visit(row);
  }
}

std::optional<SessionRow> IndexDatabase::read_session(const Digest& root, const std::string& name) {
  // One statement: a writer in another process may commit between two.
  Statement statement(*this,
                      "SELECT s.tenant, s.updated_ms, s.num_tokens, s.digest, t.tokens"
                      " FROM sessions s LEFT JOIN session_tokens t USING (root, name)"
                      " WHERE s.root = ? AND s.name = ? ORDER BY t.block");
  statement.blob(root).blob(name);
  SessionRow session{.root = root, .name = name};
  std::optional<Digest> digest;
  uint64_t size = 0;
  while (statement.step()) {
    session.tenant = statement.integer_at(0);
    session.updated_ms = statement.integer_at(1);
    size = statement.integer_at(2);
    digest = statement.digest_at(3);
    const auto tokens = statement.blob_at(4);
    const size_t before = session.tokens.size(), count = tokens.size() / sizeof(int32_t);
    session.tokens.resize(before + count);
    if (count > 0) std::memcpy(session.tokens.data() + before, tokens.data(), count * 4);
  }
  if (!digest.has_value()) return std::nullopt;
  if (session.tokens.size() != size || prefix_key(root, session.tokens, kBlockTokens) != *digest) {
    throw StoreError(ErrorKind::kDamaged, "KVStore: the stored tokens of a session are damaged");
  }
  return session;
}

std::vector<SessionRow> IndexDatabase::list_sessions() {
  Statement statement(*this,
                      "SELECT root, name, tenant, updated_ms, num_tokens FROM sessions"
                      " ORDER BY updated_ms DESC, name");
  std::vector<SessionRow> sessions;
  while (statement.step()) {
    SessionRow session;
    session.root = statement.digest_at(0);
    const auto name = statement.blob_at(1);
    session.name.assign(name.begin(), name.end());
    session.tenant = statement.integer_at(2);
    session.updated_ms = statement.integer_at(3);
    session.unchanged = statement.integer_at(4);
    sessions.push_back(std::move(session));
  }
  return sessions;
}

uint64_t IndexDatabase::count_sessions() {
  Statement statement(*this, "SELECT count(*) FROM sessions");
  return statement.step() ? statement.integer_at(0) : 0;
}

void IndexDatabase::check_structure() {
  Statement statement(*this, "PRAGMA integrity_check(1)");
  if (!statement.step()) fail("cannot be read");
  const auto text = statement.blob_at(0);
  const std::string words(text.begin(), text.end());
  if (words != "ok") {
    throw StoreError(ErrorKind::kDamaged, "KVStore: the index " + path_ + " is damaged: " + words);
  }
}

void IndexDatabase::copy_to(const std::string& path) {
  int error = 0;
  if (file_system_.open(path, OpenMode::kCreate, &error) == nullptr) {
    throw_errno(error, "cannot make", path);
  }
  sqlite3* target = nullptr;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_NOFOLLOW;
  int code = sqlite3_open_v2(path.c_str(), &target, flags, file_system_.sqlite_vfs());
  if (code == SQLITE_OK) {
    sqlite3_backup* backup = sqlite3_backup_init(target, "main", database_, "main");
    if (backup != nullptr) {
      sqlite3_backup_step(backup, -1);
      sqlite3_backup_finish(backup);
    }
    code = sqlite3_errcode(target);
  }
  if (code == SQLITE_OK) {  // copies the slots of the durable index
    code = sqlite3_exec(target, "DELETE FROM unsynced_areas; DELETE FROM unsynced_boot", nullptr,
                        nullptr, nullptr);
  }
  const std::string what = code == SQLITE_OK ? "" : sqlite3_errmsg(target);
  sqlite3_close_v2(target);
  if (code != SQLITE_OK) {
    throw StoreError(ErrorKind::kInputOutput, "cannot write " + path + ": " + what, EIO);
  }
}

bool IndexDatabase::recycle_log() {
  int frames = 0, moved = 0;
  const int code =
      sqlite3_wal_checkpoint_v2(database_, nullptr, SQLITE_CHECKPOINT_PASSIVE, &frames, &moved);
  return code == SQLITE_OK && frames == moved;
}

void IndexDatabase::limit_log(uint64_t bytes) {
  sqlite3_wal_autocheckpoint(database_, static_cast<int>(std::max<uint64_t>(1, bytes / kPage)));
}

void IndexDatabase::compact() {
  try {
    execute("VACUUM");
  } catch (const StoreError& error) {
    if (error.error_number() != ENOSPC) throw;  // a full disk: it stays as long as it is
  }
  empty_log();
}

void IndexDatabase::empty_log() { execute("PRAGMA wal_checkpoint(TRUNCATE)"); }

}  // namespace lmdecode::store
