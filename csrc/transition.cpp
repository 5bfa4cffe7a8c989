#include "transition.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <set>
#include <thread>

#include "transfer.h"

namespace memsaver {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(2);

bool contains(const std::vector<Region*>& regions, const Region* region) {
  return std::find(regions.begin(), regions.end(), region) != regions.end();
}

}  // namespace

// A region on its way in: where each chunk goes, and the chunks that were reserved for it.
struct Transition::Incoming {
  struct Place {
    Slot slot;
    Chunk chunk;  // empty: a chunk of this size that goes out is promised to this place
  };
  Region* region;
  std::vector<Place> places;
};

// The sizes of the chunks that go out, while they are still in use there.
class Transition::Inventory {
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

Transition::Transition(std::vector<Region*> pause, std::vector<Region*> resume)
    : wanted_out_(std::move(pause)), wanted_in_(std::move(resume)) {}

void Transition::abort() {
  if (marked_ && usable()) finish();  // in a forked child the marks are nobody's
}

void Transition::begin() {
  began_ = Clock::now();
  Core& all = core();
  std::unique_lock lock(all.mutex);
  const auto at_rest = [](const Region* region) {
    return region->state != State::pausing && region->state != State::resuming;
  };
  all.changed.wait(lock, [&] {
    return std::all_of(wanted_out_.begin(), wanted_out_.end(), at_rest) &&
           std::all_of(wanted_in_.begin(), wanted_in_.end(), at_rest);
  });
  for (const auto* wanted : {&wanted_out_, &wanted_in_})
    for (const Region* region : *wanted)
      if (region->state == State::lost)
        throw RegionPausedError("region '" + region->tag + "' is lost: the context of " + region->device.driver->name +
                                    " died, and only a new process brings it back",
                                region->tag, "lost");
  // A region that a refused unmap left behind has memory to give back still.
  for (Region* region : wanted_out_) {
    if (region->state == State::paused && region->mapped_bytes() > 0) was_paused_.push_back(region);
    if (region->state == State::active || region->mapped_bytes() > 0) pausing_.push_back(region);
  }
  for (Region* region : wanted_in_)
    if (region->state == State::paused) resuming_.push_back(region);
  if (!pausing_.empty() && all.capturing()) {
    pausing_.clear();
    resuming_.clear();
    throw Error("a CUDA graph is being captured: a pause would have to wait for the device, which breaks the capture");
  }
  for (Region* region : pausing_) region->state = State::pausing;
  for (Region* region : resuming_) region->state = State::resuming;
  marked_ = true;
  all.changed.wait(lock, [&] {
    return std::all_of(pausing_.begin(), pausing_.end(), [](const Region* region) { return region->users == 0; });
  });
}

std::vector<Device*> Transition::devices() const {
  std::set<Device*> found;
  for (const auto* marked : {&pausing_, &resuming_})
    for (const Region* region : *marked) found.insert(&region->device);
  return {found.begin(), found.end()};
}

Transition::Outcome Transition::run(const std::vector<Pause>& pauses, bool restore, Deadline deadline) {
  Outcome outcome;
  const auto on_failure = [&] {
    for (Device* device : devices())
      if (!drain_copies(*device->driver)) core().mark_lost(*device);
    finish();
  };

  std::vector<std::pair<Region*, std::unique_ptr<Backup>>> backups;
  std::vector<Incoming> incoming;
  try {
    std::set<Device*> busy;
    for (const Pause& pause : pauses) {
      busy.insert(&pause.region->device);
      std::vector<Range> live;
      {
        std::lock_guard lock(core().mutex);
        // A region paused before and only half unmapped keeps the backup it has.
        if (pause.policy == Policy::host && !contains(was_paused_, pause.region))
          live = pause.region->live_within(pause.live);
      }
      if (!live.empty()) backups.emplace_back(pause.region, std::make_unique<Backup>(pause.region->device.arena, live));
    }
    for (Device* device : busy) core().synchronize(*device);
    {
      std::lock_guard lock(core().mutex);
      for (const Pause& pause : pauses) pause.region->reap(pause.region->frees());
    }
    for (Region* region : resuming_) incoming.push_back({region, {}});
    for (Device* device : devices()) reserve_chunks(*device, incoming, deadline);
    for (const auto& [region, backup] : backups)
      outcome.copied_bytes += copy_out(*region->device.driver, region->base, *backup);
    for (Device* device : busy) device->driver->finish_copies();
  } catch (const std::exception&) {
    on_failure();
    throw;
  }

  // The commit point: from here on the regions that go out are paused, whatever the driver still refuses.
  std::exception_ptr refusal;
  std::map<Device*, std::map<std::size_t, std::vector<Chunk>>> handed;
  {
    std::lock_guard lock(core().mutex);  // others may read the figures of a region in transition
    for (auto& [region, backup] : backups) region->backup = std::move(backup);
  }
  for (Region* region : pausing_) {
    std::vector<Chunk> freed;
    if (const auto error = region->unmap(region->chunk_offsets(), freed); error && !refusal)
      refusal = std::make_exception_ptr(*error);
    for (Chunk& chunk : freed) {
      outcome.released_bytes += chunk.size();
      handed[&region->device][chunk.size()].push_back(std::move(chunk));
    }
    gone_out_.push_back(region);
  }
  const auto give_back = [&] {
    for (auto& [device, by_size] : handed)
      for (auto& [size, chunks] : by_size)
        for (Chunk& chunk : chunks) device->pool.give(std::move(chunk));
    handed.clear();
  };
  try {
    for (Device* device : devices()) {
      std::vector<Incoming> here;
      for (Incoming& each : incoming)
        if (&each.region->device == device) here.push_back(std::move(each));
      come_in(here, handed[device], restore, outcome);
    }
  } catch (const std::exception&) {
    give_back();
    on_failure();
    if (refusal) std::rethrow_exception(refusal);
    throw;
  }
  give_back();
  finish();
  if (refusal) std::rethrow_exception(refusal);
  outcome.paused = gone_out_;
  outcome.resumed = come_in_;
  outcome.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
  return outcome;
}

void Transition::reserve_chunks(Device& device, std::vector<Incoming>& incoming, Deadline deadline) {
  std::size_t needed = 0;
  for (const Incoming& each : incoming)
    if (&each.region->device == &device) needed += each.region->missing_bytes();
  if (needed == 0) return;
  for (;;) {
    Inventory inventory;
    std::size_t going_out = 0;
    for (const Region* region : pausing_) {
      if (&region->device != &device) continue;
      for (const std::size_t size : region->chunk_sizes()) {
        inventory.add(size);
        going_out += size;
      }
    }
    try {
      const auto request = device.pool.ask(needed - std::min(needed, going_out), deadline);
      for (Incoming& each : incoming) {
        if (&each.region->device != &device) continue;
        std::vector<Chunk> chunks;
        const std::vector<Slot> slots = each.region->lay_out([&](std::size_t limit, std::size_t room) {
          std::size_t size = inventory.take(limit);
          if (size == 0) {
            try {
              chunks.push_back(request->next(limit, each.region->largest_chunk()));
              return chunks.back().size();
            } catch (const ChunkUnavailable&) {
              size = inventory.take_smallest(room);  // larger than needed: on a full device better than nothing
              if (size == 0) throw;
            }
          }
          chunks.emplace_back();
          return size;
        });
        each.places.clear();
        for (std::size_t i = 0; i < slots.size(); ++i) each.places.push_back({slots[i], std::move(chunks[i])});
      }
      return;
    } catch (const ChunkUnavailable&) {
      for (Incoming& each : incoming)
        if (&each.region->device == &device)
          for (Incoming::Place& place : std::exchange(each.places, {})) device.pool.give(std::move(place.chunk));
      if (Clock::now() >= deadline)
        throw OutOfMemoryError(device.driver->name, needed,
                               device.driver->memory().free + device.pool.idle_bytes() + going_out);
      std::this_thread::sleep_for(kRetry);
    }
  }
}

void Transition::come_in(std::vector<Incoming>& incoming, std::map<std::size_t, std::vector<Chunk>>& handed,
                         bool restore, Outcome& outcome) {
  if (incoming.empty()) return;
  Driver& driver = *incoming.front().region->device.driver;
  std::vector<Mapping> mappings;
  std::size_t copied = 0;
  try {
    for (Incoming& each : incoming) {
      Region& region = *each.region;
      Mapping& mapping = mappings.emplace_back(region);
      std::vector<Slot> left_mapped;  // by an unmap that was refused: their access is not known
      const auto offsets = region.chunk_offsets(), sizes = region.chunk_sizes();
      for (std::size_t i = 0; i < offsets.size(); ++i) left_mapped.push_back({offsets[i], sizes[i]});
      for (Incoming::Place& place : each.places) {
        if (!place.chunk) {
          auto& same_size = handed[place.slot.size];
          if (same_size.empty())
            throw DriverError("unmap", 0, "a chunk promised to region '" + region.tag + "' could not be unmapped");
          place.chunk = std::move(same_size.back());
          same_size.pop_back();
        }
        mapping.add(place.slot, std::move(place.chunk));
      }
      region.allow(left_mapped);
      mapping.allow();
      if (restore && region.backup) {
        std::vector<Range> live;
        {
          std::lock_guard lock(core().mutex);
          live = region.live();
        }
        copied += copy_in(driver, region.base, *region.backup, live);
      }
    }
    driver.finish_copies();
  } catch (...) {
    drain_copies(driver);
    throw;
  }
  outcome.copied_bytes += copied;
  std::vector<std::unique_ptr<Backup>> restored;  // let go of after the lock: the arena may be busy growing
  std::lock_guard lock(core().mutex);
  for (std::size_t i = 0; i < incoming.size(); ++i) {
    outcome.restored_bytes += mappings[i].commit();
    restored.push_back(std::move(incoming[i].region->backup));
    come_in_.push_back(incoming[i].region);
  }
}

void Transition::finish() {
  Core& all = core();
  std::lock_guard lock(all.mutex);
  marked_ = false;
  for (Region* region : pausing_)
    if (region->state == State::pausing)
      region->state = contains(gone_out_, region) || contains(was_paused_, region) ? State::paused : State::active;
  for (Region* region : resuming_)
    if (region->state == State::resuming) region->state = contains(come_in_, region) ? State::active : State::paused;
  for (const auto* marked : {&pausing_, &resuming_})
    for (Region* region : *marked) region->settle();
  all.changed.notify_all();
}

}  // namespace memsaver
