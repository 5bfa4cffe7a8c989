// Contents end to end, cut into blocks of one size: the last one may be shorter.
#pragma once

#include <cstddef>
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

  explicit Blocks(Ranges runs);
  std::size_t count() const { return (bytes_ + kSize - 1) / kSize; }
  std::size_t bytes(std::size_t block) const;          // of contents
  std::vector<Piece> pieces(std::size_t block) const;  // in the order of the region
  std::vector<Piece> cut(const Ranges& ranges) const;  // the parts of these ranges that have contents

 private:
  const Ranges runs_;
  std::vector<std::size_t> positions_;  // of each run in the contents
  std::size_t bytes_ = 0;
};

}  // namespace memsaver
