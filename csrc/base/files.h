// Files: owned descriptors, small files of the system, and unnamed files that vanish with the process.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

namespace memsaver {

// Owns a descriptor, until keep() releases it.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(other.keep()) {}
  File& operator=(File&&) = delete;
  ~File();
  int get() const { return descriptor_; }
  int keep() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

// For fcntl(): a lock of bytes. `count` 0: all that follow.
inline struct flock of_bytes(short type, off_t begin, off_t count) {
  struct flock bytes{};
  bytes.l_type = type;
  bytes.l_whence = SEEK_SET;
  bytes.l_start = begin;
  bytes.l_len = count;
  return bytes;
}

// The text of a file of the system, at most `most` bytes; nullopt, with errno set, if it cannot be read. Streams of the
// standard library are avoided: beside torch, which may bring a C++ library of its own, they read nothing.
std::optional<std::string> read_text(const std::string& path, std::size_t most = 4096);

constexpr std::size_t kFileAlignment = 4096;  // of memory, offsets and sizes: O_DIRECT requires it

// The system calls of files. Tests replace them.
struct FileCalls {
  int (*open)(const char*, int);  // small files of the system; the others: files for contents
  int (*mkostemp)(char*, int);
  int (*posix_fallocate)(int, off_t, off_t);
  ssize_t (*pwrite)(int, const void*, std::size_t, off_t);
  ssize_t (*pread)(int, void*, std::size_t, off_t);
};
FileCalls& file_calls();

// A file without a name in a directory. The kernel removes it when the process ends in any way. Every call throws
// FileError.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& in_directory);
  void reserve(std::size_t size);  // space for at least `size` bytes; if it throws, the file must not be used again
  std::size_t size() const { return size_; }

  // Transfer whole ranges; all arguments are multiples of kFileAlignment. Callable from any thread.
  void write(const void* data, std::size_t size, std::size_t offset);
  void read(void* data, std::size_t size, std::size_t offset);

  const std::string directory;

 private:
  File file_;
  std::size_t size_ = 0;
};

}  // namespace memsaver
