#include "regions/attachment.h"

#include <utility>

namespace memsaver {

Attachment::Attachment(Device& device, std::uint64_t owner, int pid, std::uint64_t residence, const std::string& key,
                       Deadline deadline)
    : device_(device) {
  const AttachedMemory lent = device.shared->attach(owner, pid, residence, key, deadline);
  lease_ = lent.attachment;
  try {
    if (lent.parts.empty()) throw Error("the lease names no memory");
    const std::size_t first = lent.parts.front().offset;
    memory_.emplace(device, first, lent.parts.back().offset + lent.parts.back().size - first);
    for (const AttachedMemory::Part& part : lent.parts) memory_->map({part.offset, part.size}, part.file.get());
    memory_->allow();
  } catch (...) {
    end(!memory_ || memory_->undo());
    throw;
  }
}

Attachment::~Attachment() {
  if (usable() && lease_ != 0) end(memory_->give_up());
}

void Attachment::leave(bool idle) {
  core();  // throws in a forked child
  if (lease_ != 0) end(memory_->leave(idle));
}

// Memory that is still mapped could still be written to: the lease then lasts as long as the process.
void Attachment::end(bool all_gone) {
  if (const std::uint64_t lease = std::exchange(lease_, 0); all_gone && lease != 0) device_.shared->detach(lease);
}

}  // namespace memsaver
