// Contents in an unnamed file: the parts end to end, cut into blocks. Threads write and read the blocks through pinned
// memory, concurrently with the copies. Each block has a checksum.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backup/backup.h"
#include "backup/disk_store.h"
#include "backup/pinned_memory.h"

namespace memsaver {

class DiskBackup final : public Backup {
 public:
  static constexpr std::size_t kBlock = 8 * kMiB;
  struct Piece {
    std::size_t offset;  // within the region
    std::size_t size;
    std::size_t in_block;
  };

  // Takes a file with space for all parts. Throws BackupError.
  DiskBackup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts);
  ~DiskBackup() override;

  std::size_t blocks() const { return checksums_.size(); }
  std::vector<Piece> pieces(std::size_t block) const;
  Ranges ranges(std::size_t block) const;
  // Callable from any thread, one block each. `memory`: kBlock bytes, page-aligned. They throw Error.
  void write(std::size_t block, std::byte* memory);
  void read(std::size_t block, std::byte* memory);
  void check(std::size_t block, const std::byte* memory) const;  // compares the checksum of the block; throws Error
  HostArena& staging() const { return staging_; }

  std::unique_ptr<Saver> saver(Driver& driver, Address base, Ranges batches, Progress& progress) override;
  std::unique_ptr<Loader> loader(Driver& driver, Address base, Ranges wanted, Progress& progress) override;
  std::byte* view(Range range) override;
  void read(Range range, std::byte* to) override;

 private:
  std::size_t size_of(std::size_t block) const;  // in the file: whole pages
  BackupError error(const std::string& what) const;

  HostArena& staging_;
  DiskStore& store_;
  const std::string directory_;
  std::vector<std::size_t> positions_;  // of each run in the file
  std::vector<std::uint64_t> checksums_;
  std::unique_ptr<ScratchFile> file_;
};

}  // namespace memsaver
