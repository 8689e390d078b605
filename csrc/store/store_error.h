// The store's exceptions, by kind; wrong arguments throw std::invalid_argument.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>

namespace lmdecode::store {

enum class ErrorKind {
  kInputOutput,  // the operating system said no; has its errno
  kLocked,       // another writer holds the store
  kDamaged,      // bytes on disk are not what was written
  kMismatch,     // made for another fingerprint or with another layout
  kUnusable,     // read-only, closed, or opened by another process
};

class StoreError : public std::runtime_error {
 public:
  StoreError(ErrorKind kind, const std::string& what, int error_number = 0)
      : std::runtime_error(what), kind_(kind), error_number_(error_number) {}
  ErrorKind kind() const { return kind_; }
  int error_number() const { return error_number_; }

 private:
  ErrorKind kind_;
  int error_number_;
};

// Whether a result of -errno means that no space is left.
inline bool is_full(int error) { return error == -ENOSPC || error == -EDQUOT; }

}  // namespace lmdecode::store
