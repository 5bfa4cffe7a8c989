#include "attachment.h"

#include <unistd.h>

#include <utility>

namespace memsaver {

Attachment::Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
                       Deadline deadline)
    : device_(device), lease_(device.shared->attach(owner, pid, residence, key, deadline)) {
  Driver& driver = *device_.driver;
  try {
    if (lease_.parts.empty()) throw Error("the lease names no memory");
    first_ = lease_.parts.front().offset;
    span_ = lease_.parts.back().offset + lease_.parts.back().size - first_;
    base_ = driver.reserve(span_);
    for (const Lease::Part& part : lease_.parts) {
      Chunk chunk(driver, driver.import_fd(part.file, part.size), part.size, nullptr);
      driver.map(address_of(part.offset), part.size, chunk.handle());
      mapped_.push_back({{part.offset, part.size}, std::move(chunk)});
      driver.allow(address_of(part.offset), part.size);
    }
  } catch (...) {
    undo();
    throw;
  }
  for (const Lease::Part& part : std::exchange(lease_.parts, {})) ::close(part.file);
}

Attachment::~Attachment() {
  if (!usable()) return;
  try {
    leave();
  } catch (const Error&) {
    // A capture is under way, or the context is dead: the memory stays mapped, and the lease ends with the process.
    for (Part& part : mapped_) static_cast<void>(std::move(part.chunk).keep());
  }
}

void Attachment::leave() {
  if (base_ == 0) return;
  core().synchronize(device_);
  undo();
}

void Attachment::undo() noexcept {
  Driver& driver = *device_.driver;
  for (const Lease::Part& part : std::exchange(lease_.parts, {})) ::close(part.file);
  bool all_gone = true;
  for (const Part& part : mapped_) {
    try {
      driver.unmap(address_of(part.slot.offset), part.slot.size);
    } catch (const DriverError&) {
      all_gone = false;
    }
  }
  mapped_.clear();
  try {
    if (all_gone && base_ != 0) driver.unreserve(base_, span_);
  } catch (const DriverError&) {
    // Addresses are lost, and there are plenty.
  }
  base_ = 0;
  // What could not be unmapped could still be written to: the lease then lasts as long as the process.
  if (all_gone) device_.shared->detach(lease_.number);
}

}  // namespace memsaver
