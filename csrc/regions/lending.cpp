#include "regions/lending.h"

#include <unistd.h>

#include <utility>

#include "driver/checked_calls.h"

namespace memsaver {

std::vector<Region::Placed> lend_chunks(Region& region, Range range, std::uint64_t residence, std::uint64_t lease,
                                        int pid) {
  const std::string name = "region '" + region.tag + "' of process " + std::to_string(::getpid());
  std::lock_guard lock(core().mutex);  // no transition marks the region meanwhile
  if (region.closed()) throw Error(name + " was closed");
  if (region.state() != State::active)
    throw RegionPausedError(name + " is " + name_of(region.state()), region.tag, name_of(region.state()));
  if (region.residence() != residence)
    throw Error(name + " was paused and resumed since the tensor was sent (residence " + std::to_string(residence) +
                ", now " + std::to_string(region.residence()) + "): send it again");
  if (region.sealed()) throw Error(name + " is frozen, and a copy of its contents is kept: thaw() it first");
  if (bytes_of(region.parts({range})) != range.size) throw Error(name + " no longer holds this tensor: send it again");
  region.lend(lease, pid);
  return region.chunks_under(range);
}

void end_lease(Region& region, std::uint64_t lease) {
  std::lock_guard lock(core().mutex);
  region.returned(lease);
  core().changed.notify_all();
}

BorrowedMemory::BorrowedMemory(Device& device, std::size_t first, std::size_t span)
    : device_(device), first_(first), span_(span), base_(device.driver->reserve(span)) {}

BorrowedMemory::~BorrowedMemory() {
  if (!usable() || base_ == 0) return;
  try {
    // Bounded, and without a check for signals: this thread may hold the GIL.
    wait_idle(*device_.driver, device_.parts.gate, now() + kShortageWait, false);
    unmap();
  } catch (const std::exception&) {
    // The device is busy, a capture is under way, or the context is dead: the memory stays mapped.
    for (auto& [slot, chunk] : mapped_) static_cast<void>(std::move(chunk).keep());
  }
}

void BorrowedMemory::map(Slot slot, int file) {
  if (slot.offset < first_ || slot.size > span_ || slot.offset - first_ > span_ - slot.size)
    throw BadArgument("a chunk of " + std::to_string(slot.size) + " bytes at " + std::to_string(slot.offset) +
                      " lies outside of the " + std::to_string(span_) + " bytes at " + std::to_string(first_));
  Driver& driver = *device_.driver;
  Chunk chunk(driver, driver.import_fd(file), slot.size, nullptr);
  map_or_not(driver, address_of(slot.offset), slot.size, chunk.handle());
  mapped_.emplace_back(slot, std::move(chunk));
}

bool BorrowedMemory::unmap() noexcept {
  Driver& driver = *device_.driver;
  bool all_gone = true;
  for (const auto& [slot, chunk] : mapped_) {
    try {
      unmap_or_not(driver, address_of(slot.offset), slot.size);
    } catch (const DriverError&) {
      all_gone = false;
    }
  }
  mapped_.clear();
  try {
    if (all_gone) driver.unreserve(base_, span_);
  } catch (const DriverError&) {
    // The addresses stay reserved; a process has enough of them.
  }
  base_ = 0;
  return all_gone;
}

}  // namespace memsaver
