// Contents end to end, cut into blocks of one size: the last one may be shorter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class Blocks {
 public:
  static constexpr std::size_t kSize = 8 * kMiB;
  struct Piece {
    std::size_t offset;  // within the region
    std::size_t size;
    std::size_t block;
    std::size_t in_block;
  };

  explicit Blocks(Ranges runs) : runs_(std::move(runs)) {
    for (const Range& run : runs_) {
      positions_.push_back(bytes_);
      bytes_ += run.size;
    }
  }
  std::size_t count() const { return (bytes_ + kSize - 1) / kSize; }
  std::size_t bytes(std::size_t block) const { return std::min(kSize, bytes_ - block * kSize); }  // of contents

  // In the order of the region.
  std::vector<Piece> pieces(std::size_t block) const {
    const std::size_t begin = block * kSize, end = begin + bytes(block);
    auto run =
        static_cast<std::size_t>(std::upper_bound(positions_.begin(), positions_.end(), begin) - positions_.begin());
    std::vector<Piece> found;
    for (--run; run < positions_.size() && positions_[run] < end; ++run) {
      const std::size_t from = std::max(begin, positions_[run]);
      const std::size_t to = std::min(end, positions_[run] + runs_[run].size);
      found.push_back({runs_[run].offset + (from - positions_[run]), to - from, block, from - begin});
    }
    return found;
  }

  // The parts of these ranges that have contents.
  std::vector<Piece> cut(const Ranges& ranges) const {
    std::vector<Piece> found;
    std::size_t run = 0;
    for (const Range& part : intersect(runs_, ranges)) {
      while (runs_[run].end() <= part.offset) ++run;
      std::size_t at = positions_[run] + (part.offset - runs_[run].offset);
      for (std::size_t begin = part.offset; begin < part.end();) {
        const std::size_t size = std::min(part.end() - begin, kSize - at % kSize);
        found.push_back({begin, size, at / kSize, at % kSize});
        begin += size;
        at += size;
      }
    }
    return found;
  }

 private:
  const Ranges runs_;
  std::vector<std::size_t> positions_;  // of each run in the contents
  std::size_t bytes_ = 0;
};

}  // namespace memsaver
