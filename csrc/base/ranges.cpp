#include "base/ranges.h"

#include <algorithm>

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

Ranges joined(const Ranges& ranges) {
  Ranges found;
  for (const Range& range : ranges) {
    if (!found.empty() && found.back().end() == range.offset)
      found.back().size += range.size;
    else
      found.push_back(range);
  }
  return found;
}

std::vector<Ranges> in_batches(const Ranges& ranges, std::size_t least) {
  std::vector<Ranges> batches;
  for (const Range& range : ranges) {
    const bool joins =
        !batches.empty() && batches.back().back().end() == range.offset && bytes_of(batches.back()) < least;
    if (!joins) batches.emplace_back();
    batches.back().push_back(range);
  }
  return batches;
}

Ranges spans_of(const std::vector<Ranges>& batches) {
  Ranges spans;
  for (const Ranges& batch : batches) spans.push_back({batch.front().offset, bytes_of(batch)});
  return spans;
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
  const std::size_t before = begin - std::min<std::size_t>(begin, 1);
  const auto touching = overlapping(sizes_, {before, end + 1 - before});
  for (const auto& [offset, size] : touching) {
    begin = std::min(begin, offset);
    end = std::max(end, offset + size);
  }
  sizes_.erase(touching.begin(), touching.end());
  sizes_[begin] = end - begin;
}

Ranges RangeSet::within(Range range) const {
  Ranges found;
  for (const auto& [offset, size] : overlapping(sizes_, range)) {
    const std::size_t begin = std::max(offset, range.offset);
    found.push_back({begin, std::min(offset + size, range.end()) - begin});
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

void FreeRanges::add(Range range) {
  if (range.size == 0) return;
  sizes_[range.offset] = range.size;
  by_size_.emplace(range.size, range.offset);
  bytes_ += range.size;
}

FreeRanges::Sizes::iterator FreeRanges::erase(Sizes::iterator range) {
  by_size_.erase({range->second, range->first});
  bytes_ -= range->second;
  return sizes_.erase(range);
}

void FreeRanges::put(Range range) {
  auto next = sizes_.lower_bound(range.offset);
  if (next != sizes_.end() && next->first == range.end()) {
    range.size += next->second;
    next = erase(next);
  }
  if (next != sizes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == range.offset) {
      range = {before->first, before->second + range.size};
      erase(before);
    }
  }
  add(range);
}

std::optional<Range> FreeRanges::take(std::size_t size, bool whole) {
  auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end()) {
    if (whole || by_size_.empty()) return std::nullopt;
    --best;
  }
  const Range taken{best->second, std::min(size, best->first)};
  take_at(taken);
  return taken;
}

bool FreeRanges::take_at(Range range) {
  const auto entry = entry_at(sizes_, range.offset);
  if (entry == sizes_.end()) return false;
  const Range found{entry->first, entry->second};
  if (found.end() < range.end()) return false;
  erase(entry);
  add({found.offset, range.offset - found.offset});
  add({range.end(), found.end() - range.end()});
  return true;
}

}  // namespace memsaver
