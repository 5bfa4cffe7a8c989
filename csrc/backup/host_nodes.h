// The NUMA nodes of host memory. On some machines the memory of a GPU is one of them (GH200, GB200).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace memsaver {

// The nodes with CPUs: a node of GPU memory has none. `root`: the folder of /sys, for tests.
std::vector<int> nodes_with_cpus(const std::string& root = "");

// Set the node of pages that have no memory yet. Errors are ignored: some containers forbid the call.
void prefer_node(void* data, std::size_t size, int node);
void bind_to_nodes(void* data, std::size_t size, const std::vector<int>& nodes);

// Throws Error with the node if pages of the mapping that contains `data` lie on other nodes.
void check_nodes(const void* data, const std::vector<int>& nodes);

}  // namespace memsaver
