// Allocations in a region: addresses, and the chunks that they need.
#include <algorithm>
#include <utility>

#include "regions/region.h"

namespace memsaver {
namespace {

constexpr std::size_t kAlignment = 512;  // the alignment of torch's own allocator
constexpr std::size_t kLeastRange = std::size_t{1} << 30;
constexpr int kTries = 8;                                   // of an allocation, if other threads change its layout
constexpr std::size_t kNoneAllowed = std::size_t{1} << 61;  // exceeds every allowance, so that no chunk has slack
constexpr auto kNextWait = std::chrono::milliseconds(2);    // after one in which others took the memory

// The chunks of a whole demand, taken before a lock is held.
class Collected final : public ChunkRequest {
 public:
  // Waits up to the deadline of the demand. Throws ChunkUnavailable.
  Collected(ChunkRequest& request, const Needs& needs) : request_(request) {
    try {
      for (const Need& need : needs)
        for (std::size_t left = need.bytes; left > 0; left -= chunks_.back().size())
          chunks_.push_back(request.next(chunk_class(std::min(need.limit, left)), need.fresh, true));
    } catch (...) {
      request_.end();  // before the chunks return to the source
      throw;
    }
  }
  ~Collected() override { request_.end(); }

  Chunk next(std::size_t limit, std::size_t, bool) override {
    auto best = chunks_.end();
    for (auto chunk = chunks_.begin(); chunk != chunks_.end(); ++chunk)
      if (chunk->size() <= limit && (best == chunks_.end() || chunk->size() > best->size())) best = chunk;
    if (best == chunks_.end()) throw ChunkUnavailable("ask", "the layout has changed");
    Chunk chunk = std::move(*best);
    chunks_.erase(best);
    return chunk;
  }
  bool gather() override { return true; }
  void end() override { request_.end(); }

 private:
  ChunkRequest& request_;
  std::vector<Chunk> chunks_;
};

}  // namespace

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

namespace {

struct Waiting {
  explicit Waiting(std::atomic<std::size_t>& of) : count(of) { ++count; }
  ~Waiting() { --count; }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  std::atomic<std::size_t>& count;
};

}  // namespace

bool Region::gather_from_others(ChunkRequest& request) {
  const Waiting counted(device.waiting_allocations);
  return request.gather_from_others();
}

Driver::Ticket Region::wait_and_map(Range segment, ChunkRequest& request, const Needs& needs) {
  std::optional<Waiting> counted(std::in_place, device.waiting_allocations);
  Collected collected(request, needs);
  counted.reset();
  return map_new(segment, collected, true);
}

void Region::find_more(std::size_t wanted, Deadline shortage, Deadline memory, Deadline began, std::uint64_t seen,
                       Effort& effort) {
  if (device.resting.reclaim(shortage, seen)) {
    device.source().settle();
    return;
  }
  if (now() < memory && !waiting_is_over) {
    if (std::exchange(effort, Effort::waits) == Effort::waits) {  // others have taken the memory meanwhile
      WaitsEndWith::look();
      sleep_for(kNextWait);
    }
    return;
  }
  if (effort == Effort::none && device.pooled && now() < shortage) {
    effort = Effort::asks_others;
    return;
  }
  const std::chrono::duration<double> waited = effort != Effort::none ? now() - began : Clock::duration::zero();
  throw device.out_of_memory(wanted, 0, waited.count());
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
    int tries = 0;
    const Deadline began = now();
    Effort effort = Effort::none;
    for (bool snug = false;;) {
      const std::uint64_t seen = device.resting.given_back();
      const Needs needs = needs_of(segment, snug);
      const bool waits = effort == Effort::waits;
      auto request = device.source().ask(needs, waits ? memory : effort == Effort::asks_others ? shortage : now());
      bool all = false;
      if (effort == Effort::none) all = request->gather();
      if (effort == Effort::asks_others) all = gather_from_others(*request);
      try {
        cleaned = waits ? wait_and_map(segment, *request, needs) : map_new(segment, *request, snug);
        break;
      } catch (const ChunkNeverAvailable&) {
        if (waits) memory = Deadline::min();  // more than a shared pool has in all
      } catch (const ChunkUnavailable&) {
        // The layout has changed meanwhile: another thread freed a chunk that it used.
        if (all && ++tries < kTries) continue;
      }
      request.reset();                                   // its chunks count as free now
      if (!snug && (device.pooled || now() < memory)) {  // these give the whole demand or nothing
        snug = true;
        continue;
      }
      find_more(wanted, shortage, memory, began, seen, effort);
    }
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

// The next chunk of a demand. If there is none, the demand ends before the chunks so far return to the source.
Chunk Region::next_or_end(ChunkRequest& request, std::size_t limit) const {
  try {
    return request.next(limit, largest_chunk(), false);
  } catch (const ChunkUnavailable&) {
    request.end();
    throw;
  }
}

Driver::Ticket Region::map_new(Range segment, ChunkRequest& request, bool snug) {
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
  Driver::Ticket cleaned;
  if (layout) {
    while (const auto gap = layout->next()) {
      Chunk chunk = next_or_end(request, gap->limit);
      const Slot slot{gap->at, chunk.size()};
      layout->place(slot.size);
      mapping.add(slot, std::move(chunk));
    }
    allow(mapping.slots());
    cleaned = clean_new(mapping.slots());
  }
  std::lock_guard lock(device.mutex);
  segments_.add(segment);
  mapping.commit();
  return cleaned;
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
  const auto within = overlapping(chunks_, {begin, end - begin});
  for (const auto& [at, chunk] : within) input.chunks.push_back({at, chunk.size()});
  if (const auto border = within.end(); border != chunks_.end())  // of the last gap
    input.chunks.push_back({border->first, border->second.size()});
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

std::size_t Region::largest_chunk() const {
  if (one_handle) return 0;
  // Contents move chunk by chunk, and copies of smaller chunks overlap better.
  return policy == Policy::none ? kChunkClasses[0] : kChunkClasses[1];
}

std::size_t Region::unmapped_within(Address begin, Address end) const {
  std::size_t bytes = end - begin;
  for (const auto& [at, chunk] : overlapping(chunks_, {begin, end - begin}))
    bytes -= std::min(end, at + chunk.size()) - std::max(begin, at);
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
