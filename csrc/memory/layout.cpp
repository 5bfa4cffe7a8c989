#include "memory/layout.h"

#include <algorithm>

namespace memsaver {
namespace {

// The first range that ends beyond an address.
Ranges::const_iterator first_beyond(const Ranges& ranges, Address address) {
  return std::partition_point(ranges.begin(), ranges.end(), [&](const Range& range) { return range.end() <= address; });
}

}  // namespace

std::size_t Layout::unused_within(Address begin, Address end) const {
  std::size_t bytes = end - begin;
  for (auto segment = first_beyond(in_.segments, begin); segment != in_.segments.end() && segment->offset < end;
       ++segment)
    bytes -= std::min<Address>(end, segment->end()) - std::max<Address>(begin, segment->offset);
  return bytes;
}

bool Layout::within_one_segment(Address begin, Address end) const {
  const auto segment = first_beyond(in_.segments, begin);
  return segment != in_.segments.end() && segment->offset <= begin && segment->end() >= end;
}

std::optional<Layout::Gap> Layout::next() {
  for (; wanted_ < in_.wanted.size(); ++wanted_) {
    const Range& wanted = in_.wanted[wanted_];
    at_ = std::max<Address>(at_, round_down(wanted.offset, kPage));
    while (at_ < wanted.end()) {
      while (chunk_ < in_.chunks.size() && in_.chunks[chunk_].end() <= at_) ++chunk_;
      const bool has_next = chunk_ < in_.chunks.size();
      if (has_next && in_.chunks[chunk_].offset <= at_) {
        at_ = in_.chunks[chunk_].end();
        continue;
      }
      while (in_.reserved[range_].end() <= at_) ++range_;
      Address border = in_.reserved[range_].end();
      if (has_next) border = std::min<Address>(border, in_.chunks[chunk_].offset);
      const std::size_t room = border - at_;
      const std::size_t needed = std::min<std::size_t>(room, round_up(wanted.end() - at_, kPage));
      if (in_.largest == 0) return Gap{at_, needed, needed};
      // A chunk of the largest class serves one segment alone. If segments shared it, it could be returned only with
      // the last of them.
      const auto fits = [&](std::size_t size) {
        return size <= in_.largest && (size < kChunkClasses.front() || within_one_segment(at_, at_ + size));
      };
      std::size_t limit = chunk_class(needed);
      if (limit == kChunkClasses.front() && !within_one_segment(at_, at_ + limit)) limit = kChunkClasses[1];
      // A larger chunk may reach beyond the range if the addresses are free and the slack stays within the allowance.
      for (const std::size_t size : kChunkClasses) {
        if (size <= limit) break;
        if (size > room || !fits(size)) continue;
        if (in_.slack + slack_placed_ + unused_within(at_, at_ + size) > in_.allowance) continue;
        limit = size;
        break;
      }
      return Gap{at_, limit, room};
    }
  }
  return std::nullopt;
}

void Layout::place(std::size_t size) {
  slack_placed_ += unused_within(at_, at_ + size);
  at_ += size;
}

Ranges Layout::planned(Layout layout) {
  Ranges places;
  while (const auto gap = layout.next()) {
    places.push_back({gap->at, gap->limit});
    layout.place(gap->limit);
  }
  return places;
}

}  // namespace memsaver
