// Ranges of bytes within a region, and what is common to several.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace memsaver {

struct Range {
  std::size_t offset;
  std::size_t size;
  std::size_t end() const { return offset + size; }
};
using Ranges = std::vector<Range>;  // by offset, without overlaps, unless said otherwise

std::size_t bytes_of(const Ranges& ranges);
Ranges sorted(Ranges ranges);
// What lies in both. Borders of either stay: ranges that touch are not joined.
Ranges intersect(const Ranges& one, const Ranges& other);

// Bytes that something holds true of. Touching ranges join.
class RangeSet {
 public:
  void add(Range range);
  bool covers(Range range) const;
  bool covers(const Ranges& ranges) const;
  std::size_t bytes() const;
  Ranges within(Range range) const;
  Ranges missing_from(const Ranges& ranges) const;  // what of `ranges` is not in the set

 private:
  std::map<std::size_t, std::size_t> ends_;  // offset -> end
};

}  // namespace memsaver
