#include "transfer.h"

#include <algorithm>
#include <limits>
#include <thread>

#include "disk_backup.h"
#include "host_backup.h"

namespace memsaver {
namespace {

constexpr std::size_t kBatch = 64 * kMiB;  // copies of this size come within 1 % of the bus
constexpr auto kRetry = std::chrono::milliseconds(2);
constexpr unsigned char kPoison = 0xff;  // a NaN in the floating-point types in use

Range range_of(const std::vector<Slot>& neighbours) { return {neighbours.front().offset, bytes_of(neighbours)}; }

}  // namespace

// The sizes of the chunks that leave, while they are still in use there.
class Transfer::Inventory {
 public:
  void add(std::size_t size) { ++sizes_[size]; }
  // The largest that is no larger than `limit`; 0 when there is none.
  std::size_t take(std::size_t limit) {
    auto found = sizes_.upper_bound(limit);
    if (found == sizes_.begin()) return 0;
    --found;
    const std::size_t size = found->first;
    if (--found->second == 0) sizes_.erase(found);
    return size;
  }
  // The smallest, if it is no larger than `limit`; 0 when there is none.
  std::size_t take_smallest(std::size_t limit) {
    return sizes_.empty() || sizes_.begin()->first > limit ? 0 : take(sizes_.begin()->first);
  }

 private:
  std::map<std::size_t, std::size_t> sizes_;
};

void Transfer::add_leaving(Region& region, Policy policy, Ranges live, bool half_out) {
  leaving_.push_back({.region = &region, .policy = policy, .live = std::move(live), .half_out = half_out});
}

void Transfer::add_coming(Region& region, bool restore) {
  Ranges wanted;
  if (restore && region.backup != nullptr)
    wanted = intersect(region.backup->saved.within({0, region.span}), region.live());
  // What a refused pause left mapped and not saved is there, and is neither copied nor written over.
  const bool fills = region.fill != Fill::nothing && (!restore || region.backup == nullptr);
  progress_.expect(bytes_of(wanted));
  coming_.push_back({.region = &region, .wanted = std::move(wanted), .fills = fills, .mapping = Mapping(region)});
}

std::size_t Transfer::missing_bytes() const {
  std::size_t bytes = 0;
  for (const Coming& coming : coming_) bytes += coming.region->missing_bytes();
  return bytes;
}

std::size_t Transfer::leaving_bytes() const {
  std::size_t bytes = 0;
  for (const Leaving& leaving : leaving_) bytes += leaving.region->mapped_bytes();
  return bytes;
}

// Where the contents of a region go: there is a place already if a copy of them is kept, or a part of them went before.
void Transfer::save_where(Leaving& leaving) {
  Region& region = *leaving.region;
  if (leaving.half_out) {
    leaving.backup = region.backup;
    return;
  }
  if (region.sealed() && leaving.policy != Policy::none) {
    leaving.backup = region.backup;
    RangeSet copied;
    for (const Range& part : region.backup->parts()) copied.add(part);
    if (!copied.covers(leaving.live))
      throw Error("region '" + region.tag +
                  "' is frozen, and holds what its copy does not: thaw() lets it be copied anew");
    return;
  }
  if (leaving.policy == Policy::none || leaving.live.empty()) return;
  if (leaving.policy == Policy::host) {
    leaving.backup = std::make_shared<HostBackup>(device_.arena, leaving.live);
    return;
  }
  std::string directory;
  {
    std::lock_guard lock(core().mutex);
    directory = core().disk_directory();
  }
  leaving.backup = std::make_shared<DiskBackup>(device_.arena, device_.files, directory, leaving.live);
}

void Transfer::make_batches(Leaving& leaving) {
  const std::size_t least = leaving.copies() ? kBatch : std::numeric_limits<std::size_t>::max();
  for (const Slot& slot : leaving.region->slots()) {
    const bool joins = !leaving.batches.empty() && range_of(leaving.batches.back()).end() == slot.offset &&
                       bytes_of(leaving.batches.back()) < least;
    if (!joins) leaving.batches.emplace_back();
    leaving.batches.back().push_back(slot);
  }
}

void Transfer::prepare(bool chunks, Deadline deadline) {
  try {
    reserve_and_start(chunks, deadline);
  } catch (const DriverError& error) {
    if (error.context_lost) core().mark_lost(device_);
    throw;
  }
}

void Transfer::reserve_and_start(bool chunks, Deadline deadline) {
  if (!leaving_.empty()) {
    std::size_t host_bytes = 0;
    for (Leaving& leaving : leaving_) {
      std::lock_guard lock(core().mutex);
      leaving.live = leaving.region->parts(leaving.live);
      if (leaving.policy == Policy::host && !leaving.half_out && !leaving.region->sealed())
        host_bytes += bytes_of(leaving.live);
    }
    device_.arena.check(host_bytes);  // of all, before one takes any
    for (Leaving& leaving : leaving_) save_where(leaving);
    core().synchronize(device_);
    {
      std::lock_guard lock(core().mutex);
      for (const Leaving& leaving : leaving_) leaving.region->reap(leaving.region->frees());
    }
    for (Leaving& leaving : leaving_) make_batches(leaving);
    // What has nothing to copy goes at once, and its chunks serve what comes while the others copy.
    leaving_.sort([](const Leaving& a, const Leaving& b) { return !a.copies() && b.copies(); });
  }
  coming_.sort([](const Coming& a, const Coming& b) { return !a.wanted.empty() && b.wanted.empty(); });
  under_way_ = true;
  for (Coming& coming : coming_) open(coming);  // what reading needs is reserved as well
  if (chunks) reserve_chunks(deadline);
  for (Leaving& leaving : leaving_) {
    if (!leaving.copies()) continue;
    leaving.saved_before = leaving.backup->saved.bytes();
    progress_.expect(leaving.backup->bytes() - leaving.saved_before);
    Ranges batches;
    for (const auto& batch : leaving.batches) batches.push_back(range_of(batch));
    leaving.saver = leaving.backup->saver(*device_.driver, leaving.region->base, std::move(batches), progress_);
    leaving.saver->start();
  }
}

// Tries until the deadline: a source may give chunks, and then lack the last of them, which another took.
template <typename Attempt, typename GiveBack>
void Transfer::with_chunks(Deadline deadline, Attempt attempt, GiveBack give_back) {
  const std::size_t needed = missing_bytes(), going_out = leaving_bytes();
  const Clock::time_point began = Clock::now();
  for (bool snug = false;;) {
    bool never = false;
    try {
      const auto request = device_.source().ask(needs(snug), deadline);
      attempt(*request, snug);
      return;
    } catch (const ChunkNeverAvailable&) {
      never = true;
    } catch (const ChunkUnavailable&) {
      never = Clock::now() >= deadline || waiting_is_over;
    }
    give_back();
    if (never && (snug || !device_.pooled)) {
      const std::chrono::duration<double> waited = deadline > began ? Clock::now() - began : Clock::duration::zero();
      throw out_of_memory(*device_.driver, device_.source(), needed, going_out, waited.count());
    }
    snug |= never;  // a shared pool gives all that is asked for, or nothing
    between_looks();
    std::this_thread::sleep_for(kRetry);
  }
}

Transfer::Inventory Transfer::inventory() const {
  Inventory found;
  for (const Leaving& leaving : leaving_)
    for (const Slot& slot : leaving.region->slots()) found.add(slot.size);
  return found;
}

// What is to be asked for: all that comes, less what leaves.
Needs Transfer::needs(bool snug) const {
  Needs needs;
  Inventory promised = inventory();
  for (const Coming& coming : coming_) {
    const Region& region = *coming.region;
    region.lay_out(
        [&](std::size_t limit, std::size_t) {
          if (const std::size_t size = promised.take(limit); size != 0) return Region::Choice{size, Chunk()};
          needs.push_back(region.need(limit));
          return Region::Choice{limit, Chunk()};
        },
        [](Slot, Chunk) {}, snug);
  }
  return needs;
}

void Transfer::reserve_chunks(Deadline deadline) {
  with_chunks(
      deadline, [&](ChunkRequest& request, bool snug) { lay_out_promised(request, snug); }, [&] { places_.clear(); });
}

// Chunks that leave first; for the rest new ones.
void Transfer::lay_out_promised(ChunkRequest& request, bool snug) {
  Inventory promised = inventory();
  for (Coming& coming : coming_) {
    const Region& region = *coming.region;
    region.lay_out(
        [&](std::size_t limit, std::size_t room) {
          if (const std::size_t size = promised.take(limit); size != 0) return Region::Choice{size, Chunk()};
          Chunk chunk;
          try {
            request.gather();
            chunk = request.next(limit, region.largest_chunk(), false);
          } catch (const ChunkUnavailable&) {
            // Larger than needed: on a full device better than nothing, and better than waiting.
            const std::size_t size = promised.take_smallest(room);
            if (size != 0) return Region::Choice{size, Chunk()};
            chunk = request.next(limit, region.largest_chunk(), true);
          }
          return Region::Choice{chunk.size(), std::move(chunk)};
        },
        [&](Slot slot, Chunk chunk) { places_.push_back({&coming, slot, std::move(chunk)}); }, snug);
  }
}

void Transfer::commit() {
  for (Leaving& leaving : leaving_) {
    if (leaving.region->backup != leaving.backup) dropped_.push_back(std::move(leaving.region->backup));
    leaving.region->backup = leaving.backup;
  }
}

void Transfer::run(Deadline deadline) noexcept {
  try {
    if (leaving_.empty() && places_.empty()) {
      come_in_alone(deadline);
    } else {
      for (Coming& coming : coming_) use_left_mapped(coming);
      for (Place& place : places_) {
        ++place.coming->to_come;
        if (!place.chunk) waiting_[place.slot.size].push_back(&place);
      }
      for (Place& place : places_)
        if (place.chunk) put(*place.coming, place.slot, std::move(place.chunk));
    }
  } catch (...) {
    failed_ = std::current_exception();
  }
  for (Leaving& leaving : leaving_) let_go(leaving);
  if (refused_ && !drain_copies(*device_.driver)) core().mark_lost(device_);
  try {
    if (!failed_) finish_coming();
  } catch (...) {
    failed_ = std::current_exception();
  }
  dropped_.clear();
}

void Transfer::let_go(Leaving& leaving) {
  for (std::size_t batch = 0; batch < leaving.batches.size(); ++batch) {
    std::vector<Chunk> freed;
    try {
      if (leaving.saver != nullptr) leaving.saver->wait(batch);
      std::vector<std::size_t> offsets;
      for (const Slot& slot : leaving.batches[batch]) offsets.push_back(slot.offset);
      if (const auto error = leaving.region->unmap(offsets, freed); error && !refused_)
        refused_ = std::make_exception_ptr(*error);
    } catch (...) {
      if (!refused_) refused_ = std::current_exception();
    }
    for (Chunk& chunk : freed) hand_on(std::move(chunk));
  }
  if (leaving.saver == nullptr) return;
  leaving.saver.reset();  // whose threads write to `saved`
  copied_ += leaving.backup->saved.bytes() - leaving.saved_before;
}

void Transfer::hand_on(Chunk chunk) {
  released_ += chunk.size();
  auto& places = waiting_[chunk.size()];
  if (failed_ || places.empty()) return;  // back to its source
  Place& place = *places.front();
  places.pop_front();
  try {
    put(*place.coming, place.slot, std::move(chunk));
  } catch (...) {
    failed_ = std::current_exception();
  }
}

// Nothing leaves here, so nothing is lost if this fails: chunks are used as they come.
void Transfer::come_in_alone(Deadline deadline) {
  with_chunks(deadline, [&](ChunkRequest& request, bool snug) { map_as_they_come(request, snug); }, [&] { undo(); });
}

void Transfer::map_as_they_come(ChunkRequest& request, bool snug) {
  for (Coming& coming : coming_) {
    open(coming);
    use_left_mapped(coming);
  }
  for (Coming& coming : coming_) {
    const Region& region = *coming.region;
    coming.to_come = std::numeric_limits<std::size_t>::max();  // not known yet
    region.lay_out(
        [&](std::size_t limit, std::size_t) {
          Chunk chunk = request.next(limit, region.largest_chunk(), true);
          return Region::Choice{chunk.size(), std::move(chunk)};
        },
        [&](Slot slot, Chunk chunk) { put(coming, slot, std::move(chunk)); }, snug);
    give_access(coming);
    coming.to_come = 0;
  }
}

// What reading needs; once, until undo() closes it.
void Transfer::open(Coming& coming) {
  Region& region = *coming.region;
  if (coming.loader == nullptr && !coming.wanted.empty())
    coming.loader = region.backup->loader(*device_.driver, region.base, coming.wanted, progress_);
}

// Chunks that a refused unmap, or a failed copy, left: their access is not known.
void Transfer::use_left_mapped(Coming& coming) {
  const std::vector<Slot> left_mapped = coming.region->slots();
  coming.had_chunks = !left_mapped.empty();
  coming.region->allow(left_mapped);
  for (const Slot& slot : left_mapped) write_into(coming, slot);
}

void Transfer::put(Coming& coming, Slot slot, Chunk chunk) {
  coming.mapping.add(slot, std::move(chunk));
  if (!coming.run.empty() && range_of(coming.run).end() != slot.offset) give_access(coming);
  coming.run.push_back(slot);
  --coming.to_come;
  const bool waits_for_more = coming.loader == nullptr || bytes_of(coming.run) < kBatch;
  if (coming.to_come == 0 || !waits_for_more) give_access(coming);
}

void Transfer::give_access(Coming& coming) {
  if (coming.run.empty()) return;
  coming.region->allow(coming.run);
  write_into(coming, range_of(std::exchange(coming.run, {})));
}

void Transfer::write_into(Coming& coming, Range range) {
  const Region& region = *coming.region;
  if (coming.fills)
    device_.driver->fill(region.base + range.offset, range.size, region.fill == Fill::zero ? 0 : kPoison);
  if (coming.loader != nullptr) coming.loader->add(range);
}

void Transfer::finish_coming() {
  bool fills = false;
  for (Coming& coming : coming_) {
    if (coming.to_come > 0)
      throw DriverError("unmap", 0, "a chunk promised to region '" + coming.region->tag + "' could not be unmapped");
    fills |= coming.fills;
  }
  for (Coming& coming : coming_) {
    if (coming.loader == nullptr) continue;
    coming.loader->finish();
    coming.loader.reset();
    copied_ += bytes_of(coming.wanted);
  }
  if (fills) device_.driver->wait(device_.driver->mark(Direction::in));
}

void Transfer::keep() {
  under_way_ = false;
  for (Coming& coming : coming_) {
    restored_ += coming.mapping.commit();
    Region& region = *coming.region;
    if (coming.had_chunks) region.return_empty();
    const bool kept = region.frozen && region.backup != nullptr && region.backup->complete() &&
                      !coming.wanted.empty() &&
                      region.backup.use_count() == 1;  // nobody has a view through which it might change
    if (!kept) dropped_.push_back(std::move(region.backup));
    region.backup = kept ? std::move(region.backup) : nullptr;
  }
}

void Transfer::undo() noexcept {
  if (!under_way_) return;
  for (Leaving& leaving : leaving_) leaving.saver.reset();
  for (Coming& coming : coming_) coming.loader.reset();
  if (!drain_copies(*device_.driver)) core().mark_lost(device_);
  for (Coming& coming : coming_) {
    coming.mapping.undo();
    coming.run.clear();
    coming.to_come = 0;
  }
}

}  // namespace memsaver
