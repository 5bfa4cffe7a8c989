// The free addresses of a region, in ranges that are reserved from the driver. The look-up takes logarithmic time in
// the number of free ranges.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class AddressSpace {
 public:
  void add(Range reserved);  // must touch no other range, so that no segment and no run of chunks spans two
  // Best fit, the lowest address first. nullopt: no free range is large enough.
  std::optional<Address> take(std::size_t size);
  void give(Range range);
  bool owns(Address address) const;
  std::size_t end_of_range(Address address) const;  // of the reserved range that holds this address
  std::size_t reserved_bytes() const { return reserved_bytes_; }
  std::size_t free_bytes() const { return free_bytes_; }
  const std::map<Address, std::size_t>& reserved() const { return reserved_; }

 private:
  void insert(Range range);
  void erase(std::map<Address, std::size_t>::iterator range);

  std::map<Address, std::size_t> reserved_;
  std::map<Address, std::size_t> free_;
  std::set<std::pair<std::size_t, Address>> by_size_;  // the same ranges as free_
  std::size_t reserved_bytes_ = 0;
  std::size_t free_bytes_ = 0;
};

}  // namespace memsaver
