// Host memory for backups: what the machine and the process's cgroups leave, the NUMA nodes, and the budget of this
// process.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace memsaver {

struct HostMemory {
  std::size_t available;  // bytes that can be taken now without swapping or being killed
  std::size_t total;      // of the machine or of the tightest cgroup, whichever is less
  std::size_t left;  // the part of `available` until nine tenths of the machine, or of a cgroup's limit, are in use
};

enum class HostNodes { all, with_cpus };

// Reads both versions of cgroups, and all levels above the process's own. `nodes`: the NUMA nodes that count. `root`:
// the folder of /proc and /sys, for tests.
HostMemory host_memory(HostNodes nodes = HostNodes::all, const std::string& root = "");

// On some machines the memory of a GPU is a NUMA node (GH200, GB200).
//
// The nodes with CPUs: a node of GPU memory has none. `root`: the folder of /sys, for tests.
std::vector<int> nodes_with_cpus(const std::string& root = "");

// Set the node of pages that have no memory yet. Errors are ignored: some containers forbid the call.
void prefer_node(void* data, std::size_t size, int node);
void bind_to_nodes(void* data, std::size_t size, const std::vector<int>& nodes);

// Throws Error with the node if pages of the mapping that contains `data` lie on other nodes.
void check_nodes(const void* data, const std::vector<int>& nodes);

// The budget of pinned host memory, for all arenas together.
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
