#include "driver/host_chunk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace memsaver {
namespace {

struct stat status_of(const char* call, int file) {
  struct stat status{};
  if (::fstat(file, &status) != 0) throw_errno(call);
  return status;
}

}  // namespace

HostChunk make_host_chunk(HostLedger& ledger, std::size_t size) {
  File file(::memfd_create("memsaver", MFD_CLOEXEC));
  if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(size)) != 0) throw_errno("create");
  const std::uint64_t inode = status_of("create", file.get()).st_ino;
  if (!ledger.charge(inode, size)) throw ChunkUnavailable("create", "the host device is full");
  return {std::move(file), inode};
}

HostChunk import_host_chunk(HostLedger& ledger, int file, std::size_t size, bool adopted) {
  const struct stat status = status_of("import_fd", file);
  if (static_cast<std::size_t>(status.st_size) != size)
    throw DriverError("import_fd", kInvalidValue,
                      "the descriptor has " + std::to_string(status.st_size) + " bytes, not " + std::to_string(size));
  File copy(::fcntl(file, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) throw_errno("import_fd");
  ledger.charge_imported(status.st_ino, size, adopted);
  return {std::move(copy), status.st_ino};
}

}  // namespace memsaver
