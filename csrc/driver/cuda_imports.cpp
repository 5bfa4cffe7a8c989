#include "driver/cuda_imports.h"

#include <unistd.h>

#include <utility>

#include "driver/driver.h"

namespace memsaver::cuda {
namespace {

Result import_into(AllocationHandle& handle, int file) {
  void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(file));
  return api().cuMemImportFromShareableHandle(&handle, as_pointer, kHandlePosixFd);
}

}  // namespace

AllocationHandle Imports::import(int file, std::size_t size) {
  // Imports wait for a measurement that is under way, since they could change its figures.
  std::unique_lock measuring(measuring_, std::defer_lock);
  if (!measured_) {
    measuring.lock();
    if (!measured_) measure(file, size);
  }
  AllocationHandle handle = 0;
  check("cuMemImportFromShareableHandle", import_into(handle, file));
  note(handle, size);
  return handle;
}

void Imports::note(AllocationHandle handle, std::size_t size) {
  const std::lock_guard lock(mutex_);
  sizes_[handle] = size;
  bytes_ += size;
}

std::size_t Imports::forget(AllocationHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = sizes_.find(handle);
  if (found == sizes_.end()) return 0;
  const std::size_t size = found->second;
  sizes_.erase(found);
  bytes_ -= size;
  return size;
}

std::optional<std::size_t> Imports::listed(std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (bytes_ == 0) return 0;
  if (!are_listed_) return std::nullopt;
  if (!*are_listed_) return 0;
  if (bytes_ > bytes) return std::nullopt;  // the list was read at another moment
  return bytes_;
}

// Other threads may take or release memory meanwhile. So two turns in a row have to agree.
void Imports::measure(int file, std::size_t size) {
  std::optional<bool> last;
  for (int i = 0; i < kTurns && !measured_; ++i) {
    const std::optional<bool> found = turn(file, size);
    if (found && found == last) {
      const std::lock_guard lock(mutex_);
      are_listed_ = found;
      measured_ = true;
    }
    last = found;
  }
  if (++measurements_ == kMeasurements) measured_ = true;
}

// Whether NVML's figure grows by the size with the memory, and shrinks by the size after it. nullopt: neither that nor
// no change at all.
std::optional<bool> Imports::turn(int file, std::size_t size) const {
  const std::optional<std::size_t> before = own_bytes();
  if (!before) return std::nullopt;
  const std::optional<std::size_t> with = listed_with(file, size);
  const std::optional<std::size_t> after = own_bytes();
  if (!with || before != after) return std::nullopt;
  if (with == before) return false;
  if (*with == *before + size) return true;
  return std::nullopt;
}

// NVML's figure while the memory is imported, and mapped. nullopt: a call has failed, or the mapping changes the
// figure, so that imports alone do not tell it.
std::optional<std::size_t> Imports::listed_with(int file, std::size_t size) const {
  AllocationHandle handle = 0;
  if (import_into(handle, file) != kSuccess) return std::nullopt;
  const std::optional<std::size_t> imported = own_bytes();
  std::optional<std::size_t> mapped;
  DevicePointer address = 0;
  if (api().cuMemAddressReserve(&address, size, kPage, 0, 0) == kSuccess) {
    const AccessDesc access = {{kLocationDevice, device_}, kAccessReadWrite};
    if (api().cuMemMap(address, size, 0, handle, 0) == kSuccess &&
        api().cuMemSetAccess(address, size, &access, 1) == kSuccess)
      mapped = own_bytes();
    // Also after a failure, which may be that of other work: a mapping that stays would keep the memory.
    api().cuMemUnmap(address, size);
    api().cuMemAddressFree(address, size);
  }
  api().cuMemRelease(handle);
  return mapped == imported ? mapped : std::nullopt;
}

std::optional<std::size_t> Imports::own_bytes() const {
  for (const ProcessUse& use : compute_processes(uuid_))
    if (use.pid == ::getpid() && use.bytes > 0) return use.bytes;
  return std::nullopt;
}

}  // namespace memsaver::cuda
