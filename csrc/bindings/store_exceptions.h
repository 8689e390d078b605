// What the store throws, as exceptions of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "store/store_error.h"

namespace lmdecode::store {

namespace py = pybind11;

inline py::str text_of(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

// The subclass that Python has for the number, with the whole message.
inline void set_os_error(const StoreError& error) {
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

inline void translate(const StoreError& error) {
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

}  // namespace lmdecode::store
