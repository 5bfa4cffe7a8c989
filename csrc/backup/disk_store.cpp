#include "backup/disk_store.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace memsaver {

std::unique_ptr<ScratchFile> DiskStore::take(const std::string& directory, std::size_t bytes) {
  std::unique_ptr<ScratchFile> file;
  {
    std::lock_guard lock(mutex_);
    file = take_idle_locked(directory, bytes);
  }
  for (bool again = true; file == nullptr || file->size() < bytes; again = false) {
    try {
      if (file == nullptr) file = std::make_unique<ScratchFile>(directory);
      file->reserve(bytes);
    } catch (const Error& failure) {
      file = nullptr;  // it may hold a part of the space, which is freed with it
      if (again && release_idle() > 0) continue;
      struct statvfs status{};
      const std::size_t free = ::statvfs(directory.c_str(), &status) == 0 ? status.f_bavail * status.f_frsize : 0;
      const std::size_t held = held_bytes();
      throw BackupError("a backup needs " + std::to_string(bytes) + " bytes in " + directory + ", which has " +
                            std::to_string(free) + " bytes free; this process holds " + std::to_string(held) +
                            " there: " + failure.what(),
                        bytes, held, free);
    }
  }
  std::lock_guard lock(mutex_);
  lent_bytes_ += file->size();
  used_bytes_ += bytes;
  return file;
}

// The smallest file that is large enough, else the largest, for the caller to grow.
std::unique_ptr<ScratchFile> DiskStore::take_idle_locked(const std::string& directory, std::size_t bytes) {
  auto& files = idle_[directory];
  auto best = files.end();
  for (auto file = files.begin(); file != files.end(); ++file) {
    const bool fits = (*file)->size() >= bytes, best_fits = best != files.end() && (*best)->size() >= bytes;
    const bool smaller = best != files.end() && (*file)->size() < (*best)->size();
    if (best == files.end() || (fits ? !best_fits || smaller : !best_fits && !smaller)) best = file;
  }
  if (best == files.end()) return nullptr;
  std::unique_ptr<ScratchFile> found = std::move(*best);
  files.erase(best);
  idle_bytes_ -= found->size();
  return found;
}

void DiskStore::put(const std::string& directory, std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  const std::size_t size = file->size();
  lent_bytes_ -= size;
  used_bytes_ -= bytes;
  try {
    idle_[directory].push_back(std::move(file));
    idle_bytes_ += size;
  } catch (const std::exception&) {
    // The file is closed instead.
  }
}

std::size_t DiskStore::release_idle() {
  std::map<std::string, std::vector<std::unique_ptr<ScratchFile>>> closed;  // outside the lock: closing takes long
  std::lock_guard lock(mutex_);
  closed.swap(idle_);
  return std::exchange(idle_bytes_, 0);
}

std::size_t DiskStore::held_bytes() const {
  std::lock_guard lock(mutex_);
  return idle_bytes_ + lent_bytes_;
}

std::size_t DiskStore::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace memsaver
