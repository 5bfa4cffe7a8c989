// Ranges of bytes within a region, and sets of them.
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
// The intersection. Borders of both are kept: ranges that touch are not joined.
Ranges intersect(const Ranges& one, const Ranges& other);

// A set of bytes. Touching ranges are joined.
class RangeSet {
 public:
  void add(Range range);
  bool covers(Range range) const;
  bool covers(const Ranges& ranges) const;
  std::size_t bytes() const;
  Ranges within(Range range) const;
  Ranges missing_from(const Ranges& ranges) const;  // the parts of `ranges` that are not in the set

 private:
  std::map<std::size_t, std::size_t> ends_;  // offset -> end
};

}  // namespace memsaver
