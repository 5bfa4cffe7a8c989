#include "transitions/compaction.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "driver/checked_calls.h"
#include "transitions/transition.h"

namespace memsaver {
namespace {

struct Sparse {
  Slot slot;
  Ranges parts;  // parts in use, in whole pages
  std::size_t used;
};

// Chunks with an unused part, the largest unused part first.
std::vector<Sparse> sparse_chunks(const Region& region) {
  std::vector<Sparse> found;
  const Ranges live = region.live();
  for (const Slot& slot : region.slots()) {
    if (slot.size == kPage) continue;
    Sparse chunk{slot, {}, 0};
    for (const Range& part : intersect(live, {slot})) {
      const Address begin = round_down(part.offset, kPage), end = round_up(part.end(), kPage);
      if (!chunk.parts.empty() && chunk.parts.back().end() >= begin)
        chunk.parts.back().size = end - chunk.parts.back().offset;
      else
        chunk.parts.push_back({begin, end - begin});
    }
    chunk.used = bytes_of(chunk.parts);
    if (chunk.used < slot.size) found.push_back(std::move(chunk));
  }
  std::sort(found.begin(), found.end(),
            [](const Sparse& a, const Sparse& b) { return a.slot.size - a.used > b.slot.size - b.used; });
  return found;
}

// Addresses at which new chunks are filled, before they replace an old one.
class Scratch {
 public:
  Scratch(Driver& driver, std::size_t size) : driver_(driver), size_(size), base_(driver.reserve(size)) {}
  ~Scratch() {
    try {
      unmap();  // tries refused chunks again
      driver_.unreserve(base_, size_);
    } catch (const DriverError&) {
      // The addresses stay reserved; a process has enough of them.
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void fill(const Sparse& chunk, const std::vector<Region::Piece>& pieces) {
    const auto here = [&](Address address) { return base_ + (address - chunk.slot.offset); };
    try {
      for (const Region::Piece& piece : pieces) {
        const Slot slot{here(piece.slot.offset), piece.slot.size};
        map_or_not(driver_, slot.offset, slot.size, piece.chunk.handle());
        mapped_.push_back(slot);
        driver_.allow(slot.offset, slot.size);
      }
      for (const Range& part : chunk.parts) driver_.copy_within(here(part.offset), part.offset, part.size);
      driver_.wait(driver_.mark(Direction::in));
    } catch (...) {
      drain_copies(driver_);
      throw;
    }
    unmap();
  }

 private:
  void unmap() {
    for (; !mapped_.empty(); mapped_.pop_back()) unmap_or_not(driver_, mapped_.back().offset, mapped_.back().size);
  }

  Driver& driver_;
  const std::size_t size_;
  const Address base_;
  std::vector<Slot> mapped_;
};

// Chunks for the parts of a sparse chunk, in whole pages. Throws ChunkUnavailable.
std::vector<Region::Piece> pieces_for(Region& region, const Sparse& chunk) {
  const auto layout = [&] {
    return Layout({.wanted = chunk.parts,
                   .segments = chunk.parts,
                   .chunks = {},
                   .reserved = {chunk.slot},
                   .largest = chunk_class(chunk.slot.size - 1)});
  };
  Needs needs;
  for (const Range& place : Layout::planned(layout())) needs.push_back({place.size, place.size, place.size});
  std::vector<Region::Piece> pieces;
  const auto request = region.device.source().ask(needs, now());  // its end comes before that of the pieces
  request->gather();
  Layout steps = layout();
  while (const auto gap = steps.next()) {
    Chunk piece = request->next(gap->limit, gap->limit, false);
    steps.place(piece.size());
    pieces.push_back({{gap->at, piece.size()}, std::move(piece)});
  }
  return pieces;
}

// One pass over the sparse chunks, up to a use of the region by others. True: memory was returned, so another pass may
// move more.
bool compact(Region& region, std::optional<Scratch>& scratch) {
  const std::size_t bound = region.bound();
  bool moved = false;
  for (const Sparse& chunk : sparse_chunks(region)) {
    if (region.mapped_bytes() <= bound) return false;
    std::vector<Region::Piece> pieces;
    try {
      pieces = pieces_for(region, chunk);
    } catch (const ChunkUnavailable&) {
      continue;  // another chunk may need less
    }
    if (!chunk.parts.empty()) {
      if (!scratch) scratch.emplace(*region.device.driver, kChunkClasses.front());
      scratch->fill(chunk, pieces);
    }
    const Chunk former = region.exchange(chunk.slot.offset, std::move(pieces));
    moved = true;
    if (region.is_wanted()) break;
  }
  return moved;
}

// Until the uses of the region have ended that the move has kept waiting.
void wait_for_users(const Region& region, Deadline deadline) {
  const Deadline until = Clock::now() + (deadline - now());  // they take real time, also where the clock is virtual
  std::unique_lock lock(core().mutex);
  core().changed.wait_until(lock, until, [&] { return !region.is_wanted() || waiting_is_over; });
}

}  // namespace

void trim(Region& region, const std::function<bool()>& may_move, Deadline deadline) {
  Device& device = region.device;
  const auto settle_device = [&] {
    const std::uint64_t freed = device.resting.frees();
    device.wait_idle(deadline);
    device.resting.reap(freed);
  };
  settle_device();
  // No chunk of a placed region has an unused part. Its bytes exceed the bound for moments, while a piece is mapped,
  // and the other allocator cannot use a segment any more if the next piece of it is refused.
  bool more = !region.placed;
  std::optional<Scratch> scratch;
  while (more && region.state() == State::active && region.mapped_bytes() > region.bound()) {
    more = false;
    Transition hold({&region}, {}, {.whole = deadline}, true);
    try {
      hold.begin();
      if (!hold.pausing().empty() && may_move()) {
        settle_device();
        do more = compact(region, scratch);
        while (more && !region.is_wanted());
      }
    } catch (const AttachedError&) {
      // Another process uses these chunks, so they stay.
    } catch (const DriverError& error) {
      hold.abort();
      if (error.context_lost) core().mark_lost(device);
      throw;
    }
    hold.abort();
    if (more) wait_for_users(region, std::min(deadline, now() + kShortageWait));
  }
  device.source().settle();
}

}  // namespace memsaver
