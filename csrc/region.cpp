#include "region.h"

#include <algorithm>
#include <utility>

namespace memsaver {
namespace {

constexpr std::size_t kAlignment = 512;  // what torch's own allocator promises
constexpr std::size_t kLeastSpan = std::size_t{16} << 30;
constexpr std::size_t kSpanPerDevice = 4;  // addresses are free: leave room for what fragmentation strands
constexpr std::size_t kAllowance = 48 * kMiB;
constexpr std::size_t kNoneAllowed = std::size_t{1} << 60;  // slack beyond any allowance

// Bytes of a range in which a map of things by offset has nothing.
template <typename Things, typename SizeOf>
std::size_t uncovered(const Things& things, std::size_t begin, std::size_t end, SizeOf size_of) {
  std::size_t bytes = end - begin;
  auto thing = things.upper_bound(begin);
  if (thing != things.begin()) --thing;
  for (; thing != things.end() && thing->first < end; ++thing) {
    const std::size_t from = std::max(begin, thing->first);
    const std::size_t to = std::min(end, thing->first + size_of(thing->second));
    if (to > from) bytes -= to - from;
  }
  return bytes;
}

std::size_t span_on(Driver& driver) {
  return round_up(std::max(kLeastSpan, kSpanPerDevice * driver.memory().total), kPage);
}

}  // namespace

Region::Region(std::string region_tag, Device& on_device, Options options)
    : tag(std::move(region_tag)),
      device(on_device),
      policy(options.policy),
      frozen(options.frozen),
      fill(options.fill),
      span(span_on(*on_device.driver)),
      base(on_device.driver->reserve(span)) {
  addresses_[0] = span;
}

// Addresses: first fit, so that freed ranges (still mapped, often) are used before new ones. Side by side whatever the
// sizes: torch's own are whole pages, and any other alignment would waste up to half of what it skips.
std::size_t Region::take_addresses(std::size_t size) {
  for (const auto& [offset, free_size] : addresses_) {
    if (size > free_size) continue;
    const std::size_t begin = offset;
    const std::size_t rest = free_size - size;
    addresses_.erase(begin);
    if (rest > 0) addresses_[begin + size] = rest;
    return begin;
  }
  throw Error("region '" + tag + "' has no free addresses left for " + std::to_string(size) + " bytes, of " +
              std::to_string(span));
}

void Region::give_addresses(std::size_t offset, std::size_t size) {
  auto next = addresses_.lower_bound(offset);
  if (next != addresses_.end() && next->first == offset + size) {
    size += next->second;
    next = addresses_.erase(next);
  }
  if (next != addresses_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  addresses_[offset] = size;
}

void Region::check_allocatable(std::size_t size) const {
  const std::string wanted = "it cannot take an allocation of " + std::to_string(size) + " bytes";
  if (state != State::active)
    throw RegionPausedError("region '" + tag + "' is " + name_of(state) + ": " + wanted, tag, name_of(state));
  if (sealed()) throw Error("region '" + tag + "' is frozen and its contents are copied: " + wanted + " before thaw()");
}

std::size_t Region::allocate(std::size_t size, std::unique_lock<std::mutex>& held) {
  check_allocatable(size);
  reap(0);
  const std::size_t wanted = size;
  size = round_up(std::max<std::size_t>(size, 1), kAlignment);
  if (size > span) {
    held.unlock();
    throw out_of_memory(*device.driver, device.source(), wanted, 0);
  }
  const std::size_t offset = take_addresses(size);  // nobody else's from here on, and in no segment yet
  try {
    for (bool snug = false;;) {
      const Needs needs = needs_of({offset, size}, snug);
      held.unlock();
      auto request = device.source().ask(needs, Clock::now());
      const bool all = request->gather();
      held.lock();
      check_allocatable(size);
      try {
        map_new({offset, size}, *request, snug);
        break;
      } catch (const ChunkUnavailable&) {
        if (all) continue;  // the layout has changed meanwhile: another thread freed a chunk that was counted on
      }
      if (!snug && device.pooled) {  // which gives all that is asked for, or nothing
        snug = true;
        continue;
      }
      held.unlock();
      request.reset();  // what it got counts as free
      throw out_of_memory(*device.driver, device.source(), wanted, 0);
    }
  } catch (...) {
    if (!held.owns_lock()) held.lock();
    give_addresses(offset, size);
    throw;
  }
  if (policy == Policy::host && core().backup_ahead) device.arena.grow_ahead(device.to_back_up);
  return offset;
}

// Puts memory under a segment to be, with its bytes counted as in use; they stay so unless this throws.
void Region::lay_out_new(Range segment, const Choose& choose, const Place& place, bool snug) {
  segments_[segment.offset] = {segment.size, false};
  count(static_cast<std::ptrdiff_t>(segment.size));
  try {
    const std::size_t missing = unmapped_within(segment.offset, segment.end());
    std::size_t slack = snug ? kNoneAllowed : mapped_ - (allocated_ + resting_bytes_ - missing);
    lay_out_range(0, segment, choose, place, slack);
  } catch (...) {
    uncount_new(segment);
    throw;
  }
}

void Region::uncount_new(Range segment) {
  count(-static_cast<std::ptrdiff_t>(segment.size));
  segments_.erase(segment.offset);
}

// What map_new() will ask for, were each chunk as large as may be.
Needs Region::needs_of(Range segment, bool snug) {
  Needs needs;
  lay_out_new(
      segment,
      [&](std::size_t limit, std::size_t) {
        needs.push_back(need(limit));
        return Choice{limit, Chunk()};
      },
      [](Slot, Chunk) {}, snug);
  uncount_new(segment);
  return needs;
}

void Region::map_new(Range segment, ChunkRequest& request, bool snug) {
  Mapping mapping(*this);
  lay_out_new(
      segment,
      [&](std::size_t limit, std::size_t) {
        Chunk chunk = request.next(limit, largest_chunk(), false);
        return Choice{chunk.size(), std::move(chunk)};
      },
      [&](Slot slot, Chunk chunk) { mapping.add(slot, std::move(chunk)); }, snug);
  try {
    allow(mapping.slots());
  } catch (...) {
    uncount_new(segment);
    throw;
  }
  mapping.commit();
}

void Region::count(std::ptrdiff_t bytes) {
  allocated_ += static_cast<std::size_t>(bytes);
  if (policy == Policy::host) device.to_back_up += static_cast<std::size_t>(bytes);
}

void Region::erase(std::size_t offset) {
  const auto found = segments_.find(offset);
  const std::size_t size = found->second.size;
  if (found->second.resting)
    resting_bytes_ -= size;
  else
    count(-static_cast<std::ptrdiff_t>(size));
  segments_.erase(found);
  give_addresses(offset, size);
}

void Region::free(std::size_t offset) {
  const auto found = segments_.find(offset);
  if (found == segments_.end() || found->second.resting) return;
  switch (state) {
    case State::pausing:
    case State::resuming: freed_meanwhile_.push_back(offset); break;
    case State::paused:
    case State::lost: erase(offset); break;
    case State::active:
      found->second.resting = true;
      count(-static_cast<std::ptrdiff_t>(found->second.size));
      resting_bytes_ += found->second.size;
      resting_.push_back({offset, ++frees_, nullptr});
      reap(0);
      break;
  }
}

void Region::settle() {
  for (const std::size_t offset : std::exchange(freed_meanwhile_, {})) free(offset);
}

void Region::reap(std::uint64_t waited) {
  if (resting_.empty()) return;
  Driver& driver = *device.driver;
  const bool capturing = core().capturing();  // a mark on the device would break the capture
  if (!capturing && resting_.back().number > waited) {
    try {
      Driver::Ticket ticket;
      for (auto rest = resting_.rbegin(); rest != resting_.rend() && rest->ticket == nullptr; ++rest) {
        if (ticket == nullptr) ticket = driver.record();
        if (ticket == nullptr) break;
        rest->ticket = ticket;
      }
    } catch (const DriverError&) {
      // The driver cannot tell now: the segments rest on.
    }
  }
  // Tickets are in order, so the first that is not done ends the search.
  std::vector<Slot> done;
  Driver::Ticket known;
  while (!resting_.empty()) {
    const Rest& rest = resting_.front();
    if (rest.number > waited) {
      if (capturing || rest.ticket == nullptr) break;
      if (rest.ticket != known) {
        try {
          if (!driver.done(rest.ticket)) break;
        } catch (const DriverError&) {
          break;
        }
        known = rest.ticket;
      }
    }
    done.push_back({rest.offset, segments_.at(rest.offset).size});
    erase(rest.offset);
    resting_.pop_front();
  }
  for (const Slot& segment : done) return_empty_chunks(segment.offset, segment.offset + segment.size);
}

void Region::return_empty_chunks(std::size_t begin, std::size_t end) {
  if (stranded_) begin = 0, end = span;
  auto chunk = chunks_.upper_bound(begin);
  if (chunk != chunks_.begin()) --chunk;
  std::vector<std::size_t> empty;
  for (; chunk != chunks_.end() && chunk->first < end; ++chunk) {
    const std::size_t chunk_end = chunk->first + chunk->second.size();
    if (chunk_end > begin && !used_within(chunk->first, chunk_end)) empty.push_back(chunk->first);
  }
  std::vector<Chunk> freed;  // go back at its end
  stranded_ = unmap(empty, freed).has_value();
}

Ranges Region::live() const {
  Ranges found;
  for (const auto& [offset, segment] : segments_) {
    if (segment.resting) continue;
    if (!found.empty() && found.back().end() == offset)
      found.back().size += segment.size;
    else
      found.push_back({offset, segment.size});
  }
  return found;
}

Ranges Region::parts(const Ranges& ranges) const {
  Ranges segments;
  for (const auto& [offset, segment] : segments_)
    if (!segment.resting) segments.push_back({offset, segment.size});
  return intersect(segments, sorted(ranges));
}

// Mapped bytes that no segment uses stay below this: large chunks for large regions, small ones for small.
std::size_t Region::allowance() const { return std::min(allocated_, allocated_ / 20 + kAllowance); }

std::size_t Region::largest_chunk() const {
  // Contents move chunk by chunk, and smaller ones overlap better.
  return policy == Policy::none ? kChunkClasses[0] : kChunkClasses[1];
}

std::size_t Region::unmapped_within(std::size_t begin, std::size_t end) const {
  return uncovered(chunks_, begin, end, [](const Chunk& chunk) { return chunk.size(); });
}

std::size_t Region::unused_within(std::size_t begin, std::size_t end) const {
  return uncovered(segments_, begin, end, [](const Segment& segment) { return segment.size; });
}

bool Region::used_within(std::size_t begin, std::size_t end) const {
  const auto next = segments_.lower_bound(begin);
  if (next != segments_.end() && next->first < end) return true;
  return next != segments_.begin() && std::prev(next)->first + std::prev(next)->second.size > begin;
}

std::size_t Region::lay_out_range(std::size_t from, Range range, const Choose& choose, const Place& place,
                                  std::size_t& slack) const {
  std::size_t at = std::max(from, round_down(range.offset, kPage));
  const std::size_t end = range.end();
  while (at < end) {
    const auto next = chunks_.upper_bound(at);
    if (next != chunks_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second.size() > at) {
        at = before->first + before->second.size();
        continue;
      }
    }
    const std::size_t border = next != chunks_.end() ? next->first : span;
    const std::size_t room = border - at;
    std::size_t limit = chunk_class(std::min(room, round_up(end - at, kPage)));
    // A larger chunk may reach beyond the range, where that is free and not too wasteful.
    for (const std::size_t size : kChunkClasses) {
      if (size <= limit) break;
      if (size > room || size > largest_chunk() || slack + unused_within(at, at + size) > allowance()) continue;
      limit = size;
      break;
    }
    Choice choice = choose(limit, room);
    slack += unused_within(at, at + choice.size);
    place({at, choice.size}, std::move(choice.chunk));
    at += choice.size;
  }
  return at;
}

void Region::lay_out(const Choose& choose, const Place& place, bool snug) const {
  std::size_t slack = snug ? kNoneAllowed : 0;
  for (const auto& [offset, chunk] : chunks_) slack += unused_within(offset, offset + chunk.size());
  std::size_t from = 0;
  for (const Range& range : live()) from = lay_out_range(from, range, choose, place, slack);
}

std::size_t Region::missing_bytes() const {
  std::size_t bytes = 0;
  std::size_t covered = 0;
  for (const Range& range : live()) {
    const std::size_t begin = std::max(covered, round_down(range.offset, kPage));
    covered = std::max(covered, round_up(range.offset + range.size, kPage));
    if (covered > begin) bytes += unmapped_within(begin, covered);
  }
  return bytes;
}

void Region::map(Slot slot, Chunk chunk) {
  device.driver->map(base + slot.offset, slot.size, chunk.handle());
  mapped_ += slot.size;
  chunks_[slot.offset] = std::move(chunk);
}

void Region::allow(const std::vector<Slot>& slots) {
  for (std::size_t i = 0; i < slots.size();) {
    std::size_t end = slots[i].offset;
    std::size_t next = i;
    while (next < slots.size() && slots[next].offset == end) end += slots[next++].size;
    device.driver->allow(base + slots[i].offset, end - slots[i].offset);
    i = next;
  }
}

std::optional<DriverError> Region::unmap(const std::vector<std::size_t>& offsets, std::vector<Chunk>& freed) {
  std::optional<DriverError> refusal;
  for (std::size_t i = 0; i < offsets.size();) {
    std::size_t end = offsets[i];
    std::size_t next = i;
    while (next < offsets.size() && offsets[next] == end) end += chunks_.at(offsets[next++]).size();
    try {
      device.driver->unmap(base + offsets[i], end - offsets[i]);
      for (; i < next; ++i) {
        auto found = chunks_.find(offsets[i]);
        mapped_ -= found->second.size();
        freed.push_back(std::move(found->second));
        chunks_.erase(found);
      }
    } catch (const DriverError& error) {
      if (!refusal) refusal = error;
      i = next;
    }
  }
  return refusal;
}

std::vector<Slot> Region::slots() const {
  std::vector<Slot> found;
  for (const auto& [offset, chunk] : chunks_) found.push_back({offset, chunk.size()});
  return found;
}

std::vector<Placed> Region::chunks_under(const Ranges& ranges) const {
  std::map<std::size_t, Placed> found;
  for (const Range& range : ranges) {
    auto chunk = chunks_.upper_bound(range.offset);
    if (chunk != chunks_.begin()) --chunk;
    for (; chunk != chunks_.end() && chunk->first < range.end(); ++chunk)
      if (chunk->first + chunk->second.size() > range.offset)
        found[chunk->first] = {chunk->first, chunk->second.handle(), chunk->second.size()};
  }
  std::vector<Placed> placed;
  for (const auto& [offset, chunk] : found) placed.push_back(chunk);
  return placed;
}

void Mapping::undo() {
  std::vector<std::size_t> offsets;
  for (const Slot& slot : std::exchange(slots_, {})) offsets.push_back(slot.offset);
  std::vector<Chunk> freed;  // go back at its end
  region_->unmap(offsets, freed);
}

void Mapping::add(Slot slot, Chunk chunk) {
  region_->map(slot, std::move(chunk));
  slots_.push_back(slot);
}

std::size_t Mapping::commit() {
  std::size_t bytes = 0;
  for (const Slot& slot : std::exchange(slots_, {})) bytes += slot.size;
  return bytes;
}

}  // namespace memsaver
