#include "base/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace memsaver {
namespace {

[[noreturn]] void fail(const std::string& call, int error) { throw FileError(call, std::strerror(error)); }

// The name is removed at once. Parallel reads of files that never had a name (O_TMPFILE) are a sixth slower on ext4.
int open_scratch(const std::string& directory) {
  std::string path = directory + "/memsaver-XXXXXX";
  const int file = file_calls().mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) fail("open " + directory, errno);
  ::unlink(path.c_str());
  return file;
}

// Repeats the call until all bytes are transferred: a call may transfer fewer.
template <typename Call, typename Pointer>
void all_of_it(const char* name, Call call, int file, Pointer data, std::size_t size, std::size_t offset) {
  while (size > 0) {
    const ssize_t done = call(file, data, size, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(name, errno);
    if (done == 0) fail(name, EIO);  // the file is shorter than its reserved size
    data += done;
    size -= static_cast<std::size_t>(done);
    offset += static_cast<std::size_t>(done);
  }
}

}  // namespace

FileCalls& file_calls() {
  static FileCalls only = {[](const char* path, int flags) { return ::open(path, flags); }, &::mkostemp,
                           &::posix_fallocate, &::pwrite, &::pread};
  return only;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::optional<std::string> read_text(const std::string& path, std::size_t most) {
  constexpr std::size_t kLargestPart = 64 << 10;
  const File file(file_calls().open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return std::nullopt;
  std::string text;
  while (text.size() < most) {
    const std::size_t before = text.size();
    const std::size_t part = std::min(most - before, kLargestPart);
    text.resize(before + part);
    ssize_t got = 0;
    do got = ::read(file.get(), text.data() + before, part);
    while (got < 0 && errno == EINTR);
    if (got < 0) return std::nullopt;
    text.resize(before + static_cast<std::size_t>(got));
    if (got == 0) break;
  }
  return text;
}

ScratchFile::ScratchFile(const std::string& in_directory) : directory(in_directory), file_(open_scratch(directory)) {}

void ScratchFile::reserve(std::size_t size) {
  if (size <= size_) return;
  // On a file system without fallocate() the C library writes single bytes. O_DIRECT forbids that.
  ::fcntl(file_.get(), F_SETFL, 0);
  int error = 0;
  do error = file_calls().posix_fallocate(file_.get(), 0, static_cast<off_t>(size));
  while (error == EINTR);
  if (error != 0) fail("posix_fallocate", error);
  size_ = size;
  // Bypasses the page cache from here on. A file system without O_DIRECT refuses; its files are then used through the
  // cache.
  ::fcntl(file_.get(), F_SETFL, O_DIRECT);
}

void ScratchFile::write(const void* data, std::size_t size, std::size_t offset) {
  all_of_it("pwrite", file_calls().pwrite, file_.get(), static_cast<const char*>(data), size, offset);
}

void ScratchFile::read(void* data, std::size_t size, std::size_t offset) {
  all_of_it("pread", file_calls().pread, file_.get(), static_cast<char*>(data), size, offset);
}

}  // namespace memsaver
