// Maps addresses to the regions that own them, for all devices of the process.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class Region;

// No other lock is taken while its lock is held.
class AddressIndex {
 public:
  void add(Range range, Region& region);
  void remove(Range range);
  Region* at(Address address) const;  // null if no region owns it

 private:
  mutable std::mutex mutex_;
  std::map<Address, std::pair<std::size_t, Region*>> ranges_;
};

}  // namespace memsaver
