// Chunks of a region in other processes: the owner's leases on them, and their mapping in a receiver.
#pragma once

#include <utility>
#include <vector>

#include "regions/core.h"

namespace memsaver {

// Records a lease of a process on the chunks under a range, which must be a segment in use, or a part of one. Throws
// RegionPausedError if the region is not active, and Error if its residence is another one, if a copy of its contents
// is kept, or if the range was freed. Nothing is recorded then. Region::leases() has the lease until end_lease().
std::vector<Region::Placed> lend_chunks(Region& region, Range range, std::uint64_t residence, std::uint64_t lease,
                                        int pid);

// Ends a lease, and wakes the pauses that wait for it. Unknown leases are ignored.
void end_lease(Region& region, std::uint64_t lease);

// Chunks of another process, mapped in this one with the layout that they have there.
class BorrowedMemory : Immovable {
 public:
  // Reserves addresses for the offsets from `first` on. Sizes and offsets are multiples of kPage. Throws DriverError.
  BorrowedMemory(Device& device, std::size_t first, std::size_t span);
  ~BorrowedMemory();  // as leave(false), with a wait of kShortageWait

  // Imports and maps a chunk; the caller keeps the descriptor. Throws DriverError, and BadArgument for a slot outside
  // of the reserved addresses.
  void map(Slot slot, int file);
  void allow() {  // access to all chunks
    Ranges slots;
    for (const auto& [slot, chunk] : mapped_) slots.push_back(slot);
    for (const Range& run : joined(slots)) device_.driver->allow(address_of(run.offset), run.size);
  }
  const Device& device() const { return device_; }
  Address address_of(std::size_t offset) const { return base_ + (offset - first_); }
  // Waits for the device, unless `idle`, and unmaps. Throws Error during a capture; nothing has changed then. Memory
  // that the driver refuses to unmap stays mapped for good: returns false.
  bool leave(bool idle) {
    core();  // throws in a forked child
    if (base_ == 0) return true;
    if (!idle) device_.wait_idle(kNever);
    return unmap();
  }

 private:
  bool unmap() noexcept;

  Device& device_;
  const std::size_t first_, span_;
  Address base_ = 0;  // 0: it was left
  std::vector<std::pair<Slot, Chunk>> mapped_;
};

}  // namespace memsaver
