// Files: descriptors that close themselves, small texts of the system, and unnamed files that vanish with the process.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

namespace memsaver {

// A descriptor that closes unless it is kept.
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

// The text of a small file of the system's, at most 4 KiB; nothing, with errno set, where it cannot be read. Streams of
// the standard library are avoided: beside torch, which may bring a C++ library of its own, they read nothing.
std::optional<std::string> read_text(const std::string& path);

constexpr std::size_t kFileAlignment = 4096;  // of memory, offsets and sizes, so that the page cache can be passed by

// A file without a name in a directory: it is gone when the process is, however that ends. Every call throws FileError.
class ScratchFile {
 public:
  explicit ScratchFile(const std::string& directory);
  void reserve(std::size_t size);  // space for so much at least; when it throws, the file is of no use any more
  std::size_t size() const { return size_; }

  // Whole ranges; all arguments are multiples of kFileAlignment. From any thread.
  void write(const void* data, std::size_t size, std::size_t offset);
  void read(void* data, std::size_t size, std::size_t offset);

 private:
  File file_;
  std::size_t size_ = 0;
};

}  // namespace memsaver
