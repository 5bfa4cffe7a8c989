#include "host_chunk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace memsaver {
namespace {

// The codes that CUDA gives in the same cases.
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;

struct stat status_of(const char* call, int file) {
  struct stat status{};
  if (::fstat(file, &status) != 0) throw DriverError(call, errno, std::strerror(errno));
  return status;
}

}  // namespace

HostChunk make_host_chunk(HostLedger& ledger, std::size_t size) {
  File file(::memfd_create("memsaver", MFD_CLOEXEC));
  if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(size)) != 0)
    throw DriverError("create", errno, std::strerror(errno));
  const std::uint64_t inode = status_of("create", file.get()).st_ino;
  if (!ledger.charge(inode, size)) throw ChunkUnavailable("create", kOutOfMemory, "the host device is full");
  return {std::move(file), inode};
}

HostChunk import_host_chunk(HostLedger& ledger, int file, std::size_t size) {
  const struct stat status = status_of("import_fd", file);
  if (static_cast<std::size_t>(status.st_size) != size)
    throw DriverError("import_fd", kInvalidValue,
                      "the descriptor has " + std::to_string(status.st_size) + " bytes, not " + std::to_string(size));
  File copy(::fcntl(file, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) throw DriverError("import_fd", errno, std::strerror(errno));
  ledger.charge_imported(status.st_ino, size);
  return {std::move(copy), status.st_ino};
}

}  // namespace memsaver
