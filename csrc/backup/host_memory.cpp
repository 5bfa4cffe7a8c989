#include "backup/host_memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "base/errors.h"
#include "base/files.h"
#include "driver/driver.h"

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

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kKiB = 1024;

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

struct Version {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // the key in memory.stat of file pages that the kernel drops when memory is short
};
constexpr Version kSecond = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};
constexpr Version kFirst = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                            "total_inactive_file "};

constexpr std::size_t kFreePart = 10;  // a tenth stays free: Ray kills workers at 95 %

// Applies one limit: the minimum of each figure counts.
void apply(std::size_t available, std::size_t total, HostMemory& memory) {
  memory.available = std::min(memory.available, available);
  memory.total = std::min(memory.total, total);
  memory.left = std::min(memory.left, available - std::min(available, total / kFreePart));
}

void apply_cgroup(const std::string& folder, const Version& version, HostMemory& memory) {
  const auto limit = number_in(folder + "/" + version.limit);  // "max" is no number
  const auto usage = number_in(folder + "/" + version.usage);
  if (!limit || !usage || *limit >= kNoLimit / 2) return;
  const std::string stat = read_text(folder + "/memory.stat").value_or("");
  const std::size_t used = *usage - std::min(*usage, number_after(stat, version.reclaimable).value_or(0));
  apply(*limit - std::min(*limit, used), *limit, memory);
}

// The path of this process's cgroup in a hierarchy: lines are "number:controllers:path", the second version's
// "0::path".
std::optional<std::string> cgroup_path(const std::string& lines, const std::string& controllers) {
  for (std::size_t begin = 0; begin < lines.size();) {
    const std::size_t end = std::min(lines.find('\n', begin), lines.size());
    const std::string line = lines.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names == "," + controllers + "," ||
        (!controllers.empty() && names.find("," + controllers + ",") != std::string::npos))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

// The memory of these nodes. As in MemAvailable, pages of files count as available, since the kernel drops them when
// memory is short.
void apply_nodes(const std::vector<int>& nodes, std::size_t machine_has, const std::string& root, HostMemory& memory) {
  std::size_t available = 0, total = 0;
  for (const int node : nodes) {
    const std::string name = std::to_string(node);
    const std::string info = read_text(root + "/sys/devices/system/node/node" + name + "/meminfo").value_or("");
    const auto figure = [&](const char* key) {
      return number_after(info, "Node " + name + " " + key + ":").value_or(0) * kKiB;
    };
    total += figure("MemTotal");
    available += figure("MemFree") + figure("Active(file)") + figure("Inactive(file)");
  }
  apply(std::min(available, machine_has), total, memory);
}

constexpr std::size_t kSharers = 16;  // processes that may take memory at the same time

std::string text(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

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

HostMemory host_memory(HostNodes nodes, const std::string& root) {
  const std::string info = read_text(root + "/proc/meminfo").value_or("");
  HostMemory memory{kNoLimit, kNoLimit, kNoLimit};
  const auto available = number_after(info, "MemAvailable:"), total = number_after(info, "MemTotal:");
  if (nodes == HostNodes::with_cpus)
    apply_nodes(nodes_with_cpus(root), available ? *available * kKiB : kNoLimit, root, memory);
  else if (available && total)
    apply(*available * kKiB, *total * kKiB, memory);
  const std::string groups = read_text(root + "/proc/self/cgroup").value_or("");
  for (const auto& [version, controllers] : {std::pair{kSecond, ""}, std::pair{kFirst, "memory"}}) {
    const auto own = cgroup_path(groups, controllers);
    if (!own) continue;
    // From the process's own group up to the root. In a container the path may not exist; the root always does.
    for (std::string path = *own;;) {
      apply_cgroup(root + version.mount + path, version, memory);
      if (path.empty()) break;
      path = path.substr(0, path.find_last_of('/'));
    }
  }
  return memory;
}

void HostBudget::set_limit(std::optional<std::size_t> bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void HostBudget::use_nodes_with_cpus() {
  std::lock_guard lock(mutex_);
  nodes_ = HostNodes::with_cpus;
}

void HostBudget::check(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
}

void HostBudget::check_ahead(std::size_t bytes, std::size_t idle) const {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
  const std::size_t left = host_memory(nodes_).left;
  if (2 * bytes + idle > left) throw BackupError("half of the free host memory is in use", bytes, held_, left, true);
}

// The bytes that can be taken beyond held_.
std::size_t HostBudget::left_locked() const {
  if (limit_) return *limit_ - std::min(*limit_, held_);
  return host_memory(nodes_).left;
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

void HostBudget::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
  held_ += bytes;
}

void HostBudget::put(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  held_ -= bytes;
}

}  // namespace memsaver
