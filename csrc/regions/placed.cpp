// Segments of a region at addresses that another allocator has chosen.
#include <algorithm>
#include <utility>

#include "regions/region.h"

namespace memsaver {

std::vector<Chunk> Region::borrow(std::size_t size, Deadline shortage) {
  check_allocatable(size);
  device.resting.reap();
  const Deadline began = now();
  for (Effort effort = Effort::none;;) {
    const std::uint64_t seen = device.resting.given_back();
    Needs needs;
    for (std::size_t left = size; left > 0; left -= needs.back().bytes) needs.push_back(need(chunk_class(left)));
    const bool asks_others = effort == Effort::asks_others;
    auto request = device.source().ask(needs, asks_others ? shortage : now());
    static_cast<void>(asks_others ? gather_from_others(*request) : request->gather());
    try {
      std::vector<Chunk> chunks;
      for (std::size_t left = size; left > 0; left -= chunks.back().size())
        chunks.push_back(next_or_end(*request, chunk_class(left)));
      return chunks;
    } catch (const ChunkUnavailable&) {
      // The chunks so far return to the source.
    }
    request.reset();
    find_more(size, shortage, Deadline::min(), began, seen, effort);
  }
}

void Region::place(Range segment, std::vector<Chunk> chunks, bool may_begin_reservation) {
  Driver::Ticket cleaned;
  {
    const Remapping remapping(*this);
    check_allocatable(segment.size);  // a transition marks a region under the same lock
    end_stranded();
    sweep_with_lock();  // for a dropped segment at this address
    {
      std::lock_guard lock(device.mutex);
      if (may_begin_reservation)
        seams_.insert(segment.offset);
      else
        seams_.erase(segment.offset);
    }
    Mapping mapping(*this);
    Address at = segment.offset;
    for (Chunk& chunk : chunks) {
      const Slot slot{at, chunk.size()};
      at += slot.size;
      mapping.add(slot, std::move(chunk));
    }
    allow(mapping.slots());
    cleaned = clean_new(mapping.slots());
    device.parts.addresses.add(segment, *this);
    std::lock_guard lock(device.mutex);
    segments_.add(segment);
    mapping.commit();
  }
  try {
    if (cleaned) device.driver->wait(cleaned);
  } catch (...) {
    drop(segment);
    throw;
  }
}

bool Region::drop(Range segment) {
  const Remapping remapping(*this);  // outside of a transition the chunks are gone when this returns
  bool is_active = false;
  {
    std::lock_guard lock(device.mutex);
    const Ranges found = segments_.between(segment.offset, segment.end());
    if (found.size() != 1 || found.front().offset != segment.offset || found.front().size != segment.size) return false;
    switch (state_) {
      case State::draining:
      case State::pausing:
      case State::resuming: freed_meanwhile_.push_back(segment.offset); break;
      case State::active: is_active = true; [[fallthrough]];
      case State::paused:
      case State::lost: forget_locked(segment.offset); break;
    }
  }
  device.parts.addresses.remove(segment);
  if (is_active) sweep_with_lock();
  return true;
}

bool Region::touches(Range range) const {
  std::lock_guard lock(device.mutex);
  return segments_.any_within(range.offset, range.end()) || !overlapping(chunks_, range).empty();
}

}  // namespace memsaver
