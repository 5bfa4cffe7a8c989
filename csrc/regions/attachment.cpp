#include "regions/attachment.h"

#include <unistd.h>

#include <utility>

#include "driver/checked_calls.h"

namespace memsaver {

Attachment::Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
                       Deadline deadline)
    : device_(device), memory_(device.shared->attach(owner, pid, residence, key, deadline)) {
  Driver& driver = *device_.driver;
  try {
    if (memory_.parts.empty()) throw Error("the lease names no memory");
    first_ = memory_.parts.front().offset;
    span_ = memory_.parts.back().offset + memory_.parts.back().size - first_;
    base_ = driver.reserve(span_);
    for (const AttachedMemory::Part& part : memory_.parts) {
      Chunk chunk(driver, driver.import_fd(part.file, part.size), part.size, nullptr);
      map_or_not(driver, address_of(part.offset), part.size, chunk.handle());
      mapped_.push_back({{part.offset, part.size}, std::move(chunk)});
      driver.allow(address_of(part.offset), part.size);
    }
  } catch (...) {
    undo();
    throw;
  }
  for (const AttachedMemory::Part& part : std::exchange(memory_.parts, {})) ::close(part.file);
}

Attachment::~Attachment() {
  if (!usable() || base_ == 0) return;
  try {
    // Bounded, and without a check for signals: this thread may hold the GIL.
    wait_idle(*device_.driver, device_.parts.gate, now() + kShortageWait, false);
    undo();
  } catch (const std::exception&) {
    // The device is busy, a capture is under way, or the context is dead: the memory stays mapped, and the lease ends
    // with the process.
    for (Part& part : mapped_) static_cast<void>(std::move(part.chunk).keep());
  }
}

void Attachment::leave() {
  core();  // throws in a forked child
  if (base_ == 0) return;
  device_.wait_idle(kNever);
  undo();
}

void Attachment::undo() noexcept {
  Driver& driver = *device_.driver;
  for (const AttachedMemory::Part& part : std::exchange(memory_.parts, {})) ::close(part.file);
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
  // Memory that is still mapped could still be written to: the lease then lasts as long as the process.
  if (all_gone) device_.shared->detach(memory_.attachment);
}

}  // namespace memsaver
