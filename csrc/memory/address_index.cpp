#include "memory/address_index.h"

namespace memsaver {

void AddressIndex::add(Range range, Region& region) {
  std::lock_guard lock(mutex_);
  ranges_[range.offset] = {range.size, &region};
}

void AddressIndex::remove(Range range) {
  std::lock_guard lock(mutex_);
  ranges_.erase(range.offset);
}

Region* AddressIndex::at(Address address) const {
  std::lock_guard lock(mutex_);
  const auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return nullptr;
  const auto& [begin, range] = *std::prev(after);
  return address < begin + range.first ? range.second : nullptr;
}

}  // namespace memsaver
