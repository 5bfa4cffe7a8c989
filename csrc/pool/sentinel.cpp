#include "pool/sentinel.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>

#include "base/errors.h"

namespace memsaver {
namespace {

constexpr std::string_view kDeviceFiles = "/dev/nvidia";
constexpr int kKcmpFile = 0;

struct Ends {
  std::mutex mutex;
  std::vector<int> children;               // pidfds
  std::atomic<int> read = -1, write = -1;  // read by a forked child, which must not lock
  std::atomic<bool> close_on_fork = false;
};

Ends& ends() {
  static auto* only = new Ends;  // never destroyed: the write end must stay open until the exit of the process
  return *only;
}

struct DirectoryEntry {  // of getdents64()
  std::uint64_t inode;
  std::int64_t next;
  unsigned short length;
  unsigned char type;
  char name[];
};

// Runs in a forked child of a process with threads, where only async-signal-safe calls are allowed.
void close_device_files() {
  const int folder = ::open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  alignas(DirectoryEntry) char entries[4096];
  for (;;) {
    const long bytes = ::syscall(SYS_getdents64, folder, entries, sizeof entries);
    if (bytes <= 0) break;
    for (long at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const DirectoryEntry*>(entries + at);
      at += entry->length;
      char target[kDeviceFiles.size()];
      const ssize_t length = ::readlinkat(folder, entry->name, target, sizeof target);
      if (length == static_cast<ssize_t>(sizeof target) && std::string_view(target, sizeof target) == kDeviceFiles)
        ::close(std::atoi(entry->name));
    }
  }
  ::close(folder);
}

void after_fork() {
  Ends& all = ends();
  if (!all.close_on_fork) return;
  for (std::atomic<int>* end : {&all.read, &all.write})
    if (const int file = end->exchange(-1); file >= 0) ::close(file);
  close_device_files();
}

}  // namespace

void open_sentinel() {
  Ends& all = ends();
  std::lock_guard lock(all.mutex);
  if (all.write >= 0) return;
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC | O_NONBLOCK) != 0) throw DriverError("pipe2", errno, std::strerror(errno));
  all.read = pipe[0];
  all.write = pipe[1];
}

void add_children(const std::vector<int>& pidfds) {
  Ends& all = ends();
  std::lock_guard lock(all.mutex);
  all.children.insert(all.children.end(), pidfds.begin(), pidfds.end());
}

std::vector<File> exit_descriptors() {
  open_sentinel();
  Ends& all = ends();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.children, [](int child) { return has_exited(child) && ::close(child) == 0; });
  std::vector<int> files = {all.read};
  files.insert(files.end(), all.children.begin(), all.children.end());
  return copies_of(files);
}

std::vector<File> copies_of(const std::vector<int>& descriptors) {
  std::vector<File> copies;
  for (const int file : descriptors) {
    const int copy = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw DriverError("fcntl", errno, std::strerror(errno));
    copies.emplace_back(copy);
  }
  return copies;
}

bool has_exited(int pidfd) {
  pollfd ready{pidfd, POLLIN, 0};
  return ::poll(&ready, 1, 0) > 0;
}

void set_close_on_fork(bool wanted) {
  static std::once_flag once;
  ends().close_on_fork = wanted;  // ends() allocates at its first call, which must not be in a child
  std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, after_fork); });
}

std::optional<bool> same_file(int pid, int descriptor, int other_pid, int other_descriptor) {
  const long order = ::syscall(SYS_kcmp, pid, other_pid, kKcmpFile, descriptor, other_descriptor);
  if (order >= 0) return order == 0;
  if (errno == ESRCH || errno == EBADF) return false;  // the process has ended, or the descriptor is closed
  return std::nullopt;
}

}  // namespace memsaver
