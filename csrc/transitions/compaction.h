// Moves contents from sparsely used chunks to smaller ones, under the same addresses, so that a region with holes
// returns memory.
//
// The rules are those of a transition: the region is marked, no guarded launch is under way, the device is idle, and no
// other process is attached. A mapping cannot be replaced atomically, so nothing may access the region meanwhile.
// Allocations, entries and guarded launches that come meanwhile wait: see Region::Wanted.
#pragma once

#include <functional>

#include "regions/core.h"

namespace memsaver {

// Waits for the device and returns chunks without segments. If the region maps more than Region::bound(), it
// then moves contents, as far as free memory allows. `may_move` is called after
// the region is marked; it returns false if a thread is inside the region. A region that is not active, or to which
// others are attached, keeps its chunks. Throws WaitTimeoutError at the deadline, Error during a capture, DriverError.
// Contents and addresses are kept.
void trim(Region& region, const std::function<bool()>& may_move, Deadline deadline);

}  // namespace memsaver
