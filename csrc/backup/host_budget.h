// The budget of pinned host memory of this process.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>

#include "backup/available_memory.h"

namespace memsaver {

// For all arenas together.
class HostBudget {
 public:
  static constexpr std::size_t kLargestSlab = std::size_t{1} << 30;  // one registration each

  // Without a limit: until nine tenths of the machine, or of the tightest cgroup's limit, are in use.
  void set_limit(std::optional<std::size_t> bytes);
  void use_nodes_with_cpus();  // counts these nodes alone from here on: others may be memory of a GPU
  // Both throw BackupError, with the figures, if `bytes` exceed the budget. check() takes nothing.
  void check(std::size_t bytes) const;
  // As check(), and more than half of the free host memory, `idle` bytes of this process included, is refused too.
  void check_ahead(std::size_t bytes, std::size_t idle) const;
  void take(std::size_t bytes);
  void put(std::size_t bytes);
  std::size_t slab(std::size_t bytes) const;  // the size of the next slab, of `bytes` to be taken

 private:
  void check_locked(std::size_t bytes) const;
  std::size_t left_locked() const;

  mutable std::mutex mutex_;
  std::optional<std::size_t> limit_;
  HostNodes nodes_ = HostNodes::all;
  std::size_t held_ = 0;
};

}  // namespace memsaver
