// Files for contents: kept and reused, like the arena. Removing a large file takes long, and the next pause needs its
// space again.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/files.h"

namespace memsaver {

class DiskStore {
 public:
  // A file with space for `bytes` in this directory. Throws BackupError with the free bytes of the file system.
  std::unique_ptr<ScratchFile> take(const std::string& directory, std::size_t bytes);
  void put(const std::string& directory, std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept;
  std::size_t release_idle();  // closes the files without contents; returns their bytes
  std::size_t held_bytes() const;
  std::size_t used_bytes() const;

 private:
  std::unique_ptr<ScratchFile> take_idle_locked(const std::string& directory, std::size_t bytes);

  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<ScratchFile>>> idle_;  // by directory
  std::size_t idle_bytes_ = 0;
  std::size_t lent_bytes_ = 0;  // of files
  std::size_t used_bytes_ = 0;  // of contents in them
};

}  // namespace memsaver
