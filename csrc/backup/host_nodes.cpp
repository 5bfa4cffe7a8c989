#include "backup/host_nodes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "base/errors.h"
#include "base/files.h"

namespace memsaver {
namespace {

constexpr int kMostNodes = 1024;
constexpr int kWordBits = std::numeric_limits<unsigned long>::digits;

// Called by its number: libnuma is rarely installed.
void set_policy(void* data, std::size_t size, int mode, const std::vector<int>& nodes) {
  std::array<unsigned long, kMostNodes / kWordBits + 1> mask{};
  for (const int node : nodes)
    if (node >= 0 && node < kMostNodes) mask[static_cast<std::size_t>(node / kWordBits)] |= 1UL << node % kWordBits;
  ::syscall(SYS_mbind, data, size, mode, mask.data(), kMostNodes + 1, 0);
}

// "0-1,4" as 0, 1, 4.
std::vector<int> numbers_in(const std::string& list) {
  std::vector<int> found;
  const char* at = list.c_str();
  while (*at >= '0' && *at <= '9') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long number = first; number <= std::min<long>(last, kMostNodes - 1); ++number)
      found.push_back(static_cast<int>(number));
    at = *end == ',' ? end + 1 : end;
  }
  return found;
}

std::string text_of(const std::vector<int>& nodes) {
  std::string text;
  for (const int node : nodes) text += (text.empty() ? "" : ", ") + std::to_string(node);
  return text;
}

// The line of a mapping in numa_maps: its begin, its policy, and fields such as "N0=512" for pages on node 0.
std::string line_of(const std::string& maps, std::uintptr_t address) {
  std::size_t begin = 0, size = 0;
  for (std::size_t at = 0; at < maps.size(); at += size + 1) {
    if (std::strtoull(maps.c_str() + at, nullptr, 16) > address) break;  // they are in order
    begin = at;
    size = std::min(maps.find('\n', at), maps.size()) - at;
  }
  return maps.substr(begin, size);
}

}  // namespace

std::vector<int> nodes_with_cpus(const std::string& root) {
  return numbers_in(read_text(root + "/sys/devices/system/node/has_cpu").value_or(""));
}

void prefer_node(void* data, std::size_t size, int node) {
  constexpr int kPreferred = 1;
  if (node >= 0) set_policy(data, size, kPreferred, {node});
}

void bind_to_nodes(void* data, std::size_t size, const std::vector<int>& nodes) {
  constexpr int kBind = 2;
  set_policy(data, size, kBind, nodes);
}

// Reads a file, since many containers forbid the calls that return the node of a page.
void check_nodes(const void* data, const std::vector<int>& nodes) {
  const std::string line =
      line_of(read_whole("/proc/self/numa_maps").value_or(""), reinterpret_cast<std::uintptr_t>(data));
  bool known = false;
  for (std::size_t at = line.find(" N"); at != std::string::npos; at = line.find(" N", at + 1)) {
    char* end = nullptr;
    const auto node = static_cast<int>(std::strtol(line.c_str() + at + 2, &end, 10));
    if (*end != '=') continue;
    known = true;
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end())
      throw Error("the system put pages on node " + std::to_string(node) +
                  ", which may be memory of a GPU: only the nodes with CPUs (" + text_of(nodes) + ") can hold backups");
  }
  if (!known)
    throw Error("/proc/self/numa_maps does not list the nodes of the pages, and a node may be memory of a GPU");
}

}  // namespace memsaver
