// The physical memory of a device, for the broker: no context, no addresses, no mappings.
//
// A chunk is a descriptor here. The descriptor and each import of it hold the memory, which is free when the last of
// them is closed (seen on an H200, driver 580: a process that called cuInit alone creates, exports and releases the
// handle, and the descriptor holds the memory).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "driver/driver.h"

namespace memsaver {

class PhysicalMemory {
 public:
  virtual ~PhysicalMemory() = default;
  virtual std::string uuid() = 0;
  virtual std::size_t total_bytes() = 0;
  virtual std::size_t free_bytes() = 0;      // by the system's figure; total_bytes() if there is none
  virtual int create(std::size_t size) = 0;  // returns a descriptor. Throws ChunkUnavailable if the device is full
  // Checks a descriptor of another process, and takes it over.
  virtual void adopt(int file, std::size_t size) = 0;
  virtual void close(int file) = 0;  // closes a descriptor of create() or adopt()
  // The processes that the system lists as computing on the device. It lists a dead process as long as its kernels may
  // run. Empty if the system provides no list.
  virtual std::vector<int> compute_pids() = 0;
  virtual std::vector<Driver::Holding> holdings() = 0;  // see Driver; empty if the system provides no list
  virtual bool lists_all() const { return false; }      // as in Driver
  virtual std::optional<std::size_t> used_bytes() = 0;  // of the device, by the system's figure
  // Whether an MPS server runs the kernels of all clients. The exit of a client then does not end its kernels.
  virtual bool under_mps() = 0;
};

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal);
std::unique_ptr<PhysicalMemory> open_host_memory(std::size_t capacity);
std::string cuda_uuid(int ordinal);  // throws BadArgument if there is no such device; so does the next
bool cuda_under_mps(int ordinal);

}  // namespace memsaver
