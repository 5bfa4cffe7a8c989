// The allocations of a region, by address: live or resting. Bookkeeping alone.
#pragma once

#include <cstddef>
#include <map>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class Segments {
 public:
  void add(Range segment);     // live
  bool rest(Address begin);    // false: no live segment begins here
  Range erase(Address begin);  // the segment exists
  bool contains(Address begin) const { return segments_.contains(begin); }

  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t resting_bytes() const { return resting_bytes_; }
  Ranges live() const { return joined(parts({kEverywhere})); }  // joined where they touch
  Ranges parts(const Ranges& ranges) const;                     // live, within `ranges`, not joined
  Ranges all() const { return between(0, kEverywhere.end()); }  // resting ones too, not joined
  Ranges between(Address begin, Address end) const;             // segments that overlap this range, whole
  bool any_within(Address begin, Address end) const;
  bool has_inside(Address at) const;  // whether a segment begins before this address and ends behind it

 private:
  struct Segment {
    std::size_t size;
    bool is_resting = false;
  };
  std::map<Address, Segment> segments_;
  std::size_t live_bytes_ = 0;
  std::size_t resting_bytes_ = 0;
};

}  // namespace memsaver
