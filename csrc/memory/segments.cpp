#include "memory/segments.h"

#include <utility>

namespace memsaver {

void Segments::add(Range segment) {
  segments_[segment.offset] = {segment.size};
  live_bytes_ += segment.size;
}

bool Segments::rest(Address begin) {
  const auto found = segments_.find(begin);
  if (found == segments_.end() || found->second.is_resting) return false;
  found->second.is_resting = true;
  live_bytes_ -= found->second.size;
  resting_bytes_ += found->second.size;
  return true;
}

Range Segments::erase(Address begin) {
  const auto found = segments_.find(begin);
  const Range erased{begin, found->second.size};
  (found->second.is_resting ? resting_bytes_ : live_bytes_) -= erased.size;
  segments_.erase(found);
  return erased;
}

Ranges Segments::parts(const Ranges& ranges) const {
  Ranges live;
  for (const auto& [begin, segment] : segments_)
    if (!segment.is_resting) live.push_back({begin, segment.size});
  return intersect(live, sorted(ranges));
}

Ranges Segments::between(Address begin, Address end) const {
  Ranges found;
  for (const auto& [at, segment] : overlapping(segments_, {begin, end - begin})) found.push_back({at, segment.size});
  return found;
}

bool Segments::has_inside(Address at) const {
  const auto found = entry_at(segments_, at);
  return found != segments_.end() && found->first < at;
}

bool Segments::any_within(Address begin, Address end) const {
  return !overlapping(segments_, {begin, end - begin}).empty();
}

}  // namespace memsaver
