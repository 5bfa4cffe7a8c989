#include "base/ranges.h"

#include <algorithm>
#include <utility>

namespace memsaver {

std::size_t bytes_of(const Ranges& ranges) {
  std::size_t bytes = 0;
  for (const Range& range : ranges) bytes += range.size;
  return bytes;
}

Ranges sorted(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
  return ranges;
}

Ranges intersect(const Ranges& one, const Ranges& other) {
  Ranges found;
  if (one.empty() || other.empty()) return found;
  // A binary search skips the ranges before the overlap: one of the two is often short.
  const auto first = [](const Ranges& ranges, std::size_t offset) {
    return std::partition_point(ranges.begin(), ranges.end(),
                                [&](const Range& range) { return range.end() <= offset; });
  };
  auto a = first(one, other.front().offset);
  auto b = first(other, one.front().offset);
  while (a != one.end() && b != other.end()) {
    const std::size_t begin = std::max(a->offset, b->offset);
    const std::size_t end = std::min(a->end(), b->end());
    if (begin < end) found.push_back({begin, end - begin});
    if (a->end() < b->end())
      ++a;
    else
      ++b;
  }
  return found;
}

void RangeSet::add(Range range) {
  if (range.size == 0) return;
  std::size_t begin = range.offset, end = range.end();
  auto next = ends_.upper_bound(begin);
  if (next != ends_.begin() && std::prev(next)->second >= begin) {
    --next;
    begin = next->first;
  }
  while (next != ends_.end() && next->first <= end) {
    end = std::max(end, next->second);
    next = ends_.erase(next);
  }
  ends_[begin] = end;
}

bool RangeSet::covers(Range range) const {
  const auto next = ends_.upper_bound(range.offset);
  return range.size == 0 || (next != ends_.begin() && std::prev(next)->second >= range.end());
}

bool RangeSet::covers(const Ranges& ranges) const {
  return std::all_of(ranges.begin(), ranges.end(), [this](const Range& range) { return covers(range); });
}

std::size_t RangeSet::bytes() const {
  std::size_t bytes = 0;
  for (const auto& [begin, end] : ends_) bytes += end - begin;
  return bytes;
}

Ranges RangeSet::within(Range range) const {
  Ranges found;
  auto next = ends_.upper_bound(range.offset);
  if (next != ends_.begin()) --next;
  for (; next != ends_.end() && next->first < range.end(); ++next) {
    const std::size_t begin = std::max(next->first, range.offset);
    const std::size_t end = std::min(next->second, range.end());
    if (begin < end) found.push_back({begin, end - begin});
  }
  return found;
}

Ranges RangeSet::missing_from(const Ranges& ranges) const {
  Ranges found;
  for (const Range& range : ranges) {
    std::size_t at = range.offset;
    for (const Range& held : within(range)) {
      if (held.offset > at) found.push_back({at, held.offset - at});
      at = held.end();
    }
    if (at < range.end()) found.push_back({at, range.end() - at});
  }
  return found;
}

}  // namespace memsaver
