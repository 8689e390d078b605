// SQLite's way to a simulated disk.
#pragma once

#include <sqlite3.h>

#include <string>

#include "simulated_disk.h"

namespace lmdecode::store {

struct SimulatedVfs {
  explicit SimulatedVfs(SimulatedDisk& disk);
  ~SimulatedVfs();
  SimulatedVfs(const SimulatedVfs&) = delete;
  SimulatedVfs& operator=(const SimulatedVfs&) = delete;

  const std::string& name() const { return name_; }

 private:
  std::string name_;
  sqlite3_vfs vfs_;
};

}  // namespace lmdecode::store
