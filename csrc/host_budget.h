// How much pinned host memory this process may hold.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>

namespace memsaver {

// Of all arenas together.
class HostBudget {
 public:
  static constexpr std::size_t kLargestSlab = std::size_t{1} << 30;  // one registration each

  // Without a limit: what machine and cgroups have available when it is asked for, less a reserve.
  void set_limit(std::optional<std::size_t> bytes);
  // Both throw BackupError, naming the figures, where it would be too much. check() asks and takes nothing.
  void check(std::size_t bytes) const;
  void take(std::size_t bytes);
  void put(std::size_t bytes);
  std::size_t slab(std::size_t bytes) const;  // how much of so many bytes to take at a time

 private:
  void check_locked(std::size_t bytes) const;
  std::size_t left_locked() const;

  mutable std::mutex mutex_;
  std::optional<std::size_t> limit_;
  std::size_t held_ = 0;
};

}  // namespace memsaver
