// Contents in an unnamed file: the parts end to end, cut into blocks. Threads write and read the blocks through pinned
// memory, concurrently with the copies. Each block has a checksum.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backup/backup.h"
#include "base/files.h"

namespace memsaver {

class HostArena;

// Files for contents: kept and reused, like the arena. Removing a large file takes long, and the next pause needs its
// space again.
class DiskStore {
 public:
  // A file with space for `bytes` in this directory. Throws BackupError with the free bytes of the file system.
  std::unique_ptr<ScratchFile> take(const std::string& directory, std::size_t bytes);
  void put(std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept;
  std::size_t release_idle();  // closes the files without contents; returns their bytes
  std::size_t held_bytes() const {
    std::lock_guard lock(mutex_);
    return held_bytes_;
  }
  std::size_t used_bytes() const {
    std::lock_guard lock(mutex_);
    return used_bytes_;
  }

 private:
  std::unique_ptr<ScratchFile> take_idle(const std::string& directory, std::size_t bytes);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<ScratchFile>> idle_;
  std::size_t held_bytes_ = 0;  // of all files
  std::size_t used_bytes_ = 0;  // of contents
};

// Takes a file with space for all parts. Throws BackupError.
std::shared_ptr<Backup> disk_backup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts);

}  // namespace memsaver
