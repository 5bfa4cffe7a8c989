// The allocations of a region, by address: live or resting. Bookkeeping alone.
#pragma once

#include <cstddef>
#include <map>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class Segments {
 public:
  void add(Range segment) {  // live
    segments_[segment.offset] = {segment.size};
    live_bytes_ += segment.size;
  }
  bool rest(Address begin) {  // false: no live segment begins here
    const auto found = segments_.find(begin);
    if (found == segments_.end() || found->second.is_resting) return false;
    found->second.is_resting = true;
    live_bytes_ -= found->second.size;
    resting_bytes_ += found->second.size;
    return true;
  }
  Range erase(Address begin) {  // the segment exists
    const auto found = segments_.find(begin);
    const Range erased{begin, found->second.size};
    (found->second.is_resting ? resting_bytes_ : live_bytes_) -= erased.size;
    segments_.erase(found);
    return erased;
  }
  bool contains(Address begin) const { return segments_.contains(begin); }

  std::size_t live_bytes() const { return live_bytes_; }
  std::size_t resting_bytes() const { return resting_bytes_; }
  Ranges live() const { return joined(parts({kEverywhere})); }  // joined where they touch
  // Live, within `ranges`, not joined.
  Ranges parts(const Ranges& ranges) const {
    Ranges live;
    for (const auto& [begin, segment] : segments_)
      if (!segment.is_resting) live.push_back({begin, segment.size});
    return intersect(live, sorted(ranges));
  }
  Ranges all() const { return between(0, kEverywhere.end()); }  // resting ones too, not joined
  // Segments that overlap this range, whole.
  Ranges between(Address begin, Address end) const { return entries_of(overlapping(segments_, {begin, end - begin})); }
  bool any_within(Address begin, Address end) const { return !overlapping(segments_, {begin, end - begin}).empty(); }
  bool has_inside(Address at) const {  // whether a segment begins before this address and ends behind it
    const auto found = entry_at(segments_, at);
    return found != segments_.end() && found->first < at;
  }

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
