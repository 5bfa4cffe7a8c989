// Memory of another process, mapped in this one: the same chunks with the same layout, as long as the lease is held.
#pragma once

#include <string>
#include <vector>

#include "regions/core.h"

namespace memsaver {

class Attachment {
 public:
  // `key`: as for SharedPool::attach(). Throws the errors of SharedPool::attach(), and DriverError.
  Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
             Deadline deadline);
  ~Attachment();
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  const Device& device() const { return device_; }  // The address of an offset of the region.
  Address address_of(std::size_t offset) const { return base_ + (offset - first_); }
  // Waits for the device, unmaps, and ends the lease. Throws Error during a capture; nothing has changed then.
  void leave();

 private:
  void undo() noexcept;

  Device& device_;
  AttachedMemory memory_;
  std::size_t first_ = 0;  // offset, within the region, of the first chunk
  std::size_t span_ = 0;
  Address base_ = 0;
  struct Part {
    Slot slot;
    Chunk chunk;
  };
  std::vector<Part> mapped_;
};

}  // namespace memsaver
