// Chunks of another process, mapped in this one with the layout that they have there.
#pragma once

#include <vector>

#include "regions/core.h"

namespace memsaver {

class BorrowedMemory {
 public:
  // Reserves addresses for the offsets from `first` on. Sizes and offsets are multiples of kPage. Throws DriverError.
  BorrowedMemory(Device& device, std::size_t first, std::size_t span);
  ~BorrowedMemory() { give_up(); }
  BorrowedMemory(const BorrowedMemory&) = delete;
  BorrowedMemory& operator=(const BorrowedMemory&) = delete;

  // Imports and maps a chunk; the caller keeps the descriptor. Throws DriverError, and BadArgument for a slot outside
  // of the reserved addresses.
  void map(Slot slot, int file);
  void allow();  // access to all chunks
  const Device& device() const { return device_; }
  Address address_of(std::size_t offset) const { return base_ + (offset - first_); }
  // Waits for the device, unless `idle`, and unmaps. Throws Error during a capture; nothing has changed then. Returns
  // whether nothing is mapped any more.
  bool leave(bool idle);
  bool undo() noexcept;  // as leave(true)
  // As leave(false), with a wait of kShortageWait. The memory stays mapped for good if the device cannot be waited for.
  bool give_up() noexcept;

 private:
  Device& device_;
  const std::size_t first_, span_;
  Address base_ = 0;  // 0: it was left
  struct Part {
    Slot slot;
    Chunk chunk;
  };
  std::vector<Part> mapped_;
};

}  // namespace memsaver
