#include "regions/eviction.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "regions/core.h"

namespace memsaver {
namespace {

constexpr std::size_t kAtOnce = std::size_t{1} << 30;  // then the thread checks for signals, and others get their turn
constexpr std::size_t kAhead = 128 * kMiB;             // of copies ahead of a demand
constexpr std::size_t kAny = static_cast<std::size_t>(-1);
constexpr std::size_t kPlainShare = 32;  // of all offers, a demand gets one in so many, if that takes no copy

std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "";
}

using Look = std::function<void()>;  // called between batches of copies. An exception in it keeps the rest offered
struct DeadlinePassed {};

// The region is marked. Saves the contents of offered chunks, and returns the chunks to their source, or keeps them
// offered.
Given copy_out(Region& region, Backup& backup, const std::vector<Slot>& slots, const Look& look, bool keeps = false) {
  Driver& driver = *region.device.driver;
  const std::size_t before = backup.copied_bytes();
  const Deadline began = now();
  Given given;
  std::unique_ptr<Saver> saver;
  try {
    region.map_offered(slots);
    region.allow(slots);
    const std::vector<Ranges> batches = in_batches(slots, kCopyBatch);
    saver = backup.saver(driver, spans_of(batches));
    saver->start([](std::size_t) {});
    for (std::size_t batch = 0; batch < batches.size(); ++batch) {
      if (batch > 0 && look) look();
      saver->wait(batch);
      std::vector<Chunk> freed;
      const auto refusal = region.unmap(batches[batch], keeps ? nullptr : &freed);
      for (const Chunk& chunk : freed) given.bytes += chunk.size();
      if (refusal) throw DriverError(*refusal);
    }
  } catch (...) {
    given.error = std::current_exception();
  }
  saver.reset();  // adds to the copied bytes
  given.copied = backup.copied_bytes() - before;
  region.device.copied(began, given.copied);
  if (!given.error) return given;
  if (!drain_copies(driver)) core().mark_lost(region.device);
  region.unmap(slots, nullptr);  // those that are mapped still
  return given;
}

struct Choice {
  bool copies;
  std::size_t largest, most;  // bytes: of a chunk, of all
};

struct Offers {
  std::vector<Slot> plain, with_contents;  // those that are given without a copy, and the others
};

Offers offers_of(const Region& region, const Backup* backup, const std::vector<Slot>& slots) {
  Ranges lacking;
  if (backup != nullptr) lacking = backup->saved.missing_from(intersect(backup->parts(), region.parts(slots)));
  Offers offers;
  for (const Slot& slot : slots) {
    const auto next = std::partition_point(lacking.begin(), lacking.end(),
                                           [&](const Range& range) { return range.end() <= slot.offset; });
    (next == lacking.end() || next->offset >= slot.end() ? offers.plain : offers.with_contents).push_back(slot);
  }
  return offers;
}

Given give(Region& region, const std::vector<Slot>& chosen, const Look& look) {
  const std::shared_ptr<Backup> backup = region.backup();
  auto [plain, with_contents] = offers_of(region, backup.get(), chosen);
  std::vector<Chunk> freed;
  {
    std::lock_guard lock(region.device.mutex);
    region.take_offered_locked(plain, freed);
  }
  Given given{bytes_of(plain)};
  freed.clear();  // returned to their source
  for (std::size_t count = with_contents.size(); count > 0 && !with_contents.empty();) {
    count = std::min(count, with_contents.size());
    const auto end = with_contents.begin() + static_cast<std::ptrdiff_t>(count);
    const Given part = copy_out(region, *backup, {with_contents.begin(), end}, look);
    given.bytes += part.bytes;
    given.copied += part.copied;
    given.error = part.error;
    if (!part.error) {
      with_contents.erase(with_contents.begin(), end);
      continue;
    }
    try {
      std::rethrow_exception(part.error);
    } catch (const BackupError&) {
      count /= 2;  // there may be host memory or space for a part of them
    } catch (...) {
      return given;
    }
  }
  return given;
}

// While it lives, the thread that has the evictions looks, which may take the GIL. Others wait for it up to a bound.
class Looking : Immovable {
 public:
  explicit Looking(Device& device) : device_(device) { device.evictions_end = now() + kShortageWait; }
  ~Looking() { device_.evictions_end = kNever; }

 private:
  Device& device_;
};

}  // namespace

// The mark of an eviction, or of a copy ahead of one, which gives no chunks. Core::mutex is held at the construction.
class Evicting : Immovable {
 public:
  explicit Evicting(Region& region) : region_(region), before_(region.offered_bytes()) {
    std::lock_guard lock(region.device.mutex);
    region.evicting_ = true;
    ++region.device.evicting;
  }
  ~Evicting() {
    Device& device = region_.device;
    {
      std::lock_guard lock(core().mutex);
      {
        std::lock_guard bookkeeping(device.mutex);
        region_.evicting_ = false;
      }
      if (region_.state_ == State::paused) region_.settle(State::paused);
      core().changed.notify_all();
    }
    region_.sweep_offered();
    // Also chunks whose tensors were freed meanwhile. If copies are impossible, a demand that saw memory come back
    // would try again for ever.
    if (region_.offered_bytes() < before_) device.resting.returned();
    --device.evicting;
  }

 private:
  Region& region_;
  const std::size_t before_;  // offered bytes
};

bool Region::may_evict() const {
  if (evicting_ || in_use() || offered_bytes_ == 0) return false;
  return state_ == State::paused || (state_ == State::resuming && !claimed_);
}

std::vector<Slot> enough_of(std::vector<Slot> chunks, std::size_t bytes) {
  // The lowest address of a size is its last one, and is chosen first.
  std::sort(chunks.begin(), chunks.end(),
            [](const Slot& a, const Slot& b) { return std::pair(a.size, b.offset) < std::pair(b.size, a.offset); });
  std::vector<Slot> chosen;
  std::size_t beyond = 0;
  while (bytes > 0 && !chunks.empty()) {
    const std::size_t most = std::max(bytes, chunks.front().size);
    const auto best = std::prev(
        std::partition_point(chunks.begin(), chunks.end(), [&](const Slot& slot) { return slot.size <= most; }));
    beyond = best->size - std::min(bytes, best->size);
    bytes -= std::min(bytes, best->size);
    chosen.push_back(*best);
    chunks.erase(best);
  }
  std::erase_if(chosen, [&](const Slot& slot) {
    const bool spare = slot.size <= beyond;
    if (spare) beyond -= slot.size;
    return spare;
  });
  return sorted(std::move(chosen));
}

Evicted evict(Device& device, std::size_t bytes, const std::function<bool(const Region&)>& spares, Deadline deadline,
              bool looks) {
  const Counted copying(device.copying);
  Evicted result = Evicted::none;
  while (bytes > 0 && device.may_offer()) {
    std::size_t given = 0;
    bool busy = false;
    {
      std::unique_lock only(device.evictions, std::try_to_lock);
      if (!only) {
        while (!only.try_lock_for(kBetweenLooks)) {
          if (now() >= deadline || waiting_is_over()) return result;
          if (now() >= device.evictions_end.load()) return result == Evicted::none ? Evicted::busy : result;
          if (looks) WaitsEndWith::look();
        }
        return Evicted::some;
      }
      const CaptureGate::Pass pass(device.parts.gate);
      if (!pass) return result == Evicted::none ? Evicted::busy : result;
      const std::vector<Region*> regions = core().regions_of(device);
      const std::size_t wanted = std::min(bytes, kAtOnce);
      std::string why;
      // Chunks that are given without a copy come first. Of small ones more than lack: a program that allocates step by
      // step would wait in each step.
      const std::size_t share = std::max<std::size_t>(wanted, device.offered / kPlainShare);
      for (const auto& [copies, largest, most] :
           {Choice{false, wanted, share}, Choice{false, kAny, wanted}, Choice{true, kAny, wanted}}) {
        for (Region* region : regions) {
          std::unique_lock lock(core().mutex);
          if (given >= most) break;
          if (region->offered_bytes() == 0 || (spares && spares(*region))) continue;
          if (!region->may_evict()) {
            busy = true;
            continue;
          }
          const Evicting mark(*region);
          lock.unlock();
          std::vector<Slot> offered = region->offered_slots();
          if (!copies) offered = offers_of(*region, region->backup().get(), offered).plain;
          std::erase_if(offered, [&](const Slot& slot) { return slot.size > largest; });
          const Given part = give(*region, enough_of(std::move(offered), most - given), nullptr);
          given += part.bytes;
          if (part.error) why = text_of(part.error);
        }
      }
      std::lock_guard lock(device.mutex);
      device.not_copied = why;
    }
    if (given == 0) return result == Evicted::none && busy ? Evicted::busy : result;
    device.source().settle();
    result = Evicted::some;
    bytes -= std::min(bytes, given);
    if (looks) WaitsEndWith::look();
  }
  return result;
}

Evicted evict_for(Device& device, std::size_t needed) {
  if (device.pooled || !device.may_offer()) return Evicted::none;
  const std::size_t free = device.source().look().free;
  return evict(device, std::max(kPage, needed - std::min(needed, free)), {}, kNever, true);
}

Evicted copy_ahead(Device& device) {
  Evicted result = Evicted::none;
  std::unique_lock only(device.evictions, std::try_to_lock);
  const CaptureGate::Pass pass(device.parts.gate);
  for (Region* region : core().regions_of(device)) {
    std::unique_lock lock(core().mutex);
    if (region->state() == State::active || region->state() == State::lost) region->set_copies_ahead(false);
    if (!region->copies_ahead()) continue;
    if (!only || !pass || device.copying > 0 || device.parts.gate.is_wanted() || region->is_queued() ||
        region->in_use()) {
      result = Evicted::busy;
      continue;
    }
    const Evicting mark(*region);
    lock.unlock();
    const std::shared_ptr<Backup> backup = region->backup();
    std::vector<Slot> chosen;
    for (const Slot& slot : offers_of(*region, backup.get(), region->offered_slots()).with_contents) {
      if (bytes_of(chosen) >= kAhead) break;
      chosen.push_back(slot);
    }
    if (!chosen.empty() && !copy_out(*region, *backup, chosen, nullptr, true).error)
      return device.copying > 0 ? Evicted::busy : Evicted::some;
    region->set_copies_ahead(false);
  }
  return result;
}

NoCopiesAhead::NoCopiesAhead(Region& region) : region_(region), copied_(region.copies_ahead()) {
  region.set_copies_ahead(false);
}

NoCopiesAhead::NoCopiesAhead(Region& region, std::unique_lock<std::mutex>& lock) : NoCopiesAhead(region) {
  wait_until(lock, core().changed, kNever, [&] { return !region.evicting(); });
}

NoCopiesAhead::~NoCopiesAhead() {
  if (!copied_ || region_.closed()) return;
  region_.set_copies_ahead(true);
  region_.device.reclaimer.copy_ahead();
}

Given evict_within(Region& region, Range range, Deadline deadline) {
  if (!region.evicting() && region.offered_bytes() == 0) return {};  // in this order: a copy ahead maps its chunks
  const Counted copying(region.device.copying);
  const Deadline late = std::max(deadline, now() + kOneLook);  // a copy ahead of a demand ends by itself
  const Look look = [&] {
    const Looking others_stop_waiting(region.device);
    WaitsEndWith::look();
    if (now() >= deadline) throw DeadlinePassed();
  };
  std::unique_lock only(region.device.evictions, std::defer_lock);
  while (!only.try_lock_for(kBetweenLooks)) {
    if (now() >= late) return {.late = true};
    WaitsEndWith::look();
  }
  const CaptureGate::Pass pass(region.device.parts.gate);
  if (!pass)
    throw Error("a CUDA graph is being captured, and the contents of region '" + region.tag +
                "' are in device memory until a copy: end the capture first");
  std::unique_lock lock(core().mutex);
  const auto is_free = [&] { return !region.evicting() && !(region.state() == State::paused && region.in_use()); };
  {
    const Looking others_stop_waiting(region.device);
    if (!wait_until(lock, core().changed, late, is_free) && !waiting_is_over()) return {.late = true};
  }
  if (region.state() != State::paused || !region.may_evict()) return {};
  const Evicting mark(region);
  lock.unlock();
  std::vector<Slot> chosen;
  for (const Slot& slot : region.offered_slots())
    if (slot.end() > range.offset && slot.offset < range.end()) chosen.push_back(slot);
  Given given = give(region, chosen, look);
  region.device.source().settle();
  region.device.tell_offers();
  try {
    if (given.error) std::rethrow_exception(given.error);
  } catch (const DeadlinePassed&) {
    given.late = true;
  }
  return given;
}

}  // namespace memsaver
