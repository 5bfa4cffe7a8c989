#include "memory/address_space.h"

namespace memsaver {

void AddressSpace::insert(Range range) {
  free_[range.offset] = range.size;
  by_size_.emplace(range.size, range.offset);
}

void AddressSpace::erase(std::map<Address, std::size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

void AddressSpace::add(Range reserved) {
  reserved_[reserved.offset] = reserved.size;
  reserved_bytes_ += reserved.size;
  free_bytes_ += reserved.size;
  insert(reserved);
}

std::optional<Address> AddressSpace::take(std::size_t size) {
  const auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [free_size, address] = *best;
  erase(free_.find(address));
  if (free_size > size) insert({address + size, free_size - size});
  free_bytes_ -= size;
  return address;
}

void AddressSpace::give(Range range) {
  free_bytes_ += range.size;
  // Reserved ranges do not touch, so touching free ranges belong to the same one.
  const auto next = free_.find(range.end());
  if (next != free_.end()) {
    range.size += next->second;
    erase(next);
  }
  auto before = free_.lower_bound(range.offset);
  if (before != free_.begin()) {
    --before;
    if (before->first + before->second == range.offset) {
      range = {before->first, before->second + range.size};
      erase(before);
    }
  }
  insert(range);
}

bool AddressSpace::owns(Address address) const {
  const auto after = reserved_.upper_bound(address);
  return after != reserved_.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

std::size_t AddressSpace::end_of_range(Address address) const {
  const auto range = std::prev(reserved_.upper_bound(address));
  return range->first + range->second;
}

}  // namespace memsaver
