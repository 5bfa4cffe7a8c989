// The chunks that a region needs, and their places: a pure function of the segments and the mapped chunks.
//
// A source may give smaller chunks than the layout plans, so the layout is computed in steps: next() returns the place
// and the largest size of the next chunk, place() takes its actual size.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include "base/ranges.h"
#include "memory/chunk.h"

namespace memsaver {

class Layout {
 public:
  struct Input {
    Ranges wanted;              // ranges that need memory; touching ones joined
    Ranges segments;            // all segments near them, not joined
    Ranges chunks;              // chunks that are mapped
    Ranges reserved;            // ranges of addresses; no chunk may cross their borders
    std::size_t largest;        // class of chunk; 0: one chunk for each range of `wanted`, of any size
    std::size_t slack = 0;      // mapped bytes that no segment uses
    std::size_t allowance = 0;  // the limit of slack for chunks that reach beyond `wanted`
  };
  struct Gap {
    Address at;
    std::size_t limit;  // the largest useful chunk here
    std::size_t room;   // until the next chunk, or the end of the addresses
  };

  explicit Layout(Input input) : in_(std::move(input)) {}
  std::optional<Gap> next();             // nullopt: all of `wanted` has memory
  void place(std::size_t size);          // places a chunk at the last gap
  static Ranges planned(Layout layout);  // the places, if every chunk has its largest size

 private:
  std::size_t unused_within(Address begin, Address end) const;
  bool within_one_segment(Address begin, Address end) const;

  Input in_;
  std::size_t wanted_ = 0, chunk_ = 0, range_ = 0;  // indices of the next of each
  Address at_ = 0;
  std::size_t slack_placed_ = 0;
};

}  // namespace memsaver
