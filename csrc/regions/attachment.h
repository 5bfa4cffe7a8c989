// Memory of another client of the shared pool, mapped in this process as long as the broker's lease is held.
#pragma once

#include <optional>
#include <string>

#include "regions/borrowed.h"

namespace memsaver {

class Attachment {
 public:
  // `key`: as for SharedPool::attach(). Throws the errors of SharedPool::attach(), and DriverError.
  Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
             Deadline deadline);
  ~Attachment();
  Attachment(const Attachment&) = delete;
  Attachment& operator=(const Attachment&) = delete;

  const BorrowedMemory& memory() const { return *memory_; }
  // Waits for the device, unless `idle`, unmaps, and ends the lease. Throws Error during a capture; nothing has changed
  // then.
  void leave(bool idle);

 private:
  void end(bool all_gone);

  Device& device_;
  std::uint64_t lease_ = 0;  // 0: it has ended
  std::optional<BorrowedMemory> memory_;
};

}  // namespace memsaver
