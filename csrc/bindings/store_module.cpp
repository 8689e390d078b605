// lmdecode._store: the store behind a C interface that Python reaches by ctypes, so that one build
// serves every Python; the interpreter's lock is released during every call. Each function returns
// a status; the message of the last failure is kept for each thread. The structures are repeated in
// python/lmdecode/store/_library.py.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "store/crc32c.h"
#include "store/store_engine.h"

#define LMD_EXPORT extern "C" __attribute__((visibility("default")))

namespace lmdecode::store {
namespace {

enum Status : int {
  kOk = 0,
  kInvalidArgument = 1,
  kInputOutput = 2,
  kLocked = 3,
  kDamaged = 4,
  kMismatch = 5,
  kUnusable = 6,
  kOther = 7,
};

thread_local std::string last_error;
thread_local int last_errno = 0;

int status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInputOutput:
      return kInputOutput;
    case ErrorKind::kLocked:
      return kLocked;
    case ErrorKind::kDamaged:
      return kDamaged;
    case ErrorKind::kMismatch:
      return kMismatch;
    default:
      return kUnusable;
  }
}

// No exception crosses the C interface.
template <class Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return kOk;
  } catch (const StoreError& error) {
    last_error = error.what();
    last_errno = error.error_number();
    return status_of(error.kind());
  } catch (const std::invalid_argument& error) {
    last_error = error.what();
    return kInvalidArgument;
  } catch (const std::exception& error) {
    last_error = error.what();
    return kOther;
  }
}

struct Bytes {
  const char* data;
  uint64_t size;
  std::string text() const { return std::string(data, size); }
};

struct Options {
  Bytes directory;
  Bytes fingerprint;
  uint32_t num_layers, num_kv_heads, head_size, element_size;
  const uint32_t* windows;  // [num_layers], null: none
  uint32_t chunk_tokens;
  uint32_t values_by_column, relaxed, readonly;
  uint64_t capacity_bytes, slab_bytes;
  int64_t flush_interval_ms, idle_ms;
  int32_t io_threads;
};

struct Place {
  Bytes salt;
  Bytes context;
  Scope scope() const { return {salt.text(), context.text()}; }
};

struct Plane {
  void* data;
  int64_t head_stride, token_stride, element_stride;  // bytes
  uint64_t num_tokens;
};

struct Put {
  int64_t ttl_ms;
  uint64_t quota_bytes;
  uint32_t pin;
};

struct EntryLine {
  uint64_t num_tokens, area, tenant, bytes;
  int64_t created_ms, used_ms, expires_ms;
  uint32_t count, pinned;
  uint8_t key[32];
};

struct SessionLine {
  uint64_t num_tokens, tenant;
  int64_t updated_ms;
  uint64_t name_size;  // may exceed what fits
  char name[256];
};

std::vector<TensorPlane> planes_of(const Plane* planes, uint64_t count) {
  std::vector<TensorPlane> result;
  for (uint64_t i = 0; i < count; ++i) {
    const Plane& plane = planes[i];
    result.push_back({static_cast<char*>(plane.data),
                      {plane.head_stride, plane.token_stride, plane.element_stride},
                      plane.num_tokens});
  }
  return result;
}

PutOptions put_options(const Put& put) { return {put.ttl_ms, put.pin != 0, put.quota_bytes}; }

using ProgressFunction = int (*)(uint64_t done, uint64_t total);  // 0: stop

Progress progress_of(ProgressFunction function) {
  return [function](uint64_t done, uint64_t total) {
    return function == nullptr || function(done, total) != 0;
  };
}

// Copies what fits and says how much there is.
template <class T>
uint64_t copy_out(const std::vector<T>& values, T* out, uint64_t capacity) {
  const uint64_t copied = std::min<uint64_t>(values.size(), capacity);
  if (copied > 0) std::memcpy(out, values.data(), copied * sizeof(T));
  return values.size();
}

}  // namespace
}  // namespace lmdecode::store

using namespace lmdecode::store;  // NOLINT: the functions below are C

struct lmdecode_store {
  std::shared_ptr<StoreEngine> engine;
};
struct lmdecode_store_hit {
  Hit hit;
};

namespace {

// Null where nothing was found.
void give_hit(Hit hit, lmdecode_store_hit** out, uint64_t* num_tokens) {
  *num_tokens = hit.num_tokens();
  *out = *num_tokens == 0 ? nullptr : new lmdecode_store_hit{std::move(hit)};
}

std::vector<EntryLine> lines_of(const StoreEngine& engine, const std::vector<AreaRow>& rows) {
  std::vector<EntryLine> result;
  for (const AreaRow& row : rows) {
    EntryLine line{};
    line.num_tokens = row.num_tokens;
    line.area = row.area;
    line.tenant = row.tenant;
    line.bytes = engine.layout().image_bytes(row.count);
    line.created_ms = row.created_ms;
    line.used_ms = row.used_ms;
    line.expires_ms = row.expires_ms;
    line.count = row.count;
    line.pinned = row.pinned;
    std::memcpy(line.key, row.key.data(), row.key.size());
    result.push_back(line);
  }
  return result;
}

}  // namespace

LMD_EXPORT const char* lmdecode_store_error(int* error_number) {
  *error_number = last_errno;
  return last_error.c_str();
}

LMD_EXPORT int lmdecode_store_open(const Options* options, lmdecode_store** out) {
  return guarded([&] {
    StoreOptions settings;
    settings.directory = options->directory.text();
    settings.fingerprint = options->fingerprint.text();
    settings.shape = {
        options->num_layers, options->num_kv_heads, options->head_size, options->element_size, {}};
    if (options->windows != nullptr) {
      settings.shape.windows.assign(options->windows, options->windows + options->num_layers);
    }
    settings.chunk_tokens = options->chunk_tokens;
    settings.values_by_column = options->values_by_column != 0;
    settings.relaxed = options->relaxed != 0;
    settings.readonly = options->readonly != 0;
    settings.capacity_bytes = options->capacity_bytes;
    settings.slab_bytes = options->slab_bytes;
    settings.flush_interval_ms = options->flush_interval_ms;
    settings.idle_ms = options->idle_ms;
    settings.io_threads = options->io_threads;
    *out = new lmdecode_store{StoreEngine::open(settings)};
  });
}

LMD_EXPORT int lmdecode_store_close(lmdecode_store* store) {
  return guarded([&] { store->engine->close(); });
}

// The memory: no other call may be under way, or follow.
LMD_EXPORT void lmdecode_store_free(lmdecode_store* store) { delete store; }

LMD_EXPORT int lmdecode_store_lookup(lmdecode_store* store, const Place* place,
                                     const int32_t* tokens, uint64_t num_tokens,
                                     lmdecode_store_hit** out, uint64_t* hit_tokens) {
  return guarded([&] {
    give_hit(store->engine->lookup(place->scope(), {tokens, num_tokens}), out, hit_tokens);
  });
}

LMD_EXPORT int lmdecode_store_peek(lmdecode_store* store, const Place* place, const int32_t* tokens,
                                   uint64_t num_tokens, lmdecode_store_hit** out,
                                   uint64_t* hit_tokens) {
  return guarded([&] {
    give_hit(store->engine->peek(place->scope(), {tokens, num_tokens}), out, hit_tokens);
  });
}

LMD_EXPORT void lmdecode_store_release(lmdecode_store_hit* hit) { delete hit; }

LMD_EXPORT int lmdecode_store_load(lmdecode_store* store, lmdecode_store_hit* hit,
                                   uint32_t first_layer, uint32_t num_layers, const Plane* planes,
                                   uint64_t num_planes, uint32_t* loaded) {
  return guarded([&] {
    *loaded = store->engine->load(hit->hit, first_layer, num_layers, planes_of(planes, num_planes));
  });
}

LMD_EXPORT int lmdecode_store_put(lmdecode_store* store, const Place* place, const int32_t* tokens,
                                  uint64_t num_tokens, const Plane* planes, uint64_t num_planes,
                                  const Put* put, uint64_t* stored) {
  return guarded([&] {
    *stored = store->engine->put(place->scope(), {tokens, num_tokens},
                                 planes_of(planes, num_planes), put_options(*put));
  });
}

LMD_EXPORT int lmdecode_store_pin(lmdecode_store* store, lmdecode_store_hit* hit, uint32_t pinned) {
  return guarded([&] { store->engine->pin(hit->hit, pinned != 0); });
}

LMD_EXPORT int lmdecode_store_key(lmdecode_store* store, const Place* place, const int32_t* tokens,
                                  uint64_t num_tokens, uint8_t* key) {
  return guarded([&] {
    const StoreEngine& engine = *store->engine;
    const Digest digest =
        prefix_key(engine.root(place->scope()), {tokens, num_tokens}, engine.layout().chunk_tokens);
    std::memcpy(key, digest.data(), digest.size());
  });
}

LMD_EXPORT int lmdecode_store_read_session(lmdecode_store* store, const Place* place, Bytes name,
                                           int32_t* tokens, uint64_t capacity,
                                           int64_t* num_tokens) {
  return guarded([&] {
    const auto session = store->engine->read_session(place->scope(), name.text());
    *num_tokens =
        session.has_value() ? static_cast<int64_t>(copy_out(*session, tokens, capacity)) : -1;
  });
}

LMD_EXPORT int lmdecode_store_commit_session(lmdecode_store* store, const Place* place, Bytes name,
                                             const int32_t* tokens, uint64_t num_tokens,
                                             uint64_t num_computed, const Plane* planes,
                                             uint64_t num_planes, const Put* put,
                                             uint64_t* stored) {
  return guarded([&] {
    *stored = store->engine->commit_session(place->scope(), name.text(), {tokens, num_tokens},
                                            num_computed, planes_of(planes, num_planes),
                                            put_options(*put));
  });
}

LMD_EXPORT int lmdecode_store_write_session(lmdecode_store* store, const Place* place, Bytes name,
                                            const int32_t* tokens, uint64_t num_tokens,
                                            uint32_t* written) {
  return guarded([&] {
    *written = store->engine->write_session(place->scope(), name.text(), {tokens, num_tokens});
  });
}

LMD_EXPORT int lmdecode_store_remove_session(lmdecode_store* store, const Place* place, Bytes name,
                                             uint32_t* removed) {
  return guarded([&] { *removed = store->engine->remove_session(place->scope(), name.text()); });
}

LMD_EXPORT int lmdecode_store_sessions(lmdecode_store* store, SessionLine* lines, uint64_t capacity,
                                       uint64_t* count) {
  return guarded([&] {
    std::vector<SessionLine> result;
    for (const SessionRow& row : store->engine->list_sessions()) {
      SessionLine line{};
      line.num_tokens = row.unchanged;
      line.tenant = row.tenant;
      line.updated_ms = row.updated_ms;
      line.name_size = row.name.size();
      std::memcpy(line.name, row.name.data(), std::min(row.name.size(), sizeof(line.name)));
      result.push_back(line);
    }
    *count = copy_out(result, lines, capacity);
  });
}

LMD_EXPORT int lmdecode_store_entries(lmdecode_store* store, EntryLine* lines, uint64_t capacity,
                                      uint64_t* count) {
  return guarded([&] {
    const auto result = lines_of(*store->engine, store->engine->entries());
    *count = copy_out(result, lines, capacity);
  });
}

LMD_EXPORT int lmdecode_store_hit_entries(lmdecode_store* store, lmdecode_store_hit* hit,
                                          EntryLine* lines, uint64_t capacity, uint64_t* count) {
  return guarded([&] {
    const auto result = lines_of(*store->engine, store->engine->entries_of(hit->hit));
    *count = copy_out(result, lines, capacity);
  });
}

LMD_EXPORT int lmdecode_store_read_image(lmdecode_store* store, lmdecode_store_hit* hit,
                                         uint64_t index, uint8_t* image, uint64_t size,
                                         uint32_t* whole) {
  return guarded([&] { *whole = store->engine->read_image(hit->hit, index, {image, size}); });
}

LMD_EXPORT int lmdecode_store_insert_image(lmdecode_store* store, const Place* place,
                                           const uint8_t* key, uint8_t* image, uint64_t size,
                                           const Put* put, uint32_t* stored) {
  return guarded([&] {
    Digest digest;
    std::memcpy(digest.data(), key, digest.size());
    *stored = store->engine->insert_image(place->scope(), digest, {image, size}, put_options(*put));
  });
}

LMD_EXPORT int lmdecode_store_stats(lmdecode_store* store, StoreStats* stats) {
  return guarded([&] { *stats = store->engine->stats(); });
}

// Why the store no longer writes; the length, 0: it does.
LMD_EXPORT int lmdecode_store_failure(lmdecode_store* store, char* text, uint64_t capacity,
                                      uint64_t* size) {
  return guarded([&] {
    const std::string reason = store->engine->failure();
    *size = copy_out(std::vector<char>(reason.begin(), reason.end()), text, capacity);
  });
}

LMD_EXPORT int lmdecode_store_flush(lmdecode_store* store, uint32_t* flushed) {
  return guarded([&] { *flushed = store->engine->flush(); });
}

LMD_EXPORT int lmdecode_store_collect(lmdecode_store* store, uint64_t* dropped) {
  return guarded([&] { *dropped = store->engine->collect(); });
}

// Lines of damage, each ended by '\n'; as many as fit.
LMD_EXPORT int lmdecode_store_verify(lmdecode_store* store, ProgressFunction progress,
                                     uint64_t* entries, uint64_t* bytes, uint64_t* sessions,
                                     uint64_t* num_damaged, char* lines, uint64_t capacity) {
  return guarded([&] {
    const VerifyReport report = store->engine->verify(progress_of(progress));
    *entries = report.entries;
    *bytes = report.bytes;
    *sessions = report.sessions;
    *num_damaged = report.damage.size();
    std::string text;
    for (const std::string& line : report.damage) {
      if (text.size() + line.size() + 2 <= capacity) text += line + "\n";
    }
    std::memcpy(lines, text.c_str(), text.size() + 1);
  });
}

LMD_EXPORT int lmdecode_store_backup(lmdecode_store* store, Bytes directory,
                                     ProgressFunction progress) {
  return guarded([&] { store->engine->backup(directory.text(), progress_of(progress)); });
}

// place null: all entries and sessions.
LMD_EXPORT int lmdecode_store_export(lmdecode_store* store, Bytes path, const Place* place,
                                     Bytes session, ProgressFunction progress) {
  return guarded([&] {
    Scope scope;
    if (place != nullptr) scope = place->scope();
    store->engine->export_to(path.text(), place != nullptr ? &scope : nullptr, session.text(),
                             progress_of(progress));
  });
}

LMD_EXPORT int lmdecode_store_import(lmdecode_store* store, Bytes path, ProgressFunction progress,
                                     uint64_t* added) {
  return guarded([&] { *added = store->engine->import_from(path.text(), progress_of(progress)); });
}

LMD_EXPORT uint64_t lmdecode_store_slot_bytes(lmdecode_store* store) {
  return store->engine->layout().slot_bytes();
}

LMD_EXPORT uint32_t lmdecode_store_chunk_tokens(lmdecode_store* store) {
  return store->engine->layout().chunk_tokens;
}

// Of an entry with so many tokens; 1 to chunk_tokens.
LMD_EXPORT uint64_t lmdecode_store_image_bytes(lmdecode_store* store, uint32_t count) {
  return store->engine->layout().image_bytes(count);
}

LMD_EXPORT uint32_t lmdecode_store_crc32c(const void* data, uint64_t offset, uint64_t size,
                                          uint32_t crc) {
  return crc32c(static_cast<const uint8_t*>(data) + offset, size, crc);
}
