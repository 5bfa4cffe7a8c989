// Ranges of bytes within a region, and sets of them.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <utility>
#include <vector>

namespace memsaver {

struct Range {
  std::size_t offset;
  std::size_t size;
  std::size_t end() const { return offset + size; }
};
using Ranges = std::vector<Range>;  // by offset, without overlaps, unless said otherwise
inline constexpr Range kEverywhere{0, static_cast<std::size_t>(-1)};

std::size_t bytes_of(const Ranges& ranges);
Ranges sorted(Ranges ranges);
Ranges joined(const Ranges& ranges);  // those that touch
// Neighbouring ranges together, up to the first that reaches `least` bytes; and the spans of these.
std::vector<Ranges> in_batches(const Ranges& ranges, std::size_t least);
Ranges spans_of(const std::vector<Ranges>& batches);
// The intersection. Borders of both are kept: ranges that touch are not joined.
Ranges intersect(const Ranges& one, const Ranges& other);

template <typename Value>
std::size_t size_of(const Value& value) {
  if constexpr (std::integral<Value>)
    return value;
  else if constexpr (requires { value.size(); })
    return value.size();
  else
    return value.size;
}

// The entries that overlap a range, of a map by first addresses whose values have sizes and which do not overlap.
template <typename Map>
auto overlapping(Map& map, Range range) {
  auto first = map.upper_bound(range.offset);
  if (first != map.begin() && std::prev(first)->first + size_of(std::prev(first)->second) > range.offset) --first;
  return std::ranges::subrange(first, range.size == 0 ? first : map.lower_bound(range.end()));
}

// The ranges of such entries.
Ranges entries_of(const auto& entries) {
  Ranges found;
  for (const auto& [begin, value] : entries) found.push_back({begin, size_of(value)});
  return found;
}

// The entry of such a map that holds an address; end() if there is none.
template <typename Map>
auto entry_at(Map& map, std::size_t address) {
  const auto found = overlapping(map, {address, 1});
  return found.empty() ? map.end() : found.begin();
}

// A set of bytes. Touching ranges are joined.
class RangeSet {
 public:
  RangeSet() = default;
  explicit RangeSet(const Ranges& ranges) { add(ranges); }
  void add(Range range);
  void add(const Ranges& ranges) {
    for (const Range& range : ranges) add(range);
  }
  bool covers(Range range) const {
    const auto entry = entry_at(sizes_, range.offset);
    return range.size == 0 || (entry != sizes_.end() && entry->first + entry->second >= range.end());
  }
  bool covers(const Ranges& ranges) const {
    return std::all_of(ranges.begin(), ranges.end(), [this](const Range& range) { return covers(range); });
  }
  std::size_t bytes() const {
    std::size_t bytes = 0;
    for (const auto& [offset, size] : sizes_) bytes += size;
    return bytes;
  }
  Ranges within(Range range) const;
  Ranges missing_from(const Ranges& ranges) const;  // the parts of `ranges` that are not in the set

 private:
  std::map<std::size_t, std::size_t> sizes_;
};

// A set of free bytes, to take from by best fit. Touching ranges are joined. Every call takes logarithmic time.
class FreeRanges {
 public:
  void put(Range range);  // no byte of it is in the set
  // The begin of the smallest range that holds `size`, of the lowest of equal ones. If there is none: the whole largest
  // range, or nullopt if `whole`.
  std::optional<Range> take(std::size_t size, bool whole = true);
  bool take_at(Range range);  // takes exactly this range; false if a part of it is not free
  std::size_t bytes() const { return bytes_; }

 private:
  using Sizes = std::map<std::size_t, std::size_t>;
  void add(Range range);
  Sizes::iterator erase(Sizes::iterator range);

  Sizes sizes_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // size and offset of the same ranges
  std::size_t bytes_ = 0;
};

}  // namespace memsaver
