// Torch's default pools as regions.
#pragma once

#include <string>

#include "regions/region.h"

namespace memsaver {

// Takes the calls of the CUDA driver by torch's library at this path. Later calls return the same result: the reason
// why they cannot be taken; empty: they are. Throws DriverError if there is no CUDA driver.
std::string bind_default_pools(const std::string& library);
// From now on torch's pieces on the region's device are segments of this region, which is placed.
void add_default_pool(Region& region);
Region* default_pool_on(int ordinal);  // the region of a CUDA device; null: none

}  // namespace memsaver
