// Leases of other processes on chunks of a region. They end by Region::returned().
#pragma once

#include <vector>

#include "regions/core.h"

namespace memsaver {

// Records a lease on the chunks under these ranges, which must be segments in use. Throws RegionPausedError if the
// region is not active, and Error if its residence is another one, if a copy of its contents is kept, or if the ranges
// were freed. Nothing is recorded then.
std::vector<Placed> lend_chunks(Region& region, const Ranges& ranges, std::uint64_t residence, std::uint64_t lease,
                                int pid);

// Ends a lease, and wakes the pauses that wait for it. Unknown leases are ignored.
void end_lease(Region& region, std::uint64_t lease);

}  // namespace memsaver
