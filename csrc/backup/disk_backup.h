// Contents in an unnamed file: the parts end to end, cut into blocks. Threads write and read the blocks through pinned
// memory, concurrently with the copies. Each block has a checksum.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backup/backup.h"
#include "backup/blocks.h"
#include "backup/pinned_memory.h"
#include "base/files.h"

namespace memsaver {

// Files for contents: kept and reused, like the arena. Removing a large file takes long, and the next pause needs its
// space again.
class DiskStore {
 public:
  // A file with space for `bytes` in this directory. Throws BackupError with the free bytes of the file system.
  std::unique_ptr<ScratchFile> take(const std::string& directory, std::size_t bytes);
  void put(std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept;
  std::size_t release_idle();  // closes the files without contents; returns their bytes
  std::size_t held_bytes() const;
  std::size_t used_bytes() const;

 private:
  std::unique_ptr<ScratchFile> take_idle(const std::string& directory, std::size_t bytes);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<ScratchFile>> idle_;
  std::size_t held_bytes_ = 0;  // of all files
  std::size_t used_bytes_ = 0;  // of contents
};

class DiskBackup final : public Backup {
 public:
  // Takes a file with space for all parts. Throws BackupError.
  DiskBackup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts);
  ~DiskBackup() override;

  const Blocks blocks;  // end to end in the file
  // Callable from any thread, one block each. `memory`: Blocks::kSize bytes, page-aligned. They throw Error, load()
  // also if the checksum differs.
  void save(std::size_t block, std::byte* memory);
  void load(std::size_t block, std::byte* memory) const;
  HostArena& staging() const { return staging_; }

  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;
  std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) override;
  std::byte* view(Range range) override;
  void read(Range range, std::byte* to) override;

 private:
  std::size_t size_of(std::size_t block) const;  // in the file: whole pages
  BackupError error(const std::string& what) const;

  HostArena& staging_;
  DiskStore& store_;
  const std::string directory_;
  std::vector<std::uint64_t> checksums_;
  std::unique_ptr<ScratchFile> file_;
};

}  // namespace memsaver
