// Another process's memory, mapped here: the same chunks, laid out as there, for as long as the lease is held.
#pragma once

#include <string>
#include <vector>

#include "region.h"

namespace memsaver {

class Attachment {
 public:
  // `key`: as SharedPool::attach() takes it. Throws what that throws, and DriverError.
  Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
             Deadline deadline);
  ~Attachment();
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  const Device& device() const { return device_; }
  Address address_of(std::size_t offset) const {
    return base_ + (offset - first_);
  }  // of what lies there in the region
  // Waits for the device, unmaps, and ends the lease. Throws Error where a capture is under way, and then all stays.
  void leave();

 private:
  void undo() noexcept;

  Device& device_;
  Lease lease_;
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
