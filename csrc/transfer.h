// Moves contents between device and host.
#pragma once

#include <vector>

#include "backup.h"
#include "driver.h"

namespace memsaver {

// Both queue asynchronous copies; the bytes are there, and the memory may be reused, after Driver::finish_copies().
std::size_t copy_out(Driver& driver, Address base, const Backup& backup);

// Copies back what lies within `live` (sorted): ranges freed since the backup have no memory to be copied to.
std::size_t copy_in(Driver& driver, Address base, const Backup& backup, const std::vector<Range>& live);

// Waits for queued copies on the way out of a failure, so that none touches memory that is about to go. False: the
// device's context is dead.
bool drain_copies(Driver& driver) noexcept;

}  // namespace memsaver
