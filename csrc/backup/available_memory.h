// The memory that is available on this machine, within the limits of the process's cgroups.
#pragma once

#include <cstddef>
#include <string>

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

}  // namespace memsaver
