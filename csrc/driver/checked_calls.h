// Driver calls that may succeed and yet report an error of other work. is_mapped() decides whether the call was made.
#pragma once

#include "driver/driver.h"

namespace memsaver {

// If it throws DriverError, the range is not mapped.
inline void map_or_not(Driver& driver, Address address, std::size_t size, Handle handle) {
  try {
    driver.map(address, size, handle);
  } catch (const DriverError& error) {
    if (!error.context_lost && driver.is_mapped(address)) driver.unmap(address, size);
    throw;
  }
}

// For the range of one chunk. If it throws DriverError, it is still mapped.
inline void unmap_or_not(Driver& driver, Address address, std::size_t size) {
  try {
    driver.unmap(address, size);
  } catch (const DriverError& error) {
    if (error.context_lost || driver.is_mapped(address)) throw;
  }
}

}  // namespace memsaver
