#include "backup/blocks.h"

#include <algorithm>
#include <utility>

namespace memsaver {

Blocks::Blocks(Ranges runs) : runs_(std::move(runs)) {
  for (const Range& run : runs_) {
    positions_.push_back(bytes_);
    bytes_ += run.size;
  }
}

std::size_t Blocks::bytes(std::size_t block) const { return std::min(kSize, bytes_ - block * kSize); }

std::vector<Blocks::Piece> Blocks::pieces(std::size_t block) const {
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

std::vector<Blocks::Piece> Blocks::cut(const Ranges& ranges) const {
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

}  // namespace memsaver
