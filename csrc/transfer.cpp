#include "transfer.h"

#include <algorithm>

namespace memsaver {

std::size_t copy_out(Driver& driver, Address base, const Backup& backup) {
  for (const Backup::Piece& piece : backup.pieces()) driver.copy_out(piece.host, base + piece.offset, piece.size);
  return backup.bytes();
}

std::size_t copy_in(Driver& driver, Address base, const Backup& backup, const std::vector<Range>& live) {
  std::size_t copied = 0;
  auto range = live.begin();
  for (const Backup::Piece& piece : backup.pieces()) {
    while (range != live.end() && range->offset + range->size <= piece.offset) ++range;
    for (auto at = range; at != live.end() && at->offset < piece.offset + piece.size; ++at) {
      const std::size_t begin = std::max(piece.offset, at->offset);
      const std::size_t end = std::min(piece.offset + piece.size, at->offset + at->size);
      driver.copy_in(base + begin, piece.host + (begin - piece.offset), end - begin);
      copied += end - begin;
    }
  }
  return copied;
}

bool drain_copies(Driver& driver) noexcept {
  constexpr int kAttempts = 2;  // a refused call is worth one more; a dead context has no copies left to wait for
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    try {
      driver.finish_copies();
      return true;
    } catch (const DriverError& error) {
      if (error.context_lost) return false;
    } catch (const std::exception&) {
    }
  }
  return true;
}

}  // namespace memsaver
