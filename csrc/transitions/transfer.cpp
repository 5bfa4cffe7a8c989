#include "transitions/transfer.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "backup/disk_backup.h"
#include "regions/device_wait.h"
#include "regions/eviction.h"

namespace memsaver {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(10);
constexpr double kRepeated = 0.1;        // seconds between two waits of one demand
constexpr unsigned char kPoison = 0xff;  // NaN in the usual floating-point types

Range range_of(const std::vector<Slot>& neighbours) { return {neighbours.front().offset, bytes_of(neighbours)}; }

// In the directory; without one, or without contents, in host memory.
std::shared_ptr<Backup> new_backup(Device& device, const std::string& directory, Ranges contents) {
  if (directory.empty() || contents.empty()) return host_backup(device.arena, std::move(contents));
  return disk_backup(device.arena, device.files, directory, std::move(contents));
}

}  // namespace

// A demand that is repeated waits on: its waits are one event.
void Stages::add(const Device& device, const char* kind, const MemoryWait& span) {
  const auto seconds = [this](Deadline at) { return std::chrono::duration<double>(at - since_).count(); };
  std::lock_guard lock(mutex_);
  Event event{device.driver->name, kind, seconds(span.began), seconds(span.ended), span.bytes, span.holders};
  for (Event& each : events_) {
    if (each.kind != event.kind || each.device != event.device || each.ended + kRepeated < event.began) continue;
    each.ended = event.ended;
    if (each.holders.empty()) each.holders = std::move(event.holders);
    return;
  }
  if (events_.size() < kMost) events_.push_back(std::move(event));
}

// The sizes of the outgoing chunks that serve incoming regions, before they are unmapped.
struct Transfer::Inventory : std::multiset<std::size_t> {
  // Takes the largest size up to `limit` for a region; 0 if there is none.
  std::size_t take_for(const Region& region, std::size_t limit) {
    const auto beyond = upper_bound(limit);
    if (region.one_handle || beyond == begin()) return 0;
    return extract(std::prev(beyond)).value();
  }
  // Takes the smallest size, if it is at most `limit`; else 0.
  std::size_t take_smallest(std::size_t limit) { return *begin() > limit ? 0 : extract(begin()).value(); }
};

void Transfer::add_coming(Region& region, bool restore) {
  // Chunks that a refused pause left mapped and not saved have their contents: they are neither copied in nor filled.
  const bool fills =
      (region.fill == Fill::zero || region.fill == Fill::poison) && (!restore || region.backup() == nullptr);
  coming_.push_back({.region = &region, .wanted = {}, .fills = fills, .mapping = Mapping(region), .restores = restore});
  if (region.offered_bytes() == 0) claim(coming_.back());
}

// From here on no demand takes the offered chunks. Waits for the one that takes them now.
void Transfer::claim(Coming& coming) {
  if (coming.claimed) return;
  Region& region = *coming.region;
  {
    std::unique_lock lock(core().mutex);
    if (!wait_until(lock, core().changed, kNever, [&] { return !region.evicting(); }))
      throw Error("the interpreter exits: no transition can begin");
    region.claim(true);
  }
  coming.claimed = true;
  coming.wanted = {};
  if (const std::shared_ptr<Backup> backup = region.backup(); coming.restores && backup != nullptr)
    coming.wanted =
        RangeSet(region.offered_slots()).missing_from(intersect(backup->saved.within(kEverywhere), region.live()));
}

// Waits for the first chunk while the region's own chunks stay offered. If each of two waiting resumes held its own
// chunks, each could lack those of the other. The first chunk shows that it is this demand's turn.
Chunk Transfer::claim_offered(ChunkRequest& request, bool snug) {
  Chunk first;
  if (std::all_of(coming_.begin(), coming_.end(), [](const Coming& coming) { return coming.claimed; })) return first;
  for (Coming& coming : coming_) coming.region->set_demand(request.number());
  const Needs wanted = needs(snug);
  if (!wanted.empty()) first = request.next(wanted.front().limit, wanted.front().fresh, WaitFor::memory);
  for (Coming& coming : coming_) claim(coming);
  // Others have taken offered chunks since this demand began. In a shared pool it grows; the driver has no queue, and a
  // part of the memory, held over a wait, could be missing elsewhere.
  if (!device_.pooled && bytes_of(needs(snug)) > bytes_of(wanted))
    throw ChunkUnavailable("resume", "offered chunks were taken meanwhile");
  return first;
}

// Chooses the backup of a region. It exists already if the region is sealed, or if an earlier pause saved a part of the
// contents.
void Transfer::save_where(Leaving& leaving) {
  Region& region = *leaving.region;
  if (leaving.continues) {
    leaving.backup = region.backup();
  } else if (leaving.policy == Policy::none) {
    // The contents are discarded.
  } else if (region.sealed()) {
    leaving.backup = region.backup();
    if (!RangeSet(leaving.backup->parts()).covers(leaving.live))
      throw Error(
          "region '" + region.tag +
          "' is frozen, and its copy lacks some of its allocations: call thaw(), and the next pause makes a new copy");
  } else if (leaving.live.empty()) {
    // There are none.
  } else if (leaving.common != nullptr) {
    leaving.backup = std::move(leaving.common);
  } else if (const std::string directory = leaving.policy == Policy::disk ? core().disk_directory() : "";
             leaving.lazy) {
    leaving.backup = pieced_backup(leaving.live, [&device = device_, directory](Ranges contents) {
      return new_backup(device, directory, std::move(contents));
    });
  } else {
    leaving.backup = new_backup(device_, directory, leaving.live);
  }
}

// Of a lazy pause only the chunks move that an incoming region needs: see give_more().
void Transfer::make_batches(Leaving& leaving) {
  const std::size_t least = leaving.copies() ? kCopyBatch : std::numeric_limits<std::size_t>::max();
  std::vector<Slot> moving = leaving.region->slots();
  if (leaving.lazy) leaving.offers = std::exchange(moving, {});
  if (leaving.continues) leaving.region->allow(moving);  // a resume that failed may have left them without access
  leaving.batches = in_batches(moving, least);
}

bool Transfer::may_give() const {
  return !coming_.empty() &&
         std::any_of(leaving_.begin(), leaving_.end(), [](const Leaving& each) { return !each.offers.empty(); });
}

// Moves more chunks of lazy pauses, for incoming regions. Returns whether there were any.
bool Transfer::give_more(std::size_t bytes) {
  if (!may_give()) return false;
  for (Leaving& leaving : leaving_) {
    if (leaving.offers.empty() || bytes == 0) continue;
    Ranges moving;
    for (const Ranges& batch : leaving.batches) moving.insert(moving.end(), batch.begin(), batch.end());
    for (const Slot& slot : enough_of(leaving.offers, bytes)) {
      bytes -= std::min(bytes, slot.size);
      std::erase_if(leaving.offers, [&](const Slot& each) { return each.offset == slot.offset; });
      moving.push_back(slot);
    }
    leaving.batches = in_batches(sorted(std::move(moving)), kCopyBatch);
  }
  return true;
}

// The bytes of the demand that its source does not have. At least a page: the attempt has failed.
std::size_t Transfer::lacking(bool snug) const {
  const std::size_t needed = bytes_of(needs(snug)), free = device_.source().look().free;
  return std::max(kPage, needed - std::min(needed, free));
}

void Transfer::wait_idle() {
  if (leaving_.empty()) return;
  stages_.enter("device");
  losing_context([&] {
    check_backups();
    const std::uint64_t freed = device_.resting.frees();
    device_.wait_idle(bounds_.whole);
    device_.resting.reap(freed);
  });
}

void Transfer::prepare(bool chunks) {
  losing_context([&] { reserve_and_start(chunks); });
}

template <typename Act>
void Transfer::losing_context(Act act) {
  try {
    act();
  } catch (const DriverError& error) {
    if (error.context_lost) core().mark_lost(device_);
    throw;
  }
}

// Checks that there is room for all contents. Takes nothing: the wait for the device may still fail.
void Transfer::check_backups() {
  std::size_t host_bytes = 0;
  for (Leaving& leaving : leaving_) {
    leaving.live = leaving.region->parts(leaving.live);
    if (leaving.policy == Policy::host && !leaving.continues && !leaving.lazy && !leaving.region->sealed() &&
        leaving.common == nullptr)
      host_bytes += bytes_of(leaving.live);
  }
  device_.arena.check(host_bytes);  // for all regions together, before one of them takes memory
  for (Leaving& leaving : leaving_) save_where(leaving);
}

void Transfer::reserve_and_start(bool chunks) {
  for (Leaving& leaving : leaving_) make_batches(leaving);
  // Regions without copies are unmapped first, so that their chunks serve incoming regions while others are copied out.
  leaving_.sort([](const Leaving& a, const Leaving& b) { return !a.copies() && b.copies(); });
  coming_.sort([](const Coming& a, const Coming& b) { return !a.wanted.empty() && b.wanted.empty(); });
  under_way_ = true;
  for (Coming& coming : coming_)
    if (coming.claimed) open(coming);  // reserves threads and memory for reading
  if (chunks) {
    const auto use = [&](Coming& coming, Slot slot, Chunk chunk) {
      places_.push_back({&coming, slot, std::move(chunk)});
    };
    const auto give_back = [&] {
      places_.clear();
      for (Coming& coming : coming_) release(coming);
    };
    with_chunks([&](ChunkRequest& request, bool snug) { lay_out(request, snug, use); }, give_back);
    for (Coming& coming : coming_) open(coming);
  }
  for (Leaving& leaving : leaving_)
    for (const Range& span : leaving.copies() ? spans_of(leaving.batches) : Ranges())
      stages_.bytes_planned += leaving.to_count.emplace_back(
          bytes_of(leaving.backup->saved.missing_from(intersect(leaving.backup->runs(), {span}))));
  for (Leaving& leaving : leaving_) {
    if (!leaving.copies() || leaving.batches.empty()) continue;
    stages_.enter("backup");
    leaving.copied_before = leaving.backup->copied_bytes();
    leaving.saver = leaving.backup->saver(*device_.driver, spans_of(leaving.batches));
    const Deadline late = std::max(bounds_.whole, now() + kOneLook);
    begins(copies_out_at_);
    leaving.saver->start(  // may wait until host memory is made
        [&](std::size_t batch) { stages_.bytes_copied += std::exchange(leaving.to_count[batch], 0); });
    if (now() >= late)
      throw WaitTimeoutError(
          "pinned host memory for region '" + leaving.region->tag + "' was not ready within the timeout", "backup", 0);
  }
}

// Repeats the attempt until the deadline: another borrower may have taken the last chunks that it needs.
template <typename Attempt, typename GiveBack>
void Transfer::with_chunks(Attempt attempt, GiveBack give_back) {
  std::size_t needed = 0, going_out = 0;
  for (const Coming& coming : coming_) needed += coming.region->missing_bytes();
  for (const Leaving& leaving : leaving_) going_out += leaving.region->mapped_bytes();
  const auto is_own = [this](const Region& region) {
    return std::any_of(coming_.begin(), coming_.end(), [&](const Coming& each) { return each.region == &region; });
  };
  if (needed > 0) stages_.enter("memory");
  const Deadline deadline = std::min(bounds_.whole, deadline_in(bounds_.memory_s));
  const Deadline began = now();  // after it, so that a wait of 0 s has passed at its begin
  if (!device_.pooled && deadline > began && device_.driver->memory().free + device_.retained.idle_bytes() < needed)
    device_.reclaimer.finish(now());  // begins it; a broker asks this process as it asks the others
  bool reclaims = true;
  std::optional<Deadline> gone;  // the end of the wait for obstacles at offered chunks, after `deadline`
  for (bool snug = false;;) {
    bool never = false;
    const std::uint64_t seen = device_.resting.given_back();
    // A broker asks for offered chunks by itself.
    const bool offers = !device_.pooled && device_.may_offer(), gives = may_give();
    try {
      const auto request = device_.source().ask(needs(snug), gives ? now() : deadline, bounds_.whole);
      try {
        attempt(*request, snug);
      } catch (...) {
        stages_.waited(device_, request->waited());
        throw;
      }
      stages_.waited(device_, request->waited());
      return;
    } catch (const ChunkNeverAvailable&) {
      never = true;
      reclaims = false;
    } catch (const ChunkUnavailable&) {
      never = gives || now() >= deadline || waiting_is_over();
    }
    give_back();
    if (!snug && (never || !device_.pooled)) {
      // The exact layout needs less memory; wait only if that is short too. A broker's answer was a wait already.
      snug = true;
      continue;
    }
    // Freed memory of this device is used as well. At the end of the wait, wait up to kShortageWait for its oldest
    // mark.
    const bool reclaimed =
        never ? device_.resting.reclaim(std::min(bounds_.whole, now() + kShortageWait), seen) : device_.resting.reap();
    if (reclaimed) {
      device_.source().settle();
      continue;
    }
    if (gives) {
      give_more(lacking(snug));
      continue;
    }
    if (never && std::exchange(reclaims, false)) {
      device_.reclaimer.finish(std::min(bounds_.whole, now() + kShortageWait));
      device_.source().settle();
      continue;
    }
    if (offers) {
      const Evicted evicted = evict(device_, lacking(snug), is_own, bounds_.whole, true);
      if (evicted == Evicted::some) continue;
      if (never && !gone) gone = std::min(bounds_.whole, now() + kShortageWait);
      never = never && (evicted == Evicted::none || now() >= *gone || waiting_is_over());
    }
    if (never) {
      const std::chrono::duration<double> waited = deadline > began ? now() - began : Clock::duration::zero();
      throw device_.out_of_memory(needed, going_out, waited.count());
    }
    WaitsEndWith::look();
    sleep_for(kRetry);
    snug = false;  // with more memory the chunks are larger
  }
}

Transfer::Inventory Transfer::inventory() const {
  Inventory found;
  for (const Leaving& leaving : leaving_) {
    if (leaving.region->one_handle) continue;  // its chunks return to the driver
    for (const Ranges& batch : leaving.batches)
      for (const Slot& slot : batch) found.insert(slot.size);
  }
  return found;
}

// The demand: the chunks of incoming regions, less the outgoing chunks.
Needs Transfer::needs(bool snug) const {
  Needs needs;
  Inventory promised = inventory();
  for (const Coming& coming : coming_) {
    const Region& region = *coming.region;
    Layout layout = region.layout(snug);
    while (const auto gap = layout.next()) {
      const std::size_t size = promised.take_for(region, gap->limit);
      if (size == 0) needs.push_back(region.need(gap->limit));
      layout.place(size != 0 ? size : gap->limit);
    }
  }
  return needs;
}

// Plans outgoing chunks first, and takes chunks from the source for the rest. `use` gets the places one after the
// other, and their chunks: an empty one is an outgoing chunk.
template <typename Use>
void Transfer::lay_out(ChunkRequest& request, bool snug, Use use) {
  Inventory promised = inventory();
  Chunk first = claim_offered(request, snug);
  for (Coming& coming : coming_) {
    const Region& region = *coming.region;
    Layout layout = region.layout(snug);
    while (const auto gap = layout.next()) {
      std::size_t size = promised.take_for(region, gap->limit);
      Chunk chunk;
      if (size == 0 && first && (region.one_handle ? first.size() == gap->limit : first.size() <= gap->limit))
        chunk = std::move(first);
      if (size == 0 && !chunk && !promised.empty() && !region.one_handle) {
        try {
          chunk = request.next(gap->limit, region.largest_chunk(), WaitFor::none);
        } catch (const ChunkUnavailable&) {
          // On a full device use an outgoing chunk that is larger than needed, before waiting.
          size = promised.take_smallest(gap->room);
        }
      }
      if (size == 0 && !chunk) chunk = request.next(gap->limit, region.largest_chunk(), WaitFor::memory);
      if (chunk) size = chunk.size();
      layout.place(size);
      use(coming, {gap->at, size}, std::move(chunk));
    }
  }
}

void Transfer::commit() {
  for (Leaving& leaving : leaving_) {
    std::shared_ptr<Backup> former = leaving.region->replace_backup(leaving.backup);
    if (former != leaving.backup) dropped_.push_back(std::move(former));
  }
}

void Transfer::run() noexcept {
  try {
    if (leaving_.empty() && places_.empty()) {
      with_chunks([&](ChunkRequest& request, bool snug) { come_in_alone(request, snug); }, [&] { undo(); });
    } else {
      for (Coming& coming : coming_) use_kept(coming);
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
  stages_.enter("move");
  for (Leaving& leaving : leaving_) let_go(leaving);
  if (copies_out_at_) stages_.copied(device_, Direction::out, *copies_out_at_, moved_.copied_bytes);
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
      if (leaving.saver != nullptr) {
        leaving.saver->wait(batch);
        stages_.bytes_copied += std::exchange(leaving.to_count[batch], 0);
      }
      if (const auto error = leaving.region->unmap(leaving.batches[batch], &freed); error && !refused_)
        refused_ = std::make_exception_ptr(*error);
    } catch (...) {
      if (!refused_) refused_ = std::current_exception();
    }
    for (Chunk& chunk : freed) {
      moved_.released_bytes += chunk.size();
      if (!leaving.region->one_handle) hand_on(std::move(chunk));
    }
  }
  if (const auto error = leaving.region->unmap(leaving.offers, nullptr); error && !refused_)
    refused_ = std::make_exception_ptr(*error);
  if (leaving.saver == nullptr) return;
  leaving.saver.reset();  // its threads write to `saved`
  moved_.copied_bytes += leaving.backup->copied_bytes() - leaving.copied_before;
}

void Transfer::hand_on(Chunk chunk) {
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

// For a resume alone: it can be undone without loss, so chunks are used one after the other.
void Transfer::come_in_alone(ChunkRequest& request, bool snug) {
  const auto begin = [&](Coming& coming) {
    if (std::exchange(coming.to_come, std::numeric_limits<std::size_t>::max()) != 0) return;  // not known yet
    open(coming);
    use_kept(coming);
  };
  lay_out(request, snug, [&](Coming& coming, Slot slot, Chunk chunk) {
    begin(coming);
    put(coming, slot, std::move(chunk));
  });
  for (Coming& coming : coming_) {
    begin(coming);
    give_access(coming);
    coming.to_come = 0;
  }
}

void Transfer::count_arrived(Coming& coming, std::size_t bytes) {
  coming.arrived += bytes;
  stages_.bytes_copied += bytes;
}

// Makes the loader, once until close().
void Transfer::open(Coming& coming) {
  if (coming.loader != nullptr || coming.wanted.empty()) return;
  coming.loader = coming.region->backup()->loader(*device_.driver, coming.wanted);
  stages_.bytes_planned += bytes_of(coming.wanted);
}

// Before the end of the copies: another attempt copies all contents.
void Transfer::close(Coming& coming) noexcept {
  if (coming.loader == nullptr) return;
  coming.loader.reset();
  stages_.bytes_copied -= std::exchange(coming.arrived, 0);
  stages_.bytes_planned -= bytes_of(coming.wanted);
}

// Uses offered chunks, and those that a refused unmap or a failed copy left mapped. The access of these is unknown.
void Transfer::use_kept(Coming& coming) {
  Region& region = *coming.region;
  coming.offered = region.offered_slots();
  region.map_offered(coming.offered);
  coming.kept = region.slots();
  region.allow(coming.kept);
  for (const Slot& slot : coming.kept) {
    if (coming.fills && region.backup() == nullptr) fill(coming, slot);
    fills_ |= coming.fills || region.clean({slot}, coming.wanted);
    load(coming, slot);
  }
}

// Their contents are not needed any more: nothing undoes the resume from here on.
void Transfer::fill_kept() noexcept {
  try {
    for (Coming& coming : coming_) {
      if (!coming.fills || coming.kept.empty() || coming.region->backup() == nullptr) continue;
      for (const Slot& slot : coming.kept) fill(coming, slot);
      device_.driver->wait(device_.driver->mark(Direction::in));
    }
  } catch (...) {
    if (!refused_) refused_ = std::current_exception();
  }
}

void Transfer::fill(const Coming& coming, Range range) {
  device_.driver->fill(range.offset, range.size, coming.region->fill == Fill::zero ? 0 : kPoison);
}

void Transfer::put(Coming& coming, Slot slot, Chunk chunk) {
  coming.mapping.add(slot, std::move(chunk));
  if (!coming.run.empty() && range_of(coming.run).end() != slot.offset) give_access(coming);
  coming.run.push_back(slot);
  --coming.to_come;
  const bool waits_for_more = coming.loader == nullptr || bytes_of(coming.run) < kCopyBatch;
  if (coming.to_come == 0 || !waits_for_more) give_access(coming);
}

void Transfer::give_access(Coming& coming) {
  if (coming.run.empty()) return;
  Region& region = *coming.region;
  region.allow(coming.run);
  const std::vector<Slot> neighbours = std::exchange(coming.run, {});
  const Range range = range_of(neighbours);
  if (coming.fills) fill(coming, range);
  fills_ |= coming.fills || region.clean(neighbours, coming.wanted);
  load(coming, range);
}

void Transfer::begins(std::optional<Deadline>& copies_at) {
  if (!copies_at) copies_at = now();
  if (!copying_) copying_.emplace(device_.copying);
}

void Transfer::load(Coming& coming, Range range) {
  if (coming.loader == nullptr) return;
  begins(copies_in_at_);
  coming.loader->add(range);
  count_arrived(coming, coming.loader->arrived(false));
}

void Transfer::finish_coming() {
  for (Coming& coming : coming_)
    if (coming.to_come > 0)
      throw DriverError("unmap", 0, "a chunk promised to region '" + coming.region->tag + "' could not be unmapped");
  const std::size_t copied_out = moved_.copied_bytes;
  for (Coming& coming : coming_) {
    if (coming.loader == nullptr) continue;
    while (const std::size_t bytes = coming.loader->arrived(true)) count_arrived(coming, bytes);
    coming.loader.reset();
    moved_.copied_bytes += bytes_of(coming.wanted);
  }
  if (copies_in_at_) stages_.copied(device_, Direction::in, *copies_in_at_, moved_.copied_bytes - copied_out);
  if (fills_) device_.driver->wait(device_.driver->mark(Direction::in));
  for (Coming& coming : coming_) coming.region->declare_clean(coming.region->slots());
}

void Transfer::keep() {
  under_way_ = false;
  for (Coming& coming : coming_) {
    moved_.restored_bytes += coming.mapping.commit();
    Region& region = *coming.region;
    if (!coming.kept.empty()) region.sweep_all();  // once the region is active
    std::shared_ptr<Backup> backup = region.replace_backup(nullptr);
    const bool kept = region.frozen && backup != nullptr && backup->complete() && coming.restores &&
                      !(coming.wanted.empty() && coming.offered.empty()) &&
                      backup.use_count() == 1;  // no view exists through which it could change
    if (kept)
      region.replace_backup(std::move(backup));
    else
      dropped_.push_back(std::move(backup));
  }
}

// Demands may take the offered chunks again.
void Transfer::release(Coming& coming) noexcept {
  Region& region = *coming.region;
  region.unmap(std::exchange(coming.offered, {}), nullptr);
  if (region.offered_bytes() == 0 || !std::exchange(coming.claimed, false)) return;
  close(coming);
  std::lock_guard lock(core().mutex);
  region.claim(false);
}

void Transfer::undo() noexcept {
  if (!under_way_) return;
  for (Leaving& leaving : leaving_) leaving.saver.reset();
  for (Coming& coming : coming_) close(coming);
  copies_in_at_.reset();
  if (!drain_copies(*device_.driver)) core().mark_lost(device_);
  copying_.reset();
  for (Coming& coming : coming_) {
    coming.mapping.undo();
    coming.run.clear();
    coming.to_come = 0;
    release(coming);
  }
}

}  // namespace memsaver
