// The tables of the durable index, and the statements that write to them.
#pragma once

#include <cstddef>

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

// Stores of former versions get them when they are opened to be written.
constexpr const char* kUnsyncedTables =
    "CREATE TABLE IF NOT EXISTS unsynced_areas" LMD_COLUMNS_OF_AREAS
    "CREATE TABLE IF NOT EXISTS unsynced_boot (id INTEGER PRIMARY KEY CHECK (id = 0),"
    " boot BLOB NOT NULL);";

constexpr const char* kSchema =
    "CREATE TABLE superblock (id INTEGER PRIMARY KEY CHECK (id = 0), content BLOB NOT NULL);"
    "CREATE TABLE areas" LMD_COLUMNS_OF_AREAS
    "CREATE INDEX areas_by_sequence ON areas (sequence);"
    "CREATE TABLE sessions (root BLOB NOT NULL, name BLOB NOT NULL, tenant INTEGER NOT NULL,"
    " updated_ms INTEGER NOT NULL, num_tokens INTEGER NOT NULL, digest BLOB NOT NULL,"
    " PRIMARY KEY (root, name)) WITHOUT ROWID;"
    "CREATE TABLE session_tokens (root BLOB NOT NULL, name BLOB NOT NULL,"
    " block INTEGER NOT NULL, tokens BLOB NOT NULL, PRIMARY KEY (root, name, block))"
    " WITHOUT ROWID;";

#undef LMD_COLUMNS_OF_AREAS

}  // namespace lmdecode::store
