#include "regions/region.h"

#include <algorithm>
#include <utility>

#include "base/mutants.h"
#include "driver/checked_calls.h"

namespace memsaver {
namespace {

constexpr std::size_t kAlignment = 512;  // the alignment of torch's own allocator
constexpr std::size_t kLeastRange = std::size_t{1} << 30;
constexpr std::size_t kAllowance = 48 * kMiB;
constexpr int kTries = 8;                                   // of an allocation, if other threads change its layout
constexpr std::size_t kNoneAllowed = std::size_t{1} << 61;  // exceeds every allowance, so that no chunk has slack

}  // namespace

Region::Region(std::string region_tag, Device& on_device, Options options)
    : tag(std::move(region_tag)),
      device(on_device),
      policy(options.policy),
      frozen(options.frozen),
      fill(options.fill),
      placed(options.placed),
      most_slack_(options.most_slack),
      expected_(options.policy) {}

// It allows large chunks in large regions only.
std::size_t Region::allowance(std::size_t live) const { return std::min({live, live / 20 + kAllowance, most_slack_}); }

// States

bool Region::is_at_rest() const { return state_ == State::active || state_ == State::paused; }

void Region::write_state(State state) {
  std::lock_guard lock(device.mutex);
  state_ = state;
}

void Region::drain() {
  left_ = state_ == State::paused;
  write_state(State::draining);
}

void Region::leave() {
  left_ = true;
  write_state(State::pausing);
}

void Region::come() {
  arrived_ = false;
  write_state(State::resuming);
}

void Region::discard() { discarded_ = policy != Policy::none && allocated_bytes() > 0; }

void Region::arrived() {
  arrived_ = true;
  discarded_ = false;
  ++residence_;
}

void Region::settle() {
  std::vector<Address> freed;
  {
    std::lock_guard lock(device.mutex);
    const bool away = state_ == State::resuming ? !arrived_ : left_ || MEMSAVER_MUTANT(a_pause_given_up_counts);
    if (state_ != State::lost) state_ = away ? State::paused : State::active;
    if ((device.lost || contents_lost_) && !MEMSAVER_MUTANT(the_lost_come_back)) state_ = State::lost;
    left_ = arrived_ = false;
    if (chunks_.empty() && !std::exchange(dirty_, {}).empty()) device.resting.sweep_ended();
    freed.swap(freed_meanwhile_);
    for (const Address begin : freed) {
      if (state_ == State::active && !placed) {
        if (segments_.rest(begin)) device.resting.add_locked(*this, begin);
      } else if (segments_.contains(begin)) {
        forget_locked(begin);
      }
    }
    count_locked();
  }
}

void Region::lose() { write_state(State::lost); }

// Backups

std::shared_ptr<Backup> Region::backup() const {
  std::lock_guard lock(device.mutex);
  return backup_;
}

std::shared_ptr<Backup> Region::replace_backup(std::shared_ptr<Backup> backup) {
  std::lock_guard lock(device.mutex);
  std::shared_ptr<Backup> former = std::exchange(backup_, std::move(backup));
  count_locked();
  return former;
}

bool Region::sealed() const {
  if (!frozen) return false;
  std::lock_guard lock(device.mutex);
  return backup_ != nullptr;
}

void Region::expect_policy(Policy next) {
  std::lock_guard lock(device.mutex);
  expected_ = next;
  count_locked();
}

void Region::count_locked() {
  // Most of a placed region may be free blocks of the other allocator, which are not copied.
  const bool copies = expected_ == Policy::host && !placed && !(frozen && backup_ != nullptr);
  const std::size_t bytes = copies ? segments_.live_bytes() : 0;
  device.to_back_up += bytes - counted_;
  counted_ = bytes;
}

// Segments

bool Region::owns(Address address) const {
  std::lock_guard lock(device.mutex);
  return placed ? !segments_.between(address, address + 1).empty() : addresses_.owns(address);
}

std::size_t Region::allocated_bytes() const {
  std::lock_guard lock(device.mutex);
  return segments_.live_bytes();
}

std::size_t Region::resting_bytes() const {
  std::lock_guard lock(device.mutex);
  return segments_.resting_bytes();
}

std::size_t Region::reserved_bytes() const {
  std::lock_guard lock(device.mutex);
  return placed ? segments_.live_bytes() : addresses_.reserved_bytes();
}

Ranges Region::live() const {
  std::lock_guard lock(device.mutex);
  return segments_.live();
}

Ranges Region::parts(const Ranges& ranges) const {
  std::lock_guard lock(device.mutex);
  return segments_.parts(ranges);
}

void Region::check_allocatable(std::size_t size) const {
  const std::string wanted = "it cannot take an allocation of " + std::to_string(size) + " bytes";
  if (closed_) throw Error("region '" + tag + "' was closed: " + wanted);
  const State now_in = state_;
  if (now_in != State::active)
    throw RegionPausedError("region '" + tag + "' is " + name_of(now_in) + ": " + wanted, tag, name_of(now_in));
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
      if (const auto found = addresses_.take(size)) return *found;
      range = std::max({round_up(size, kPage), kLeastRange, addresses_.reserved_bytes()});
    }
    range = std::max(round_up(size, kPage), std::min(range, std::max(kLeastRange, device.total_bytes)));
    const Address begin = device.driver->reserve(range + kGuard);
    {
      std::lock_guard lock(device.mutex);
      if (!closed_) {
        addresses_.add({begin, range});
        device.parts.addresses.add({begin, range}, *this);
        continue;
      }
    }
    device.driver->unreserve(begin, range + kGuard);
  }
}

bool Region::gather_from_others(ChunkRequest& request) {
  struct Waiting {
    explicit Waiting(std::atomic<std::size_t>& of) : count(of) { ++count; }
    ~Waiting() { --count; }
    std::atomic<std::size_t>& count;
  };
  const Waiting counted(device.waiting_allocations);
  return request.gather_from_others();
}

void Region::find_more(std::size_t wanted, Deadline shortage, Deadline began, std::uint64_t seen, bool& asks_others) {
  if (device.resting.reclaim(shortage, seen)) {
    device.source().settle();
    return;
  }
  if (!asks_others && device.pooled && now() < shortage && !MEMSAVER_MUTANT(allocations_ask_no_others)) {
    asks_others = true;
    return;
  }
  const std::chrono::duration<double> waited = asks_others ? now() - began : Clock::duration::zero();
  throw device.out_of_memory(wanted, 0, waited.count());
}

Address Region::allocate(std::size_t size, Deadline shortage) {
  if (placed) throw Error("region '" + tag + "' has segments of torch's allocator, and takes no others");
  check_allocatable(size);
  device.resting.reap();
  const std::size_t wanted = size;
  size = round_up(std::max<std::size_t>(size, 1), kAlignment);
  if (size > device.total_bytes) throw device.out_of_memory(wanted, 0);
  const Range segment{take_addresses(size), size};  // not a segment yet
  try {
    int tries = 0;
    const Deadline began = now();
    for (bool snug = false, asks_others = false;;) {
      const std::uint64_t seen = device.resting.given_back();
      const Needs needs = needs_of(segment, snug);
      auto request = device.source().ask(needs, asks_others ? shortage : now());
      const bool all = asks_others ? gather_from_others(*request) : request->gather();
      try {
        map_new(segment, *request, snug);
        break;
      } catch (const ChunkUnavailable&) {
        // The layout has changed meanwhile: another thread freed a chunk that it used.
        if (all && ++tries < kTries) continue;
      }
      request.reset();               // its chunks count as free now
      if (!snug && device.pooled) {  // a shared pool gives the whole demand or nothing
        snug = true;
        continue;
      }
      find_more(wanted, shortage, began, seen, asks_others);
    }
  } catch (...) {
    std::lock_guard lock(device.mutex);
    addresses_.give(segment);
    throw;
  }
  if (device.parts.backup_ahead) device.arena.grow_ahead(device.to_back_up);
  return segment.offset;
}

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
  auto chunk = chunks_.upper_bound(begin);
  if (chunk != chunks_.begin()) --chunk;
  for (; chunk != chunks_.end(); ++chunk) {
    input.chunks.push_back({chunk->first, chunk->second.size()});
    if (chunk->first >= end) break;  // the border of the last gap
  }
  if (placed) input.reserved = input.wanted;
  for (const auto& [at, size] : addresses_.reserved()) input.reserved.push_back({at, size});
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

void Region::make_certain() {
  if (!doubtful_) return;
  allow(slots());
  doubtful_ = false;
}

void Region::map_new(Range segment, ChunkRequest& request, bool snug) {
  const Remapping remapping(*this);
  check_allocatable(segment.size);  // a transition marks a region under the same lock
  make_certain();
  std::optional<Layout> layout;
  {
    std::lock_guard lock(device.mutex);
    if (unmapped_within(round_down(segment.offset, kPage), round_up(segment.end(), kPage)) > 0)
      layout = layout_of_new_locked(segment, snug);
  }
  Mapping mapping(*this);
  if (layout) {
    while (const auto gap = layout->next()) {
      Chunk chunk = request.next(gap->limit, largest_chunk(), false);
      const Slot slot{gap->at, chunk.size()};
      layout->place(slot.size);
      mapping.add(slot, std::move(chunk));
    }
    allow(mapping.slots());
  }
  std::lock_guard lock(device.mutex);
  segments_.add(segment);
  count_locked();
  mapping.commit();
}

void Region::forget_locked(Address begin) {
  const Range freed = segments_.erase(begin);
  if (!placed) addresses_.give(freed);
  if (!chunks_.empty() && !(placed && MEMSAVER_MUTANT(dropped_pieces_stay_mapped))) add_dirty_locked(freed);
  count_locked();
}

void Region::add_dirty_locked(Range range) {
  if (dirty_.empty()) device.resting.sweep_begins();
  dirty_.push_back(range);
}

void Region::free(Address begin) {
  {
    std::lock_guard lock(device.mutex);
    switch (state_) {
      case State::draining:
      case State::pausing:
      case State::resuming:
        if (!MEMSAVER_MUTANT(a_free_in_a_transition_is_lost)) freed_meanwhile_.push_back(begin);
        return;
      case State::paused:
      case State::lost:
        if (segments_.contains(begin)) forget_locked(begin);
        return;
      case State::active:
        if (!segments_.rest(begin)) return;
        device.resting.add_locked(*this, begin);
        count_locked();
        break;
    }
  }
  device.resting.reap();
}

std::size_t Region::bound() const {
  const std::size_t live = allocated_bytes();
  return live + std::min(live / 20 + kAllowance, most_slack_);
}

std::size_t Region::largest_chunk() const {
  // Contents move chunk by chunk, and copies of smaller chunks overlap better.
  return policy == Policy::none ? kChunkClasses[0] : kChunkClasses[1];
}

std::size_t Region::unmapped_within(Address begin, Address end) const {
  std::size_t bytes = end - begin;
  auto chunk = chunks_.upper_bound(begin);
  if (chunk != chunks_.begin()) --chunk;
  for (; chunk != chunks_.end() && chunk->first < end; ++chunk) {
    const Address from = std::max(begin, chunk->first), to = std::min(end, chunk->first + chunk->second.size());
    if (to > from) bytes -= to - from;
  }
  return bytes;
}

Layout Region::layout(bool snug) const {
  std::lock_guard lock(device.mutex);
  std::size_t slack = 0;
  for (const auto& [begin, chunk] : chunks_) {
    std::size_t unused = chunk.size();
    for (const Range& segment : segments_.between(begin, begin + chunk.size()))
      unused -= std::min<Address>(segment.end(), begin + chunk.size()) - std::max<Address>(segment.offset, begin);
    slack += unused;
  }
  return layout_locked(placed && !MEMSAVER_MUTANT(pieces_share_chunks) ? segments_.all() : segments_.live(),
                       segments_.all(), segments_.live_bytes(), slack, snug || placed);
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

// Mappings

Region::Remapping::~Remapping() {
  lock_.unlock();
  region_.sweep();  // for frees that could not take the lock
}

void Region::sweep() {
  for (;;) {
    {
      std::lock_guard lock(device.mutex);
      if (state_ != State::active || (dirty_.empty() && !stranded_)) return;
    }
    {
      const std::unique_lock only(mapping_, std::try_to_lock);
      if (!only && !MEMSAVER_MUTANT(memory_goes_under_an_allocation)) return;  // the holder sweeps afterwards
      sweep_with_lock();
    }
    std::lock_guard lock(device.mutex);  // checked after the release of mapping_: a free in between could not take it
    if (dirty_.empty()) return;
  }
}

void Region::sweep_all() {
  {
    std::lock_guard lock(device.mutex);
    for (const auto& [begin, chunk] : chunks_) add_dirty_locked({begin, chunk.size()});
  }
  sweep();
}

void Region::strand() {
  std::lock_guard lock(device.mutex);
  stranded_ = doubtful_ = true;
}

void Region::sweep_with_lock() {
  std::vector<Address> empty;
  bool had_dirty = false;
  {
    std::lock_guard lock(device.mutex);
    if (state_ != State::active) return;
    Ranges dirty = std::exchange(dirty_, {});
    if (!dirty.empty()) had_dirty = true;
    if (std::exchange(stranded_, false)) {
      dirty.clear();
      for (const auto& [begin, chunk] : chunks_) dirty.push_back({begin, chunk.size()});
    }
    for (const Range& range : sorted(std::move(dirty))) {
      auto chunk = chunks_.upper_bound(range.offset);
      if (chunk != chunks_.begin()) --chunk;
      for (; chunk != chunks_.end() && chunk->first < range.end(); ++chunk) {
        const Address end = chunk->first + chunk->second.size();
        if (end <= range.offset || (!empty.empty() && empty.back() >= chunk->first)) continue;
        if (!segments_.any_within(chunk->first, end)) empty.push_back(chunk->first);
      }
    }
  }
  std::vector<Chunk> freed;
  if (unmap(empty, freed)) {
    std::lock_guard lock(device.mutex);
    stranded_ = true;
  }
  freed.clear();  // returned to their source now
  if (had_dirty) device.resting.sweep_ended();
}

void Region::map(Slot slot, Chunk chunk) {
  map_or_not(*device.driver, slot.offset, slot.size, chunk.handle());
  std::lock_guard lock(device.mutex);
  mapped_ += slot.size;
  chunks_[slot.offset] = std::move(chunk);
}

void Region::allow(const std::vector<Slot>& slots) {
  for (std::size_t i = 0; i < slots.size();) {
    Address end = slots[i].offset;
    std::size_t next = i;
    while (next < slots.size() && slots[next].offset == end) end += slots[next++].size;
    device.driver->allow(slots[i].offset, end - slots[i].offset);
    i = next;
  }
}

void Region::mark_stale() {
  std::lock_guard lock(device.mutex);
  stale_ = true;
}

void Region::allow_again() {
  const Remapping remapping(*this);
  {
    std::lock_guard lock(device.mutex);
    if (!stale_) return;
    device.has_stale = true;              // reset below on success
    if (state_ != State::active) return;  // the owning transition calls this again at its end
  }
  allow(slots());
  std::lock_guard lock(device.mutex);
  stale_ = false;
}

bool Region::lacks_access() const {
  std::lock_guard lock(device.mutex);
  return stale_ && state_ == State::active;
}

std::optional<DriverError> Region::unmap(const std::vector<Address>& chunks, std::vector<Chunk>& freed) {
  std::optional<DriverError> refusal;
  for (std::size_t i = 0; i < chunks.size();) {
    Address end = chunks[i];
    std::size_t next = i;
    while (next < chunks.size() && chunks[next] == end) end += chunks_.at(chunks[next++]).size();
    try {
      unmap_or_not(*device.driver, chunks[i], end - chunks[i]);
    } catch (const DriverError& error) {
      if (!refusal) refusal = error;
      i = next;
      continue;
    }
    std::lock_guard lock(device.mutex);
    for (; i < next; ++i) {
      auto found = chunks_.find(chunks[i]);
      mapped_ -= found->second.size();
      freed.push_back(std::move(found->second));
      chunks_.erase(found);
    }
  }
  return refusal;
}

Chunk Region::exchange(Address begin, std::vector<Piece> pieces) {
  Driver& driver = *device.driver;
  std::size_t size = 0;
  Handle handle = 0;
  {
    std::lock_guard lock(device.mutex);
    size = chunks_.at(begin).size();
    handle = chunks_.at(begin).handle();
  }
  unmap_or_not(driver, begin, size);
  std::size_t mapped = 0;
  try {
    for (; mapped < pieces.size(); ++mapped)
      map_or_not(driver, pieces[mapped].slot.offset, pieces[mapped].slot.size, pieces[mapped].chunk.handle());
    std::vector<Slot> slots;
    for (const Piece& piece : pieces) slots.push_back(piece.slot);
    allow(slots);
  } catch (const DriverError&) {
    constexpr int kAttempts = 2;  // a failed call is tried once more
    for (int attempt = 1;; ++attempt) {
      try {
        for (; mapped > 0; --mapped) unmap_or_not(driver, pieces[mapped - 1].slot.offset, pieces[mapped - 1].slot.size);
        map_or_not(driver, begin, size, handle);
        driver.allow(begin, size);
        break;
      } catch (const DriverError&) {
        if (attempt < kAttempts) continue;
        contents_lost_ = true;
        break;
      }
    }
    throw;
  }
  std::lock_guard lock(device.mutex);
  auto found = chunks_.find(begin);
  Chunk former = std::move(found->second);
  chunks_.erase(found);
  mapped_ -= size;
  for (Piece& piece : pieces) {
    mapped_ += piece.slot.size;
    chunks_[piece.slot.offset] = std::move(piece.chunk);
  }
  return former;
}

std::vector<Slot> Region::slots() const {
  std::lock_guard lock(device.mutex);
  std::vector<Slot> found;
  for (const auto& [begin, chunk] : chunks_) found.push_back({begin, chunk.size()});
  return found;
}

std::vector<Placed> Region::chunks_under(const Ranges& ranges) const {
  std::map<Address, Placed> found;
  std::lock_guard lock(device.mutex);
  for (const Range& range : ranges) {
    auto chunk = chunks_.upper_bound(range.offset);
    if (chunk != chunks_.begin()) --chunk;
    for (; chunk != chunks_.end() && chunk->first < range.end(); ++chunk)
      if (chunk->first + chunk->second.size() > range.offset)
        found[chunk->first] = {chunk->first, chunk->second.handle(), chunk->second.size()};
  }
  std::vector<Placed> placed;
  for (const auto& [begin, chunk] : found) placed.push_back(chunk);
  return placed;
}

void Region::check_unused() const {
  const std::string cannot = "region '" + tag + "' cannot be closed: ";
  if (!is_at_rest()) throw Error(cannot + "it is " + name_of(state_));
  if (in_use() || !queue_.empty()) throw Error(cannot + "another thread uses it");
  if (!leases_.empty()) throw Error(cannot + "other processes are attached to it");
}

Ranges Region::close() {
  std::lock_guard lock(device.mutex);
  const std::string cannot = "region '" + tag + "' cannot be closed: ";
  if (closed_) throw Error("region '" + tag + "' was closed before");
  if (placed) throw Error(cannot + "another allocator uses it until the process ends");
  if (segments_.live_bytes() > 0)
    throw Error(cannot + std::to_string(segments_.live_bytes()) + " bytes of it are allocated");
  if (segments_.resting_bytes() > 0)
    throw Error(cannot + "the device still works on " + std::to_string(segments_.resting_bytes()) + " freed bytes");
  if (addresses_.free_bytes() != addresses_.reserved_bytes()) throw Error(cannot + "another thread allocates in it");
  check_unused();
  if (!chunks_.empty()) throw Error(cannot + "the driver refused to unmap " + std::to_string(mapped_) + " bytes");
  closed_ = true;
  Ranges reserved;
  for (const auto& [begin, size] : addresses_.reserved()) reserved.push_back({begin, size});
  addresses_ = AddressSpace();
  return reserved;
}

// Mappings that may be taken back

void Mapping::undo() {
  std::vector<Address> chunks;
  for (const Slot& slot : std::exchange(slots_, {})) chunks.push_back(slot.offset);
  if (MEMSAVER_MUTANT(what_cannot_come_stays_mapped)) return;
  std::vector<Chunk> freed;  // returned to their source at the end of the scope
  if (region_->unmap(chunks, freed)) region_->strand();
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
