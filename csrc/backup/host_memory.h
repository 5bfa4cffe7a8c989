// Host memory for backups: what the machine and the process's cgroups leave, the NUMA nodes, and the budget of this
// process.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace memsaver {

// The bytes that can be taken until nine tenths of the machine, or of the limit of one of its cgroups, are in use.
// Reads both versions of cgroups, and all levels above the process's own. `nodes_with_cpus_alone`: only these NUMA
// nodes count. `process`: its pid, or "self"; `root`: the folder above /proc and /sys.
std::size_t host_memory_left(bool nodes_with_cpus_alone, const std::string& process = "self",
                             const std::string& root = "");

// The NUMA nodes with CPUs. On some machines the memory of a GPU is a node (GH200, GB200), which has none.
std::vector<int> nodes_with_cpus();

// Set the node of pages that have no memory yet. Errors are ignored: some containers forbid the call.
void prefer_node(void* data, std::size_t size, int node);
void bind_to_nodes(void* data, std::size_t size, const std::vector<int>& nodes);

// Throws Error with the node if pages of the mapping that contains `data` lie on other nodes.
void check_nodes(const void* data, const std::vector<int>& nodes);

// The budget of pinned host memory, for all arenas together.
class HostBudget {
 public:
  static constexpr std::size_t kLargestSlab = std::size_t{1} << 30;  // one registration each

  // Without a limit: the bytes of host_memory_left().
  void set_limit(std::optional<std::size_t> bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  void use_nodes_with_cpus() {  // counts these nodes alone from here on: others may be memory of a GPU
    std::lock_guard lock(mutex_);
    nodes_with_cpus_ = true;
  }
  // Both throw BackupError, with the figures, if `bytes` exceed the budget. check() takes nothing.
  void check(std::size_t bytes) const {
    std::lock_guard lock(mutex_);
    check_locked(bytes);
  }
  void take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    check_locked(bytes);
    held_ += bytes;
  }
  void put(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    held_ -= bytes;
  }
  std::size_t slab(std::size_t bytes) const;  // the size of the next slab, of `bytes` to be taken

 private:
  void check_locked(std::size_t bytes) const;
  std::size_t left_locked() const;  // beyond held_

  mutable std::mutex mutex_;
  std::optional<std::size_t> limit_;
  bool nodes_with_cpus_ = false;
  std::size_t held_ = 0;
};

}  // namespace memsaver
