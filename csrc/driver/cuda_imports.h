// The memory that this process has imported, and the part of it that NVML lists for this process.
//
// NVML's documentation does not tell whether it lists imported memory. The open kernel modules of the drivers 580 to
// 595 (gpu_rmapi.c, mem.c) list memory for one owner: the first of its handles and descriptors, and after that one's
// end the next. So an import of memory whose maker or descriptor lives is not listed. Memory that a process made stays
// listed for it if it imports that memory too, so only memory of another process can answer the question. The memory
// may get listed for the importer when the maker's handles and descriptors have gone: see
// SharedPool::outlives_broker().
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "driver/cuda_api.h"

namespace memsaver::cuda {

// Thread-safe. A context of the device has to be current in import().
class Imports {
 public:
  Imports(Device device, std::string uuid) : device_(device), uuid_(std::move(uuid)) {}

  // Imports memory of another process. The first imports measure whether NVML lists it.
  AllocationHandle import(int file, std::size_t size);
  void note(AllocationHandle handle, std::size_t size);
  std::size_t forget(AllocationHandle handle);  // returns its bytes, or 0 if it was not imported
  // The imported bytes among the `bytes` that NVML lists for this process. nullopt: unknown.
  std::optional<std::size_t> listed(std::size_t bytes) const;

 private:
  static constexpr int kTurns = 4;          // of one measurement
  static constexpr int kMeasurements = 20;  // without a result, after which there are no more

  void measure(int file, std::size_t size);
  std::optional<bool> turn(int file, std::size_t size) const;
  std::optional<std::size_t> listed_with(int file, std::size_t size) const;
  std::optional<std::size_t> own_bytes() const;

  const Device device_;
  const std::string uuid_;
  mutable std::mutex mutex_;
  std::unordered_map<AllocationHandle, std::size_t> sizes_;
  std::size_t bytes_ = 0;
  std::optional<bool> are_listed_;
  std::mutex measuring_;  // taken before mutex_, and held over calls of the driver
  int measurements_ = 0;  // guarded by measuring_
  std::atomic<bool> measured_ = false;
};

}  // namespace memsaver::cuda
