// How much more memory this machine has to give, and its cgroups allow.
#pragma once

#include <cstddef>
#include <string>

namespace memsaver {

struct HostMemory {
  std::size_t available;  // bytes that can be taken now without swapping or being killed
  std::size_t total;      // of the machine or of the tightest cgroup, whichever is less
};

// Both versions of cgroups, and every level above the process's own. `root`: where /proc and /sys are, for tests.
HostMemory host_memory(const std::string& root = "");

}  // namespace memsaver
