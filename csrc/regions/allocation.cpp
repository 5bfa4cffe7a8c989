// Allocations in a region: addresses, and the chunks that they need.
#include <algorithm>
#include <utility>

#include "regions/eviction.h"
#include "regions/region.h"

namespace memsaver {
namespace {

constexpr std::size_t kAlignment = 512;  // the alignment of torch's own allocator
constexpr std::size_t kLeastRange = std::size_t{1} << 30;
constexpr int kTries = 8;                                   // of an allocation, if other threads change its layout
constexpr std::size_t kNoneAllowed = std::size_t{1} << 61;  // exceeds every allowance, so that no chunk has slack

}  // namespace

void Region::check_allocatable(std::size_t size) const {
  const std::string wanted = "it cannot take an allocation of " + std::to_string(size) + " bytes";
  if (closed_) throw Error("region '" + tag + "' was closed: " + wanted);
  const State found = state_;
  if (found != State::active) throw wrong_state(found, wanted);
  if (sealed()) throw Error("region '" + tag + "' is frozen and its contents are copied: " + wanted + " before thaw()");
}

// Ranges double, so that a large region has few of them. The first range is small, so that the process's addresses
// suffice for many regions. A free page lies behind each range, so that ranges never touch.
Address Region::take_addresses(std::size_t size) {
  for (;;) {
    std::size_t range = 0;
    {
      std::lock_guard lock(device.mutex);
      if (closed_) throw Error("region '" + tag + "' was closed");
      if (const auto found = addresses_.take(size)) return found->offset;
      range = std::max({round_up(size, kPage), kLeastRange, bytes_of(reserved_)});
    }
    range = std::max(round_up(size, kPage), std::min(range, std::max(kLeastRange, device.total_bytes)));
    const Address begin = device.driver->reserve(range + kGuard);
    {
      std::lock_guard lock(device.mutex);
      if (!closed_) {
        reserved_.push_back({begin, range});
        reserved_ = sorted(std::move(reserved_));
        addresses_.put({begin, range});
        device.parts.addresses.add({begin, range}, *this);
        continue;
      }
    }
    device.driver->unreserve(begin, range + kGuard);
  }
}

// All chunks of a demand, or none.
std::vector<Chunk> Region::take(const Needs& needs, Deadline deadline, WaitFor wait) {
  std::optional<Counted> waiting;
  if (wait > WaitFor::offers) waiting.emplace(device.waiting_allocations);
  std::vector<Chunk> chunks;  // outlives the demand, which would get the chunks again that return while it is open
  const Deadline whole = wait == WaitFor::offers ? now() + kShortageWait : kNever;
  const auto request = device.source().ask(needs, deadline, whole);
  for (const Need& each : needs)
    for (std::size_t left = each.bytes; left > 0; left -= chunks.back().size()) {
      const std::size_t limit = std::min(each.limit, left), size = each.fresh == 0 ? limit : chunk_class(limit);
      try {
        chunks.push_back(request->next(size, each.fresh, wait == WaitFor::offers ? WaitFor::none : wait));
      } catch (const ChunkUnavailable&) {
        if (wait != WaitFor::offers || !device.pooled) throw;
        const Counted waits(device.waiting_allocations);
        chunks.push_back(request->next(size, each.fresh, wait));
      }
    }
  return chunks;
}

void Region::find_more(std::size_t wanted, std::size_t needed, Deadline shortage, Deadline memory, Deadline began,
                       std::uint64_t seen, WaitFor& wait) {
  if (device.resting.reclaim(shortage, seen)) {
    device.source().settle();
    return;
  }
  const Evicted evicted = evict_for(device, needed);
  if (evicted == Evicted::some) return;
  if (evicted == Evicted::busy && now() < shortage) {
    sleep_for(kNextWait);
  } else if (now() < memory && !waiting_is_over()) {
    if (std::exchange(wait, WaitFor::memory) == WaitFor::memory) {
      WaitsEndWith::look();
      sleep_for(kNextWait);
    }
  } else if (wait == WaitFor::none && device.pooled && now() < shortage) {
    wait = WaitFor::caches;
  } else {
    const bool has_waited = wait != WaitFor::none || now() - began >= kOneLook;  // or for offers
    const std::chrono::duration<double> waited = has_waited ? now() - began : Clock::duration::zero();
    throw device.out_of_memory(wanted, 0, waited.count());
  }
}

template <typename NeedsOf, typename Use>
void Region::with_chunks(std::size_t wanted, Deadline shortage, Deadline memory, NeedsOf needs_of, Use use) {
  const Deadline began = now();
  WaitFor wait = WaitFor::offers;
  int tries = 0;
  for (bool snug = false;;) {
    const std::uint64_t seen = device.resting.given_back();
    const Needs needs = needs_of(snug);
    try {
      if (use(take(needs, wait == WaitFor::memory ? memory : shortage, wait), snug)) return;
      if (++tries < kTries) continue;
    } catch (const ChunkNeverAvailable&) {
      if (wait == WaitFor::memory) memory = Deadline::min();  // more than a shared pool has in all
    } catch (const ChunkUnavailable&) {
      // The exact layout may need less memory.
    }
    if (wait == WaitFor::offers) wait = WaitFor::none;
    if (std::exchange(snug, true) || bytes_of(needs_of(true)) == bytes_of(needs))
      find_more(wanted, bytes_of(needs_of(true)), shortage, memory, began, seen, wait);
  }
}

Address Region::allocate(std::size_t size, Deadline shortage, Deadline memory) {
  if (placed) throw Error("region '" + tag + "' has segments of torch's allocator, and takes no others");
  check_allocatable(size);
  device.resting.reap();
  const std::size_t wanted = size;
  size = round_up(std::max<std::size_t>(size, 1), one_handle ? kPage : kAlignment);
  if (size > device.total_bytes) throw device.out_of_memory(wanted, 0);
  const Range segment{take_addresses(size), size};  // not a segment yet
  Driver::Ticket cleaned;
  try {
    with_chunks(
        wanted, shortage, memory, [&](bool snug) { return needs_of(segment, snug); },
        [&](std::vector<Chunk> chunks, bool snug) { return map_new(segment, std::move(chunks), snug, cleaned); });
  } catch (...) {
    std::lock_guard lock(device.mutex);
    addresses_.put(segment);
    throw;
  }
  try {
    if (cleaned) device.driver->wait(cleaned);
  } catch (...) {
    free(segment.offset);
    throw;
  }
  return segment.offset;
}

bool Region::map_new(Range segment, std::vector<Chunk> chunks, bool snug, Driver::Ticket& cleaned) {
  const Remapping remapping(*this);
  check_allocatable(segment.size);  // a transition marks a region under the same lock
  end_stranded();
  if (one_handle) sweep_with_lock();  // the chunk of a freed segment at these addresses has another size
  std::optional<Layout> layout;
  {
    std::lock_guard lock(device.mutex);
    if (unmapped_within(round_down(segment.offset, kPage), round_up(segment.end(), kPage)) > 0)
      layout = layout_of_new_locked(segment, snug);
  }
  Mapping mapping(*this);
  if (layout) {
    while (const auto gap = layout->next()) {
      std::optional<Chunk> chunk = take_largest(chunks, &Chunk::size, gap->limit);
      if (!chunk) return false;
      const Slot slot{gap->at, chunk->size()};
      layout->place(slot.size);
      mapping.add(slot, std::move(*chunk));
    }
    allow(mapping.slots());
    cleaned = clean_new(mapping.slots());
  }
  std::lock_guard lock(device.mutex);
  segments_.add(segment);
  mapping.commit();
  return true;
}

// Segments at addresses that another allocator has chosen

std::vector<Chunk> Region::borrow(std::size_t size, Deadline shortage) {
  check_allocatable(size);
  device.resting.reap();
  Needs needs;
  for (std::size_t left = size; left > 0; left -= needs.back().bytes) needs.push_back(need(chunk_class(left)));
  std::vector<Chunk> found;
  with_chunks(
      size, shortage, Deadline::min(), [&](bool) { return needs; },
      [&](std::vector<Chunk> chunks, bool) {
        found = std::move(chunks);
        return true;
      });
  return found;
}

void Region::place(Range segment, std::vector<Chunk> chunks) {
  Driver::Ticket cleaned;
  {
    const Remapping remapping(*this);
    check_allocatable(segment.size);  // a transition marks a region under the same lock
    end_stranded();
    sweep_with_lock();  // for a dropped segment at this address
    Mapping mapping(*this);
    Address at = segment.offset;
    for (Chunk& chunk : chunks) {
      const Slot slot{at, chunk.size()};
      at += slot.size;
      mapping.add(slot, std::move(chunk));
    }
    device.driver->allow(segment.offset, segment.size);
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
  {
    std::lock_guard lock(device.mutex);
    const Ranges found = segments_.between(segment.offset, segment.end());
    if (found.size() != 1 || found.front().offset != segment.offset || found.front().size != segment.size) return false;
    end_locked(segment.offset);
  }
  device.parts.addresses.remove(segment);
  sweep_with_lock();
  sweep_offered();
  return true;
}

// Layouts

Layout Region::layout_of_new_locked(Range segment, bool snug) const {
  // A chunk may reach beyond the segment by less than the largest class.
  Ranges segments = segments_.between(segment.offset - std::min<Address>(segment.offset, kChunkClasses.front()),
                                      segment.end() + kChunkClasses.front());
  segments.insert(std::upper_bound(segments.begin(), segments.end(), segment,
                                   [](const Range& a, const Range& b) { return a.offset < b.offset; }),
                  segment);
  const std::size_t used = segments_.live_bytes() + segments_.resting_bytes() + segment.size;
  const std::size_t to_come = unmapped_within(segment.offset, segment.end());
  return layout_locked({segment}, std::move(segments), segments_.live_bytes() + segment.size,
                       mapped_ - (used - to_come), snug);
}

Layout Region::layout_locked(Ranges wanted, Ranges segments, std::size_t live, std::size_t slack, bool snug) const {
  Layout::Input input{.wanted = std::move(wanted),
                      .segments = std::move(segments),
                      .chunks = {},
                      .reserved = {},
                      .largest = largest_chunk(),
                      .slack = snug ? kNoneAllowed : slack,
                      .allowance = allowance(live)};
  if (input.wanted.empty()) return Layout(std::move(input));
  const Address begin = round_down(input.wanted.front().offset, kPage), end = input.wanted.back().end();
  input.chunks = present_locked({begin, end - begin});
  std::optional<Range> border;  // of the last gap
  for (const auto* chunks : {&chunks_, &offered_})
    if (const auto next = chunks->lower_bound(end); next != chunks->end() && (!border || next->first < border->offset))
      border = {next->first, next->second.size()};
  if (border) input.chunks.push_back(*border);
  input.reserved = placed ? input.wanted : reserved_;
  return Layout(std::move(input));
}

// The demands of map_new(), if each chunk has its largest size.
Needs Region::needs_of(Range segment, bool snug) const {
  Needs needs;
  std::lock_guard lock(device.mutex);
  if (unmapped_within(round_down(segment.offset, kPage), round_up(segment.end(), kPage)) == 0) return needs;
  for (const Range& place : Layout::planned(layout_of_new_locked(segment, snug))) needs.push_back(need(place.size));
  return needs;
}

std::size_t Region::unmapped_within(Address begin, Address end) const {
  std::size_t bytes = end - begin;
  for (const Range& chunk : present_locked({begin, end - begin}))
    bytes -= std::min(end, chunk.end()) - std::max(begin, chunk.offset);
  return bytes;
}

Ranges Region::present_locked(Range range) const {
  Ranges found;
  for (const auto* chunks : {&chunks_, &offered_})
    for (const Range& chunk : entries_of(overlapping(*chunks, range))) found.push_back(chunk);
  return offered_.empty() ? found : sorted(std::move(found));
}

Layout Region::layout(bool snug) const {
  std::lock_guard lock(device.mutex);
  std::size_t slack = 0;
  for (const Range& chunk : present_locked({0, kAnySlack})) {
    std::size_t unused = chunk.size;
    for (const Range& segment : segments_.between(chunk.offset, chunk.end()))
      unused -= std::min<Address>(segment.end(), chunk.end()) - std::max<Address>(segment.offset, chunk.offset);
    slack += unused;
  }
  const bool apart = one_handle || placed;
  return layout_locked(apart ? segments_.parts({{0, kAnySlack}}) : segments_.live(), segments_.all(),
                       segments_.live_bytes(), slack, snug || placed);
}

std::size_t Region::missing_bytes() const {
  std::lock_guard lock(device.mutex);
  std::size_t bytes = 0;
  Address covered = 0;
  for (const Range& range : segments_.live()) {
    const Address begin = std::max<Address>(covered, round_down(range.offset, kPage));
    covered = std::max<Address>(covered, round_up(range.end(), kPage));
    if (covered > begin) bytes += unmapped_within(begin, covered);
  }
  return bytes;
}

}  // namespace memsaver
