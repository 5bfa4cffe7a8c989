// A device's physical memory alone, for the broker: no context, no addresses, no mappings.
//
// A chunk is a descriptor here. It keeps the memory, as does whoever imported it; when all have let go the memory is
// free again (seen on an H200, driver 580: a process that called cuInit alone creates, exports and releases the handle,
// and the descriptor holds the memory).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace memsaver {

class PhysicalMemory {
 public:
  virtual ~PhysicalMemory() = default;
  virtual std::string uuid() = 0;
  virtual std::size_t total_bytes() = 0;
  virtual std::size_t free_bytes() = 0;      // by the system's figure; total_bytes() where it does not tell
  virtual int create(std::size_t size) = 0;  // a descriptor. Throws ChunkUnavailable where the device is full
  virtual void adopt(int file,
                     std::size_t size) = 0;  // checks a descriptor that another process made, and counts it in
  virtual void close(int file) = 0;          // lets go of one that create() made or adopt() took
};

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal);
std::unique_ptr<PhysicalMemory> open_host_memory(std::size_t capacity);
std::string cuda_uuid(int ordinal);  // throws BadArgument where there is no such device

}  // namespace memsaver
