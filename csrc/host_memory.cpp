#include "host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>

#include "files.h"

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

void apply(const std::string& folder, const Version& version, HostMemory& memory) {
  const auto limit = number_in(folder + "/" + version.limit);  // "max" is no number
  const auto usage = number_in(folder + "/" + version.usage);
  if (!limit || !usage || *limit >= kNoLimit / 2) return;
  const std::string stat = read_text(folder + "/memory.stat").value_or("");
  const std::size_t used = *usage - std::min(*usage, number_after(stat, version.reclaimable).value_or(0));
  memory.available = std::min(memory.available, *limit - std::min(*limit, used));
  memory.total = std::min(memory.total, *limit);
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

}  // namespace

HostMemory host_memory(const std::string& root) {
  const std::string info = read_text(root + "/proc/meminfo").value_or("");
  HostMemory memory{kNoLimit, kNoLimit};
  if (const auto available = number_after(info, "MemAvailable:")) memory.available = *available * kKiB;
  if (const auto total = number_after(info, "MemTotal:")) memory.total = *total * kKiB;
  const std::string groups = read_text(root + "/proc/self/cgroup").value_or("");
  for (const auto& [version, controllers] : {std::pair{kSecond, ""}, std::pair{kFirst, "memory"}}) {
    const auto own = cgroup_path(groups, controllers);
    if (!own) continue;
    // From the own group up to the root; within a container the path may be one that only the outside knows.
    for (std::string path = *own;;) {
      apply(root + version.mount + path, version, memory);
      if (path.empty()) break;
      path = path.substr(0, path.find_last_of('/'));
    }
  }
  return memory;
}

}  // namespace memsaver
