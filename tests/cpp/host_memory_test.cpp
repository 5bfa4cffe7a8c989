#include "backup/host_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <map>

#include "base/files.h"
#include "support.h"

namespace memsaver {
namespace {

using test::kGiB;

constexpr std::size_t kNone = ~std::size_t{0};
using Files = std::map<std::string, std::string>;

Files given;  // of /proc and /sys

int open_given(const char* path, int) {
  const auto found = given.find(path + 1);
  errno = ENOENT;
  if (found == given.end()) return -1;
  const int file = ::memfd_create("given", 0);
  CHECK(::pwrite(file, found->second.data(), found->second.size(), 0) >= 0);
  return file;
}

std::size_t left(const std::vector<Files>& files, bool nodes_with_cpus_alone = false) {
  given.clear();
  for (const Files& each : files) given.insert(each.begin(), each.end());
  const auto system = std::exchange(file_calls().open, &open_given);
  const std::size_t found = host_memory_left(nodes_with_cpus_alone);
  file_calls().open = system;
  return found;
}

std::string kib(std::size_t bytes) { return std::to_string(bytes / 1024) + " kB\n"; }
std::size_t without_a_tenth(std::size_t available, std::size_t total) { return available - total / 10; }

Files machine(std::size_t total, std::size_t available) {
  return {{"proc/meminfo", "MemTotal:   " + kib(total) + "MemFree: 100 kB\nMemAvailable: " + kib(available)}};
}

Files second(const std::string& group, const std::string& limit, std::size_t usage, std::size_t inactive = 0) {
  const std::string folder = "sys/fs/cgroup" + group;
  return {{folder + "/memory.max", limit + "\n"},
          {folder + "/memory.current", std::to_string(usage) + "\n"},
          {folder + "/memory.stat", "anon 4096\ninactive_file " + std::to_string(inactive) + "\nactive_file 5\n"}};
}

Files first(const std::string& group, std::size_t limit, std::size_t usage, std::size_t inactive = 0) {
  const std::string folder = "sys/fs/cgroup/memory" + group;
  return {{folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n"},
          {folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n"},
          {folder + "/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(inactive) + "\n"}};
}

std::string gib(std::size_t count) { return std::to_string(count * kGiB); }

TEST_CASE("host memory: the machine and each of the process's cgroups keep a tenth") {
  const Files large = machine(8 * kGiB, 4 * kGiB);
  const Files in_second = {{"proc/self/cgroup", "0::/pod/box\n"}};
  const Files in_first = {{"proc/self/cgroup", "5:name=systemd:/elsewhere\n4:cpu,memory:/pod/box\n3:cpuset:/\n"}};
  const std::size_t of_machine = without_a_tenth(4 * kGiB, 8 * kGiB);
  CHECK(left({}) == kNone);
  CHECK(left({large}) == of_machine);
  CHECK(left({large, in_second}) == of_machine);  // the group's files are elsewhere
  CHECK(left({in_second, second("/pod/box", gib(1), 0)}) == without_a_tenth(kGiB, kGiB));
  CHECK(left({large, in_second, second("/pod/box", gib(2), kGiB)}) == without_a_tenth(kGiB, 2 * kGiB));
  CHECK(left({large, in_second, second("/pod/box", gib(2), kGiB, kGiB / 2)}) ==
        without_a_tenth(3 * kGiB / 2, 2 * kGiB));  // the kernel can drop pages of files
  CHECK(left({large, in_second, second("/pod/box", gib(2), kGiB, 3 * kGiB)}) == without_a_tenth(2 * kGiB, 2 * kGiB));
  CHECK(left({large, in_second, second("/pod/box", gib(1), kGiB + kMiB)}) == 0);
  CHECK(left({large, in_second, second("/pod/box", gib(1), 950 * kMiB)}) == 0);
  CHECK(left({large, in_second, second("/pod/box", gib(64), kGiB)}) == of_machine);
  CHECK(left({large, in_second, second("/pod/box", "max", kGiB)}) == of_machine);
  CHECK(left({large, in_second, second("/pod/box", "max", kGiB), second("/pod", gib(3), kGiB)}) ==
        without_a_tenth(2 * kGiB, 3 * kGiB));  // a limit one above
  CHECK(left({large, in_second, second("/pod/box", gib(3), kGiB), second("/pod", gib(6), 4 * kGiB)}) ==
        without_a_tenth(2 * kGiB, 6 * kGiB));  // a tenth of each
  CHECK(left({large, in_second, second("", gib(1), kGiB / 4)}) ==
        without_a_tenth(3 * kGiB / 4, kGiB));  // in a container the path is one of the outside
  CHECK(left({large, in_second, {{"sys/fs/cgroup/pod/box/memory.max", "1048576\n"}}}) == of_machine);  // no usage
  CHECK(left({large, {{"proc/self/cgroup", "nonsense\n0::\n"}}, second("", gib(2), kGiB)}) ==
        without_a_tenth(kGiB, 2 * kGiB));
  CHECK(left({large, in_first, first("/pod/box", 2 * kGiB, kGiB, kMiB)}) == without_a_tenth(kGiB + kMiB, 2 * kGiB));
  CHECK(left({large, in_first, first("/pod/box", (std::size_t{1} << 63) - 4096, kGiB)}) == of_machine);  // no limit
  CHECK(left({large, in_first, first("/elsewhere", kMiB, 0)}) == of_machine);
  const std::string deep = "/pod/" + std::string(250, 'p');
  std::string controllers;  // more than a page
  for (int number = 20; number > 2; --number) controllers += std::to_string(number) + ":cpu:" + deep + "\n";
  CHECK(left({large, {{"proc/self/cgroup", controllers + "2:memory:" + deep + "\n"}}, first(deep, 2 * kGiB, kGiB)}) ==
        without_a_tenth(kGiB, 2 * kGiB));
  CHECK(left({large,
              {{"proc/self/cgroup", "2:memory:/old\n0::/new\n"}},
              first("/old", 3 * kGiB, kGiB),
              second("/new", gib(3), 2 * kGiB)}) == without_a_tenth(kGiB, 3 * kGiB));
}

Files node(int number, std::size_t free, std::size_t total, std::size_t files = 0) {
  const std::string begin = "Node " + std::to_string(number) + " ";
  return {{"sys/devices/system/node/node" + std::to_string(number) + "/meminfo",
           begin + "MemTotal: " + kib(total) + begin + "MemFree: " + kib(free) + begin + "Active(file): " +
               kib(files / 2) + begin + "Inactive(file): " + kib(files / 2) + begin + "Dirty: " + kib(kGiB)}};
}

TEST_CASE("host memory: nodes without CPUs may be memory of GPUs, and do not count") {
  const auto with_cpus = [](const std::string& list) {
    return Files{{"sys/devices/system/node/has_cpu", list + "\n"}};
  };
  // Two sockets, and two GPUs whose memory the system has as nodes 2 and 10.
  const std::vector<Files> nodes = {machine(40 * kGiB, 30 * kGiB), node(0, 3 * kGiB, 6 * kGiB, kGiB),
                                    node(1, 2 * kGiB, 6 * kGiB), node(2, 12 * kGiB, 14 * kGiB),
                                    node(10, 14 * kGiB, 14 * kGiB)};
  const auto left_with = [&](const Files& more) {
    std::vector<Files> all = nodes;
    all.push_back(more);
    return left(all, true);
  };
  CHECK(left_with(with_cpus("0-1")) == without_a_tenth(6 * kGiB, 12 * kGiB));
  CHECK(left_with(with_cpus("0,2")) == without_a_tenth(16 * kGiB, 20 * kGiB));
  CHECK(left_with(with_cpus("1-2,10")) == without_a_tenth(28 * kGiB, 34 * kGiB));
  CHECK(left_with(with_cpus("")) == 0);
  CHECK(left({machine(40 * kGiB, 4 * kGiB), node(0, 6 * kGiB, 6 * kGiB), with_cpus("0")}, true) ==
        without_a_tenth(4 * kGiB, 6 * kGiB));  // never more than the machine has
  CHECK(left({machine(8 * kGiB, 4 * kGiB)}, true) == 0);
}

}  // namespace
}  // namespace memsaver
