#include "pool/sentinel.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/errors.h"

namespace memsaver {
namespace {

struct Ends {
  std::mutex mutex;
  std::vector<int> children;  // pidfds
  int read = -1, write = -1;
};

Ends& ends() {
  static auto* only = new Ends;  // never destroyed: the write end must stay open until the exit of the process
  return *only;
}

bool has_exited(int pidfd) {
  pollfd ready{pidfd, POLLIN, 0};
  return ::poll(&ready, 1, 0) > 0;
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
  std::vector<File> copies;
  for (const int file : files) {
    const int copy = ::fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw DriverError("fcntl", errno, std::strerror(errno));
    copies.emplace_back(copy);
  }
  return copies;
}

}  // namespace memsaver
