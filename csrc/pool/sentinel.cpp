#include "pool/sentinel.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/errors.h"

namespace memsaver {
namespace {

struct Ends {
  std::mutex mutex;
  int read = -1, write = -1;
};

Ends& ends() {
  static auto* only = new Ends;  // never destroyed: the write end must stay open until the exit of the process
  return *only;
}

}  // namespace

File sentinel() {
  Ends& both = ends();
  std::lock_guard lock(both.mutex);
  if (both.write < 0) {
    int pipe[2];
    if (::pipe2(pipe, O_CLOEXEC | O_NONBLOCK) != 0) throw DriverError("pipe2", errno, std::strerror(errno));
    both.read = pipe[0];
    both.write = pipe[1];
  }
  const int copy = ::fcntl(both.read, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw DriverError("fcntl", errno, std::strerror(errno));
  return File(copy);
}

}  // namespace memsaver
