// Files and calls of the system as a test wants them, for programs that are started with this library preloaded.
//
// FAKE_SYSTEM_FILES: a folder; a file that lies there under its full path takes the place of the system's.
// FAKE_SYSTEM_REFUSED: numbers of system calls, "237,279", that fail with EPERM where they are made by number.
#include <fcntl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <string>

namespace {

long make(long number, long a, long b, long c, long d, long e, long f) {
  long result = 0;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}

bool refused(long number) {
  const char* list = std::getenv("FAKE_SYSTEM_REFUSED");
  return list != nullptr &&
         (',' + std::string(list) + ',').find(',' + std::to_string(number) + ',') != std::string::npos;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, int) : 0;
  va_end(more);
  const auto opened = [&](const char* name) {
    return static_cast<int>(make(SYS_openat, AT_FDCWD, reinterpret_cast<long>(name), flags, mode, 0, 0));
  };
  const char* root = std::getenv("FAKE_SYSTEM_FILES");
  if (root != nullptr && path[0] == '/') {
    const int before = errno;
    const int file = opened((root + std::string(path)).c_str());
    if (file >= 0) return file;
    errno = before;
  }
  return opened(path);
}

long syscall(long number, ...) {
  va_list more;
  va_start(more, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(more, long);
  va_end(more);
  if (refused(number)) {
    errno = EPERM;
    return -1;
  }
  return make(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

}  // extern "C"
