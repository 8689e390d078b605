// lmdecode._store: the store for Python. Tensors arrive as addresses and strides, token ids as
// buffers of int32; torch is not used. python/lmdecode/_store.pyi has the types.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/interpreter_lock.h"
#include "store/crc32c.h"
#include "store/store_engine.h"
#include "store/store_error.h"

namespace lmdecode::store {
namespace {

namespace py = pybind11;

py::str text_of(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

// Raises the subclass of OSError for the number, with the whole message.
void set_os_error(const StoreError& error) {
  const int number = error.error_number();
  const py::object type = py::reinterpret_borrow<py::object>(PyExc_OSError);
  if (number == 0) {
    PyErr_SetObject(type.ptr(), text_of(error.what()).ptr());
    return;
  }
  const std::string what = std::string(error.what()) + " (" + std::strerror(number) + ")";
  const py::object raised = type(number, text_of(what));
  PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
}

void translate(const StoreError& error) {
  const char* name = "StoreError";
  switch (error.kind()) {
    case ErrorKind::kInputOutput:
      set_os_error(error);
      return;
    case ErrorKind::kLocked:
      name = "StoreLockedError";
      break;
    case ErrorKind::kDamaged:
      name = "StoreDamagedError";
      break;
    case ErrorKind::kMismatch:
      name = "FingerprintMismatchError";
      break;
    case ErrorKind::kUnusable:
      break;
  }
  const py::object type = py::module_::import("lmdecode.store.errors").attr(name);
  PyErr_SetObject(type.ptr(), text_of(error.what()).ptr());
}

using bindings::interruptible, bindings::Interruption, bindings::unlocked;

// ---- arguments

// The bytes of an object that has the buffer protocol, side by side.
class Buffer {
 public:
  explicit Buffer(py::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::span<uint8_t> bytes() const {
    return {static_cast<uint8_t*>(view_.buf), static_cast<size_t>(view_.len)};
  }
  std::span<const int32_t> tokens() const {
    if (view_.len % sizeof(int32_t) != 0) {
      throw std::invalid_argument("KVStore: tokens has " + std::to_string(view_.len) +
                                  " bytes; expected int32 token ids, 4 bytes each");
    }
    return {static_cast<const int32_t*>(view_.buf),
            static_cast<size_t>(view_.len) / sizeof(int32_t)};
  }

 private:
  Py_buffer view_{};
};

py::bytes bytes_of(const Digest& digest) {
  return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// Python's handle of an engine object. It is released without the lock, as the engine may have to
// wait; calls that are under way in other threads keep it until they are done.
template <class T>
class Handle {
 public:
  explicit Handle(std::shared_ptr<T> value) : value_(std::move(value)) {}
  ~Handle() { release(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  void release() {
    std::shared_ptr<T> gone = std::exchange(value_, nullptr);
    unlocked([&] { gone.reset(); });
  }
  // Null: it was released.
  std::shared_ptr<T> share() const { return value_; }

 private:
  std::shared_ptr<T> value_;
};

using HeldHit = Handle<Hit>;
using Planes = std::vector<TensorPlane>;

std::unique_ptr<HeldHit> held(Hit hit) {
  if (hit.num_tokens() == 0) return nullptr;
  return std::make_unique<HeldHit>(std::make_shared<Hit>(std::move(hit)));
}

// The engine as Python calls it.
class Store {
 public:
  explicit Store(const StoreOptions& options)
      : engine_(unlocked([&] { return StoreEngine::open(options); })) {}

  StoreEngine& engine() const { return *engine_.share(); }
  void close() {
    unlocked([&] { engine().close(); });
  }

  // --- prefixes

  std::unique_ptr<HeldHit> lookup(const Scope& scope, const py::object& tokens) {
    const Buffer buffer(tokens);
    return held(unlocked([&] { return engine().lookup(scope, buffer.tokens()); }));
  }
  std::unique_ptr<HeldHit> peek(const Scope& scope, const py::object& tokens) {
    const Buffer buffer(tokens);
    return held(unlocked([&] { return engine().peek(scope, buffer.tokens()); }));
  }
  bool load(HeldHit& hit, uint32_t first_layer, uint32_t num_layers, const Planes& planes) {
    std::shared_ptr<Hit> shared = hit.share();
    return interruptible(py::none(), [&](Interruption& interruption) {
      const std::shared_ptr<Hit> mine = std::move(shared);
      return mine != nullptr && engine().load(*mine, first_layer, num_layers, planes,
                                              [&] { return interruption.goes_on(0, 0); });
    });
  }
  uint64_t put(const Scope& scope, const py::object& tokens, const Planes& planes,
               const PutOptions& options) {
    const Buffer buffer(tokens);
    return interruptible(py::none(), [&](Interruption& interruption) {
      return engine().put(scope, buffer.tokens(), planes, with(options, interruption));
    });
  }
  void pin(HeldHit& hit, bool pinned) {
    std::shared_ptr<Hit> shared = hit.share();
    unlocked([&] {
      const std::shared_ptr<Hit> mine = std::move(shared);
      if (mine != nullptr) engine().pin(*mine, pinned);
    });
  }
  py::bytes key(const Scope& scope, const py::object& tokens) {
    const Buffer buffer(tokens);
    return bytes_of(unlocked([&] {
      return prefix_key(engine().root(scope), buffer.tokens(), engine().layout().chunk_tokens);
    }));
  }

  // --- sessions

  std::optional<py::bytes> read_session(const Scope& scope, const std::string& name) {
    const auto tokens = unlocked([&] { return engine().read_session(scope, name); });
    if (!tokens.has_value()) return std::nullopt;
    return py::bytes(reinterpret_cast<const char*>(tokens->data()), 4 * tokens->size());
  }
  uint64_t commit_session(const Scope& scope, const std::string& name, const py::object& tokens,
                          uint64_t num_computed, const Planes& planes, const PutOptions& options) {
    const Buffer buffer(tokens);
    return interruptible(py::none(), [&](Interruption& interruption) {
      return engine().commit_session(scope, name, buffer.tokens(), num_computed, planes,
                                     with(options, interruption));
    });
  }
  bool write_session(const Scope& scope, const std::string& name, const py::object& tokens) {
    const Buffer buffer(tokens);
    return unlocked([&] { return engine().write_session(scope, name, buffer.tokens()); });
  }
  bool remove_session(const Scope& scope, const std::string& name) {
    return unlocked([&] { return engine().remove_session(scope, name); });
  }
  uint64_t erase(const Scope& scope, const py::object& tokens,
                 const std::optional<std::string>& session) {
    const auto ids = ids_of(tokens);
    return unlocked([&] {
      return engine().erase(scope, ids ? &*ids : nullptr, session ? &*session : nullptr);
    });
  }
  std::vector<bool> erases(const Scope& scope, const py::object& tokens,
                           const std::optional<std::string>& session, const py::list& images) {
    const auto ids = ids_of(tokens);
    std::vector<std::vector<uint8_t>> headers;
    for (const py::handle image : images) {
      const Buffer buffer(image);
      headers.emplace_back(buffer.bytes().begin(), buffer.bytes().end());
    }
    return unlocked([&] {
      return engine().erases(scope, ids ? &*ids : nullptr, session ? &*session : nullptr, headers);
    });
  }
  py::list roots(const Scope& scope) {
    py::list result;
    for (const Digest& root : unlocked([&] { return engine().roots(scope); })) {
      result.append(bytes_of(root));
    }
    return result;
  }
  std::vector<std::pair<py::str, uint64_t>> sessions() {
    std::vector<std::pair<py::str, uint64_t>> result;
    for (const SessionRow& row : unlocked([&] { return engine().list_sessions(); })) {
      result.emplace_back(text_of(row.name), row.unchanged);
    }
    return result;
  }

  // --- whole entries

  py::list entries() {
    return listed(unlocked([&] { return engine().entries(); }));
  }
  py::list entries_of(HeldHit& hit) {
    std::shared_ptr<Hit> shared = hit.share();
    return listed(unlocked([&] {
      const std::shared_ptr<Hit> mine = std::move(shared);
      return mine != nullptr ? engine().entries_of(*mine) : std::vector<AreaRow>();
    }));
  }
  std::optional<py::bytes> read_image(HeldHit& hit, size_t index) {
    std::shared_ptr<Hit> shared = hit.share();
    if (shared == nullptr) return std::nullopt;
    if (index >= shared->parts().size()) throw py::index_error("read_image: no such entry");
    const HitPart& part = shared->parts()[index];
    const uint64_t size = engine().layout().image_bytes(part.count, part.usable_from);
    py::bytes image(nullptr, size);  // nobody else sees it before it is filled
    auto* data = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(image.ptr()));
    const bool is_whole = unlocked([&] {
      const std::shared_ptr<Hit> mine = std::move(shared);
      return engine().read_image(*mine, index, {data, size});
    });
    return is_whole ? std::optional(image) : std::nullopt;
  }
  bool insert_image(const Scope& scope, const py::bytes& key, const py::object& image,
                    const PutOptions& options) {
    Digest digest;
    const std::string_view bytes = key;
    if (bytes.size() != digest.size())
      throw std::invalid_argument("insert_image: key has " + std::to_string(bytes.size()) +
                                  " bytes; expected 32");
    std::memcpy(digest.data(), bytes.data(), digest.size());
    const Buffer buffer(image, PyBUF_WRITABLE);
    return unlocked([&] { return engine().insert_image(scope, digest, buffer.bytes(), options); });
  }

  // --- upkeep

  py::dict stats() {
    const StoreStats stats = unlocked([&] { return engine().stats(); });
#define LMD_STAT(name) std::pair(#name, stats.name)
    py::dict result;
    for (const auto& [name, value] :
         {LMD_STAT(entries), LMD_STAT(sessions), LMD_STAT(capacity_areas), LMD_STAT(used_areas),
          LMD_STAT(idle_areas), LMD_STAT(freed_areas), LMD_STAT(unusable_areas),
          LMD_STAT(slot_bytes), LMD_STAT(chunk_tokens), LMD_STAT(hits), LMD_STAT(misses),
          LMD_STAT(puts), LMD_STAT(declined), LMD_STAT(evicted), LMD_STAT(expired),
          LMD_STAT(damaged), LMD_STAT(bytes_written), LMD_STAT(bytes_read), LMD_STAT(commits)}) {
      result[name] = value;
    }
#undef LMD_STAT
    return result;
  }
  py::str failure() {
    return text_of(unlocked([&] { return engine().failure(); }));
  }
  bool flush() {
    return unlocked([&] { return engine().flush(); });
  }
  uint64_t collect() {
    return unlocked([&] { return engine().collect(); });
  }
  std::optional<int64_t> oldest_use() {
    return unlocked([&] { return engine().oldest_use(); });
  }
  uint64_t give_space_back(uint64_t bytes, int64_t used_until_ms) {
    return unlocked([&] { return engine().give_space_back(bytes, used_until_ms); });
  }
  py::tuple verify(const py::object& progress) {
    const VerifyReport report = interruptible(progress, [&](Interruption& interruption) {
      return engine().verify(progress_of(interruption));
    });
    py::list damage;
    for (const std::string& line : report.damage) damage.append(text_of(line));
    return py::make_tuple(report.entries, report.bytes, report.sessions, damage);
  }
  void backup(const std::string& directory, const py::object& progress) {
    interruptible(progress, [&](Interruption& interruption) {
      engine().backup(directory, progress_of(interruption));
      return true;
    });
  }
  void export_to(const std::string& path, const Scope* scope, const std::string& session,
                 const py::object& progress) {
    interruptible(progress, [&](Interruption& interruption) {
      engine().export_to(path, scope, session, progress_of(interruption));
      return true;
    });
  }
  uint64_t import_from(const std::string& path, const py::object& progress) {
    return interruptible(progress, [&](Interruption& interruption) {
      return engine().import_from(path, progress_of(interruption));
    });
  }

 private:
  static std::optional<std::vector<int32_t>> ids_of(const py::object& tokens) {
    if (tokens.is_none()) return std::nullopt;
    const Buffer buffer(tokens);
    return std::vector<int32_t>(buffer.tokens().begin(), buffer.tokens().end());
  }
  static PutOptions with(PutOptions options, Interruption& interruption) {
    options.goes_on = [&] { return interruption.goes_on(0, 0); };
    return options;
  }
  static Progress progress_of(Interruption& interruption) {
    return [&](uint64_t done, uint64_t total) { return interruption.goes_on(done, total); };
  }
  py::list listed(const std::vector<AreaRow>& rows) {
    py::list result;
    for (const AreaRow& row : rows) {
      py::dict entry;
      entry["num_tokens"] = row.num_tokens;
      entry["area"] = row.area;
      entry["tenant"] = row.tenant;
      entry["bytes"] = engine().layout().image_bytes(row.count, row.usable_from);
      entry["created_ms"] = row.created_ms;
      entry["used_ms"] = row.used_ms;
      entry["expires_ms"] = row.expires_ms;
      entry["count"] = row.count;
      entry["pinned"] = int{row.pinned};
      entry["key"] = bytes_of(row.key);
      result.append(std::move(entry));
    }
    return result;
  }

  Handle<StoreEngine> engine_;
};

std::unique_ptr<Store> open_store(const std::string& directory, const std::string& fingerprint,
                                  uint32_t num_layers, uint32_t num_kv_heads, uint32_t head_size,
                                  uint32_t element_size, const std::vector<uint32_t>& windows,
                                  uint64_t state_bytes, uint32_t chunk_tokens,
                                  bool values_by_column, bool relaxed, bool readonly,
                                  uint64_t capacity_bytes, uint64_t slab_bytes,
                                  int64_t flush_interval_ms, int64_t idle_ms, int io_threads) {
  StoreOptions options;
  options.directory = directory;
  options.fingerprint = fingerprint;
  options.shape = {num_layers, num_kv_heads, head_size, element_size, windows, state_bytes};
  options.chunk_tokens = chunk_tokens;
  options.values_by_column = values_by_column;
  options.relaxed = relaxed;
  options.readonly = readonly;
  options.capacity_bytes = capacity_bytes;
  options.slab_bytes = slab_bytes;
  options.flush_interval_ms = flush_interval_ms;
  options.idle_ms = idle_ms;
  options.io_threads = io_threads;
  return std::make_unique<Store>(options);
}

}  // namespace

PYBIND11_MODULE(_store, module) {
  using py::arg;
  module.doc() = "The KV store; lmdecode.store is its public face.";
  bindings::Unlocked::watch_the_end();
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StoreError& error) {
      translate(error);
    }
  });

  py::class_<Scope>(module, "Scope", "Tenant and context: what prefixes share that may meet.")
      .def(py::init([](const py::bytes& salt, const py::bytes& context) {
             return Scope{salt, context};
           }),
           arg("salt"), arg("context"))
      .def_property_readonly("salt", [](const Scope& scope) { return py::bytes(scope.salt); })
      .def_property_readonly("context",
                             [](const Scope& scope) { return py::bytes(scope.context); });

  py::class_<PutOptions>(module, "PutOptions", "How long, and at whose cost, something is stored.")
      .def(py::init([](int64_t ttl_ms, uint64_t quota_bytes, bool pin) {
             return PutOptions{ttl_ms, pin, quota_bytes, {}};
           }),
           arg("ttl_ms"), arg("quota_bytes"), arg("pin"))
      .def_readonly("ttl_ms", &PutOptions::ttl_ms)
      .def_readonly("quota_bytes", &PutOptions::quota_bytes)
      .def_readonly("pin", &PutOptions::pin);

  py::class_<TensorPlane>(module, "Plane",
                          "Keys or values of a layer, [num_kv_heads, num_tokens, head_size], in "
                          "memory that the caller keeps; strides in bytes.")
      .def(py::init([](uintptr_t address, int64_t head_stride, int64_t token_stride,
                       int64_t element_stride, uint64_t num_tokens) {
             return TensorPlane{reinterpret_cast<char*>(address),
                                {head_stride, token_stride, element_stride},
                                num_tokens};
           }),
           arg("address"), arg("head_stride"), arg("token_stride"), arg("element_stride"),
           arg("num_tokens"));

  py::class_<HeldHit>(
      module, "Hit",
      "A prefix that was found. It is not evicted while this lives; after release() "
      "it is a miss.")
      .def_property_readonly("num_tokens",
                             [](const HeldHit& hit) {
                               const std::shared_ptr<Hit> shared = hit.share();
                               return shared == nullptr ? 0 : shared->num_tokens();
                             })
      .def("release", &HeldHit::release);

  py::class_<Store>(module, "Store", "An open store.")
      .def(py::init(&open_store), py::kw_only(), arg("directory"), arg("fingerprint"),
           arg("num_layers"), arg("num_kv_heads"), arg("head_size"), arg("element_size"),
           arg("windows"), arg("state_bytes"), arg("chunk_tokens"), arg("values_by_column"),
           arg("relaxed"), arg("readonly"), arg("capacity_bytes"), arg("slab_bytes"),
           arg("flush_interval_ms"), arg("idle_ms"), arg("io_threads"))
      .def("close", &Store::close)
      .def_property_readonly("slot_bytes",
                             [](Store& store) { return store.engine().layout().slot_bytes(); })
      .def_property_readonly("chunk_tokens",
                             [](Store& store) { return store.engine().layout().chunk_tokens; })
      .def_property_readonly("values_by_column",
                             [](Store& store) { return store.engine().layout().values_by_column; })
      .def(
          "header_bytes",
          [](Store& store, uint32_t count) { return store.engine().layout().header_bytes(count); },
          arg("count"))
      .def(
          "image_bytes",
          [](Store& store, uint32_t count, bool with_state) {
            return store.engine().layout().image_bytes(count, with_state ? 0 : count + 1);
          },
          arg("count"), arg("with_state") = true,
          "Of an entry with so many tokens, 1 to chunk_tokens; a state counts where there are any.")
      .def("lookup", &Store::lookup, arg("scope"), arg("tokens"))
      .def("peek", &Store::peek, arg("scope"), arg("tokens"))
      .def("load", &Store::load, arg("hit"), arg("first_layer"), arg("num_layers"), arg("planes"))
      .def("put", &Store::put, arg("scope"), arg("tokens"), arg("planes"), arg("options"))
      .def("pin", &Store::pin, arg("hit"), arg("pinned"))
      .def("key", &Store::key, arg("scope"), arg("tokens"))
      .def("read_session", &Store::read_session, arg("scope"), arg("name"))
      .def("commit_session", &Store::commit_session, arg("scope"), arg("name"), arg("tokens"),
           arg("num_computed"), arg("planes"), arg("options"))
      .def("write_session", &Store::write_session, arg("scope"), arg("name"), arg("tokens"))
      .def("remove_session", &Store::remove_session, arg("scope"), arg("name"))
      .def("erase", &Store::erase, arg("scope"), arg("tokens"), arg("session"))
      .def("erases", &Store::erases, arg("scope"), arg("tokens"), arg("session"), arg("images"))
      .def("roots", &Store::roots, arg("scope"))
      .def("sessions", &Store::sessions)
      .def("entries", &Store::entries)
      .def("entries_of", &Store::entries_of, arg("hit"))
      .def("read_image", &Store::read_image, arg("hit"), arg("index"))
      .def("insert_image", &Store::insert_image, arg("scope"), arg("key"), arg("image"),
           arg("options"))
      .def("stats", &Store::stats)
      .def("failure", &Store::failure)
      .def("flush", &Store::flush)
      .def("collect", &Store::collect)
      .def("oldest_use", &Store::oldest_use)
      .def("give_space_back", &Store::give_space_back, arg("num_bytes"), arg("used_until_ms"))
      .def("verify", &Store::verify, arg("progress"))
      .def("backup", &Store::backup, arg("directory"), arg("progress"))
      .def("export_to", &Store::export_to, arg("path"), arg("scope"), arg("session"),
           arg("progress"))
      .def("import_from", &Store::import_from, arg("path"), arg("progress"));

  module.def(
      "crc32c",
      [](const py::object& data, uint32_t crc) {
        const Buffer buffer(data);
        return unlocked([&] { return crc32c(buffer.bytes().data(), buffer.bytes().size(), crc); });
      },
      arg("data"), arg("crc") = 0);
}

}  // namespace lmdecode::store
