// The durable index: SQLite in WAL mode. One row an area, so that no area can be owned twice; rows
// carry the number of the change that wrote them; readers follow the writer by it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/address_map.h"
#include "store/file_system.h"

struct sqlite3;
struct sqlite3_stmt;

namespace lmdecode::store {

// The content of an area. count 0: empty since used_ms.
struct AreaRow : Chunk {
  Digest parent{};
};

// A session is found by its root key, which covers configuration, tenant and context, and its name.
struct SessionRow {
  Digest root{};
  std::string name;
  uint64_t tenant = 0;
  int64_t updated_ms = 0;
  bool removed = false;
  std::vector<int32_t> tokens = {};
  size_t unchanged = 0;  // leading tokens that the index has already
};

struct UseTime {
  uint32_t area;
  int64_t used_ms;
};

// The writes of one transaction.
struct IndexBatch {
  std::vector<AreaRow> areas;
  std::vector<SessionRow> sessions;
  std::vector<UseTime> uses;
  bool empty() const { return areas.empty() && sessions.empty(); }
};

enum class CommitResult { kDone, kDiskFull, kFailed };

// What a change survives: a kill of the process, or a loss of power as well.
enum class Survives { kKill, kPowerLoss };

class IndexDatabase {
 public:
  // Opens, and for a writer makes, the file. Throws StoreError; kDamaged where it is not an index.
  IndexDatabase(FileSystem& file_system, const std::string& path, bool readonly);
  ~IndexDatabase();
  IndexDatabase(const IndexDatabase&) = delete;
  IndexDatabase& operator=(const IndexDatabase&) = delete;

  // The description of the store, checksummed; nothing in an index that was just made.
  std::optional<std::vector<uint8_t>> superblock();
  void set_superblock(const std::vector<uint8_t>& content);

  // kPowerLoss: durable when it returns kDone, with all changes before it, whose slots are durable.
  // kKill: the system has the areas when it returns, apart from the others, and nobody reads them
  // before the next change that is durable. kDiskFull: nothing was written. Throws nothing.
  CommitResult commit(const IndexBatch& batch, Survives survives, std::string* error);
  // The boot() of a writer that was killed after a change that is not durable.
  std::optional<std::string> unsynced_boot();
  // Such changes did not happen.
  void drop_unsynced() { drops_unsynced_ = true; }

  // Whether another connection committed since the last call.
  bool changed();
  // Rows of changes after this one, each once.
  void read_areas(uint64_t after_sequence, const std::function<void(const AreaRow&)>& visit);
  uint64_t count_areas();
  // Throws StoreError kDamaged if the tokens do not match their hash.
  std::optional<SessionRow> read_session(const Digest& root, const std::string& name);
  std::vector<SessionRow> list_sessions();  // without tokens
  uint64_t count_sessions();

  // Throws StoreError kDamaged with SQLite's words where the file's structure is broken.
  void check_structure();
  // A copy of the committed state at another path, durable.
  void copy_to(const std::string& path);
  // Moves pages that no reader needs from the log into the file: the log's space serves again.
  // False: not all of it.
  bool recycle_log();
  // Sets the size of the log at which that happens by itself.
  void limit_log(uint64_t bytes);
  // Moves the log into the file, zeroes deleted content, and truncates the log.
  void empty_log();
  // Moves the log into the file and gives free pages back, if there is space to do so.
  void compact();
  // Lets go without touching the files: in a process that was forked.
  void abandon();

 private:
  struct Statement;
  [[noreturn]] void fail(const std::string& doing) const;
  void execute(const char* sql);
  void create_tables();
  void write_session(const SessionRow& session);
  void run(size_t statement);

  FileSystem& file_system_;
  const std::string path_;
  const bool readonly_;
  const std::string boot_;
  sqlite3* database_ = nullptr;
  bool syncs_ = true;  // each transaction
  bool has_unsynced_ = false;
  bool drops_unsynced_ = false;
  int64_t data_version_ = 0;
  std::vector<std::unique_ptr<Statement>> statements_;
};

}  // namespace lmdecode::store
