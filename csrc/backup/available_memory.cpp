#include "backup/available_memory.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include "backup/host_nodes.h"
#include "base/files.h"

namespace memsaver {
namespace {

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

}  // namespace

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

}  // namespace memsaver
