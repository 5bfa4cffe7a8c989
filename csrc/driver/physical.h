// The physical memory of a device, for the broker: no context, no addresses, no mappings.
//
// A chunk is a descriptor here, with its handle. Each of them holds the memory, and so does each import of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/scoped.h"
#include "driver/cuda_api.h"

namespace memsaver {

class PhysicalMemory : Immovable {
 public:
  // Throws DriverError if its chunks cannot be exported. `name`: as of Driver.
  PhysicalMemory(const cuda::Platform& platform, cuda::Device device, const std::string& name);

  std::string uuid() const { return uuid_of(platform_, device_); }
  std::size_t total_bytes() const { return total_memory(platform_.api, device_); }
  // By the system's figure; total_bytes() if there is none.
  std::size_t free_bytes() const { return platform_.free_memory(device_).value_or(total_bytes()); }
  std::optional<std::size_t> used_bytes() const {  // of the device, by the system's figure
    const std::optional<std::size_t> free = platform_.free_memory(device_);
    if (!free) return std::nullopt;
    return total_bytes() - std::min(*free, total_bytes());
  }
  int create(std::size_t size);  // returns a descriptor. Throws ChunkUnavailable if the device is full
  void close(int file);          // closes a descriptor of create()
  // The processes that the system lists as computing on the device, also a dead one as long as its kernels may run.
  // Empty if the system provides no list.
  std::vector<int> compute_pids() const {
    std::vector<int> pids;
    if (platform_.is_gpu)  // no work on a host device outlives its process
      for (const cuda::Holding& each : platform_.holdings(device_)) pids.push_back(each.pid);
    return pids;
  }
  std::vector<cuda::Holding> holdings() const { return known_holdings(platform_, device_); }
  bool lists_all() const { return !platform_.is_gpu; }  // as in Driver
  // Whether an MPS server runs the kernels of all clients. The exit of a client then does not end its kernels.
  bool under_mps() const;

 private:
  const cuda::Platform& platform_;
  const cuda::Device device_;
  const cuda::AllocationProp properties_;
  std::mutex mutex_;
  std::map<int, cuda::AllocationHandle> handles_;  // by descriptor
};

// The features of a GPU that memsaver uses. A missing feature is no error.
struct GpuFacts {
  std::string name;  // the driver's; that of a part of a GPU has "MIG" in it
  bool virtual_memory, posix, fabric, mps;
};
std::vector<GpuFacts> gpu_facts();  // of the visible GPUs. Throws DriverError without a usable driver
int cuda_version();                 // of the driver: 12080 is CUDA 12.8. 0: unknown. Throws as gpu_facts()

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal);
std::string cuda_uuid(int ordinal);  // throws BadArgument if there is no such device; so does the next
bool cuda_under_mps(int ordinal);

}  // namespace memsaver
