#include "backup/host_memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "base/errors.h"
#include "base/files.h"
#include "driver/driver.h"

namespace memsaver {
namespace {

constexpr int kMostNodes = 1024;
constexpr int kWordBits = std::numeric_limits<unsigned long>::digits;
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kKiB = 1024;
constexpr std::size_t kFreePart = 10;  // a tenth stays free: Ray kills workers at 95 %
constexpr std::size_t kSharers = 16;   // processes that may take memory at the same time

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

// The number after `key` at the start of a line.
std::optional<std::size_t> number_after(const std::string& text, const std::string& key) {
  const std::size_t at = ("\n" + text).find("\n" + key);
  if (at == std::string::npos) return std::nullopt;
  return std::strtoull(text.c_str() + at + key.size(), nullptr, 10);
}

std::optional<std::size_t> number_in(const std::string& path) {
  const auto text = read_text(path);
  if (!text || text->empty() || text->find_first_not_of("0123456789\n") != std::string::npos) return std::nullopt;
  return std::strtoull(text->c_str(), nullptr, 10);
}

std::string text_of(const std::string& path) { return read_text(path).value_or(""); }

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (std::size_t end = 0; !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
    end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
  }
  return lines;
}

struct Version {
  const char* controller;
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // the key in memory.stat of file pages that the kernel drops when memory is short
};
constexpr Version kSecond = {"", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};
constexpr Version kFirst = {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                            "total_inactive_file "};

// The path of this process's cgroup in a hierarchy: lines are "number:controllers:path", the second version's
// "0::path".
std::optional<std::string> cgroup_path(const std::string& groups, const Version& version) {
  for (const std::string_view line : lines_of(groups)) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string names = "," + std::string(line.substr(first + 1, second - first - 1)) + ",";
    const std::string wanted = "," + std::string(version.controller) + ",";
    if (names == wanted || (*version.controller != '\0' && names.find(wanted) != std::string::npos))
      return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

// The bytes of a limit that are left until nine tenths of `total` are in use.
std::size_t left_of(std::size_t available, std::size_t total) {
  return available - std::min(available, total / kFreePart);
}

std::size_t left_in_cgroup(const std::string& folder, const Version& version) {
  const auto limit = number_in(folder + "/" + version.limit);  // "max" is no number
  const auto usage = number_in(folder + "/" + version.usage);
  if (!limit || !usage || *limit >= kNoLimit / 2) return kNoLimit;
  const std::size_t reclaimable = number_after(text_of(folder + "/memory.stat"), version.reclaimable).value_or(0);
  return left_of(*limit - std::min(*limit, *usage - std::min(*usage, reclaimable)), *limit);
}

// The memory of these nodes. As in MemAvailable, pages of files count as available, since the kernel drops them when
// memory is short.
std::size_t left_on_nodes(const std::vector<int>& nodes, std::size_t machine_has, const std::string& root) {
  std::size_t available = 0, total = 0;
  for (const int node : nodes) {
    const std::string name = std::to_string(node);
    const std::string info = text_of(root + "/sys/devices/system/node/node" + name + "/meminfo");
    const auto figure = [&](const char* key) {
      return number_after(info, "Node " + name + " " + key + ":").value_or(0) * kKiB;
    };
    total += figure("MemTotal");
    available += figure("MemFree") + figure("Active(file)") + figure("Inactive(file)");
  }
  return left_of(std::min(available, machine_has), total);
}

std::string text(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

std::size_t host_memory_left(bool nodes_with_cpus_alone, const std::string& process, const std::string& root) {
  const std::string info = text_of(root + "/proc/meminfo");
  const auto available = number_after(info, "MemAvailable:"), total = number_after(info, "MemTotal:");
  std::size_t left = available && total ? left_of(*available * kKiB, *total * kKiB) : kNoLimit;
  if (nodes_with_cpus_alone) left = left_on_nodes(nodes_with_cpus(), available ? *available * kKiB : kNoLimit, root);
  // In version 1 the file has a line for each controller. With the long paths of containers it exceeds a page.
  const std::string groups = read_text(root + "/proc/" + process + "/cgroup", kNoLimit).value_or("");
  for (const Version& version : {kSecond, kFirst}) {
    const auto own = cgroup_path(groups, version);
    if (!own) continue;
    // From the process's own group up to the root. In a container the path may not exist; the root always does.
    for (std::string path = *own;; path = path.substr(0, path.find_last_of('/'))) {
      left = std::min(left, left_in_cgroup(root + version.mount + path, version));
      if (path.empty()) break;
    }
  }
  return left;
}

std::vector<int> nodes_with_cpus() { return numbers_in(text_of("/sys/devices/system/node/has_cpu")); }

void prefer_node(void* data, std::size_t size, int node) {
  constexpr int kPreferred = 1;
  if (node >= 0) set_policy(data, size, kPreferred, {node});
}

void bind_to_nodes(void* data, std::size_t size, const std::vector<int>& nodes) {
  constexpr int kBind = 2;
  set_policy(data, size, kBind, nodes);
}

// Reads a file, since many containers forbid the calls that return the node of a page. A line has the begin of a
// mapping, its policy, and fields such as "N0=512" for pages on node 0.
void check_nodes(const void* data, const std::vector<int>& nodes) {
  const std::string maps = read_text("/proc/self/numa_maps", kNoLimit).value_or("");
  std::string found;
  for (const std::string_view each : lines_of(maps)) {
    const std::string line(each);
    if (std::strtoull(line.c_str(), nullptr, 16) > reinterpret_cast<std::uintptr_t>(data)) break;  // they are in order
    found = line;
  }
  bool known = false;
  for (std::size_t at = found.find(" N"); at != std::string::npos; at = found.find(" N", at + 1)) {
    char* end = nullptr;
    const auto node = static_cast<int>(std::strtol(found.c_str() + at + 2, &end, 10));
    if (*end != '=') continue;
    known = true;
    if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) continue;
    std::string with_cpus;
    for (const int each : nodes) with_cpus += (with_cpus.empty() ? "" : ", ") + std::to_string(each);
    throw Error("the system put pages on node " + std::to_string(node) +
                ", which may be memory of a GPU: only the nodes with CPUs (" + with_cpus + ") can hold backups");
  }
  if (!known)
    throw Error("/proc/self/numa_maps does not list the nodes of the pages, and a node may be memory of a GPU");
}

std::size_t HostBudget::left_locked() const {
  return limit_ ? *limit_ - std::min(*limit_, held_) : host_memory_left(nodes_with_cpus_);
}

void HostBudget::check_locked(std::size_t bytes) const {
  const std::size_t left = left_locked();
  if (bytes <= left) return;
  const std::string why = limit_ ? "host_limit is " + text(*limit_)
                                 : text(left) +
                                       " can be taken until nine tenths of the machine, or of the limit of "
                                       "one of its cgroups, are in use";
  throw BackupError("a backup needs " + text(bytes) + " more of pinned host memory; this process holds " + text(held_) +
                        ", and " + why,
                    bytes, held_, left, true);
}

std::size_t HostBudget::slab(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  bytes = std::min(bytes, kLargestSlab);
  if (limit_) return bytes;
  // Other processes may take memory at the same time: near the limit each takes a small part of the rest.
  return std::min(bytes, std::max(kPage, left_locked() / kSharers / kPage * kPage));
}

}  // namespace memsaver
