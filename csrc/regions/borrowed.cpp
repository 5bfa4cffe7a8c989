#include "regions/borrowed.h"

#include <utility>

#include "driver/checked_calls.h"

namespace memsaver {

BorrowedMemory::BorrowedMemory(Device& device, std::size_t first, std::size_t span)
    : device_(device), first_(first), span_(span), base_(device.driver->reserve(span)) {}

bool BorrowedMemory::give_up() noexcept {
  if (!usable() || base_ == 0) return base_ == 0;
  try {
    // Bounded, and without a check for signals: this thread may hold the GIL.
    wait_idle(*device_.driver, device_.parts.gate, now() + kShortageWait, false);
    return undo();
  } catch (const std::exception&) {
    // The device is busy, a capture is under way, or the context is dead.
    for (Part& part : mapped_) static_cast<void>(std::move(part.chunk).keep());
    base_ = 0;
    return false;
  }
}

void BorrowedMemory::map(Slot slot, int file) {
  if (slot.offset < first_ || slot.size > span_ || slot.offset - first_ > span_ - slot.size)
    throw BadArgument("a chunk of " + std::to_string(slot.size) + " bytes at " + std::to_string(slot.offset) +
                      " lies outside of the " + std::to_string(span_) + " bytes at " + std::to_string(first_));
  Driver& driver = *device_.driver;
  Chunk chunk(driver, driver.import_fd(file), slot.size, nullptr);
  map_or_not(driver, address_of(slot.offset), slot.size, chunk.handle());
  mapped_.push_back({slot, std::move(chunk)});
}

void BorrowedMemory::allow() {
  for (std::size_t at = 0; at < mapped_.size();) {  // one call serves a run of chunks
    const std::size_t begin = mapped_[at].slot.offset;
    std::size_t end = begin;
    for (; at < mapped_.size() && mapped_[at].slot.offset == end; ++at) end += mapped_[at].slot.size;
    device_.driver->allow(address_of(begin), end - begin);
  }
}

bool BorrowedMemory::leave(bool idle) {
  core();  // throws in a forked child
  if (base_ == 0) return true;
  if (!idle) device_.wait_idle(kNever);
  return undo();
}

bool BorrowedMemory::undo() noexcept {
  Driver& driver = *device_.driver;
  bool all_gone = true;
  for (const Part& part : mapped_) {
    try {
      unmap_or_not(driver, address_of(part.slot.offset), part.slot.size);
    } catch (const DriverError&) {
      all_gone = false;
    }
  }
  mapped_.clear();
  try {
    if (all_gone && base_ != 0) driver.unreserve(base_, span_);
  } catch (const DriverError&) {
    // The addresses stay reserved; a process has enough of them.
  }
  base_ = 0;
  return all_gone;
}

}  // namespace memsaver
