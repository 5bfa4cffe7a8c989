// Maps addresses to the regions that own them, for all devices of the process.
#pragma once

#include <map>
#include <mutex>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class Region;

// No other lock is taken while its lock is held.
class AddressIndex {
 public:
  void add(Range range, Region& region) {
    std::lock_guard lock(mutex_);
    owned_[range.offset] = {range.size, &region};
  }
  void remove(Range range) {
    std::lock_guard lock(mutex_);
    owned_.erase(range.offset);
  }
  Region* at(Address address) const {  // null if no region owns it
    std::lock_guard lock(mutex_);
    const auto found = entry_at(owned_, address);
    return found == owned_.end() ? nullptr : found->second.region;
  }

 private:
  struct Owned {
    std::size_t size;
    Region* region;
  };
  mutable std::mutex mutex_;
  std::map<Address, Owned> owned_;
};

}  // namespace memsaver
