// The mappings of a region: chunks under its addresses, their access, and their return.
#include <utility>

#include "driver/checked_calls.h"
#include "regions/region.h"

namespace memsaver {
namespace {

constexpr std::size_t kMostFills = 64;  // of a run of chunks. More parts are filled by one call, and then copied over

}  // namespace

Region::Remapping::~Remapping() {
  lock_.unlock();
  region_.sweep();  // for frees that could not take the lock
}

void Region::sweep() {
  sweep_offered();
  for (;;) {
    {
      std::lock_guard lock(device.mutex);
      if (state_ != State::active || (dirty_.empty() && !stranded_)) return;
    }
    {
      const std::unique_lock only(mapping_, std::try_to_lock);
      if (!only) return;  // the holder sweeps afterwards
      sweep_with_lock();
    }
    std::lock_guard lock(device.mutex);  // checked after the release of mapping_: a free in between could not take it
    if (dirty_.empty()) return;
  }
}

void Region::sweep_all() {
  {
    std::lock_guard lock(device.mutex);
    for (const Slot& slot : entries_of(chunks_)) add_dirty_locked(slot);
  }
  sweep();
}

void Region::sweep_with_lock() {
  std::vector<Slot> empty;
  bool had_dirty = false;
  {
    std::lock_guard lock(device.mutex);
    if (state_ != State::active) return;
    Ranges dirty = std::exchange(dirty_, {});
    if (!dirty.empty()) had_dirty = true;
    if (stranded_.exchange(false)) dirty = entries_of(chunks_);
    for (const Range& range : sorted(std::move(dirty))) {
      for (const auto& [begin, chunk] : overlapping(chunks_, range))
        if ((empty.empty() || empty.back().offset < begin) && !segments_.any_within(begin, begin + chunk.size()))
          empty.push_back({begin, chunk.size()});
    }
  }
  std::vector<Chunk> freed;
  if (unmap(empty, &freed)) strand();
  freed.clear();  // returned to their source now
  if (had_dirty) device.resting.sweep_ended();
}

void Region::map(Slot slot, Chunk chunk) {
  map_or_not(*device.driver, slot.offset, slot.size, chunk.handle());
  std::lock_guard lock(device.mutex);
  mapped_ += slot.size;
  chunks_[slot.offset] = std::move(chunk);
}

// Chunks side by side, which one call of the driver can serve: one that crosses the end of a reservation is not
// defined. In a placed region each segment may have another one.
Ranges Region::runs(const std::vector<Slot>& slots) const {
  Ranges found;
  std::lock_guard lock(device.mutex);
  for (const Slot& slot : slots) {
    if (!found.empty() && found.back().end() == slot.offset && (!placed || segments_.has_inside(slot.offset)))
      found.back().size += slot.size;
    else
      found.push_back(slot);
  }
  return found;
}

bool Region::clean(const std::vector<Slot>& slots, const Ranges& contents) {
  std::vector<Slot> foreign;
  for (const Slot& slot : slots)
    if (fill != Fill::keep && chunks_.at(slot.offset).foreign()) foreign.push_back(slot);
  bool filled = false;
  for (const Range& run : runs(foreign)) {
    Ranges parts = RangeSet(intersect(contents, {run})).missing_from({run});
    if (parts.size() > kMostFills) parts = {run};
    for (const Range& part : parts) device.driver->fill(part.offset, part.size, 0);
    filled |= !parts.empty();
  }
  return filled;
}

// For chunks that are mapped outside of a transition. The caller holds mapping_, and waits for the mark without it:
// each unmapping waits for the work of the device first.
Driver::Ticket Region::clean_new(const std::vector<Slot>& slots) {
  try {
    Driver::Ticket cleaned;
    if (clean(slots, {})) cleaned = device.driver->mark(Direction::in);
    declare_clean(slots);
    return cleaned;
  } catch (...) {
    drain_copies(*device.driver);  // the caller unmaps them
    throw;
  }
}

void Region::allow_again() {
  const Remapping remapping(*this);
  {
    std::lock_guard lock(device.mutex);
    if (!stale_) return;
    device.has_stale = true;              // the next give_access() looks again
    if (state_ != State::active) return;  // the owning transition calls this again at its end
  }
  allow(slots());
  std::lock_guard lock(device.mutex);
  stale_ = false;
}

std::optional<DriverError> Region::unmap(const std::vector<Slot>& slots, std::vector<Chunk>* freed) {
  std::optional<DriverError> refusal;
  std::vector<Slot> mapped_ones;
  for (const Slot& slot : slots)
    if (chunks_.contains(slot.offset)) mapped_ones.push_back(slot);
  for (const Range& run : runs(mapped_ones)) {
    std::optional<DriverError> error;
    try {
      device.driver->unmap(run.offset, run.size);
    } catch (const DriverError& thrown) {
      error = thrown;
    }
    // After an error the call may have been made, also for some of the chunks alone.
    std::vector<Address> gone;
    for (const auto& [chunk, mapped] : overlapping(chunks_, run)) {
      if (!error || (!error->context_lost && !device.driver->is_mapped(chunk)))
        gone.push_back(chunk);
      else if (!refusal)
        refusal = error;
    }
    std::lock_guard lock(device.mutex);
    for (const Address chunk : gone) {
      auto found = chunks_.find(chunk);
      mapped_ -= found->second.size();
      if (freed != nullptr) {
        freed->push_back(std::move(found->second));
      } else {
        offered_bytes_ += found->second.size();
        device.offered += found->second.size();
        offered_[chunk] = std::move(found->second);
      }
      chunks_.erase(found);
    }
  }
  return refusal;
}

std::vector<Region::Placed> Region::chunks_under(Range range) const {
  std::lock_guard lock(device.mutex);
  std::vector<Placed> found;
  for (const auto& [begin, chunk] : overlapping(chunks_, range)) found.push_back({begin, chunk.size(), chunk.handle()});
  return found;
}

void Region::take_offered_locked(const std::vector<Slot>& slots, std::vector<Chunk>& freed) {
  for (const Slot& slot : slots) {
    const auto found = offered_.find(slot.offset);
    if (found == offered_.end()) continue;
    offered_bytes_ -= slot.size;
    device.offered -= slot.size;
    freed.push_back(std::move(found->second));
    offered_.erase(found);
  }
}

void Region::map_offered(const std::vector<Slot>& slots) {
  for (const Slot& slot : slots) {
    Handle handle = 0;
    {
      std::lock_guard lock(device.mutex);
      const auto found = offered_.find(slot.offset);
      if (found == offered_.end()) continue;
      handle = found->second.handle();
    }
    map_or_not(*device.driver, slot.offset, slot.size, handle);  // if it throws, the chunk is offered still
    std::lock_guard lock(device.mutex);
    chunks_.insert(offered_.extract(slot.offset));
    mapped_ += slot.size;
    offered_bytes_ -= slot.size;
    device.offered -= slot.size;
  }
}

void Region::sweep_offered() {
  std::vector<Slot> unused;
  std::vector<Chunk> freed;  // returned to their source without the lock
  std::lock_guard lock(device.mutex);
  if (state_ != State::paused || evicting_) return;
  for (const Slot& slot : entries_of(offered_))
    if (!segments_.any_within(slot.offset, slot.end())) unused.push_back(slot);
  take_offered_locked(unused, freed);
}

}  // namespace memsaver
