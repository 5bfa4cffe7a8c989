#include "transitions/transition.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "regions/eviction.h"

namespace memsaver {
namespace {

bool contains(const Transition::Regions& regions, const Region* region) {
  return std::find(regions.begin(), regions.end(), region) != regions.end();
}

// Calls `act` on several devices at the same time. Returns when all calls have ended; throws the first error.
// `together`: an error ends the other devices' waits for memory, and the calling thread checks for signals while it
// waits, since Ctrl-C reaches this thread alone.
template <typename Things, typename Act>
void side_by_side(const Things& things, bool together, Act act) {
  std::mutex mutex;  // guards the following two
  std::size_t left = things.size();
  std::exception_ptr first;
  std::condition_variable ended;
  std::atomic<bool> failed = false;
  const auto fail = [&](std::exception_ptr error) {
    std::lock_guard lock(mutex);
    if (!first) first = std::move(error);
    failed = together;
  };
  const auto guarded = [&, background = is_background](std::size_t i) {
    is_background = background;
    try {
      const WaitsEndWith flag(failed);
      act(*things[i]);
    } catch (...) {
      fail(std::current_exception());
    }
    std::lock_guard lock(mutex);
    --left;
    ended.notify_all();
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < things.size(); ++i) {
    try {
      threads.emplace_back(guarded, i);
    } catch (const std::system_error&) {
      guarded(i);  // no thread is available
    }
  }
  if (!things.empty()) guarded(0);
  while (together) {
    std::unique_lock lock(mutex);
    try {
      wait_until(lock, ended, kNever, [&] { return left == 0; });
      break;
    } catch (...) {
      fail(std::current_exception());  // the look held no lock
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

Transition::Transition(Regions pause, Regions resume, Bounds bounds, Regions lazy, Regions ahead)
    : bounds_(bounds),
      wanted_out_(std::move(pause)),
      wanted_in_(std::move(resume)),
      lazy_(std::move(lazy)),
      ahead_(std::move(ahead)) {
  std::lock_guard lock(core().mutex);
  for (auto* wanted : {&wanted_out_, &wanted_in_}) {
    std::erase_if(*wanted, [](const Region* region) { return region->closed(); });  // since the caller selected it
    for (Region* region : *wanted) region->enqueue(this);
  }
}

void Transition::abort() {
  if (!usable()) {  // in a forked child: the memory belongs to the parent
    for (auto& transfer : transfers_) static_cast<void>(transfer.release());
    return;
  }
  transfers_.clear();
  finish();
}

template <typename Ready>
bool Transition::wait(std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready) const {
  const bool is_ready = wait_until(lock, core().changed, deadline, ready);
  if (waiting_is_over()) throw Error("the interpreter exits: no transition can begin");
  return is_ready;
}

void Transition::wait_for_attached(std::unique_lock<std::mutex>& lock) {
  const Deadline deadline = std::min(bounds_.whole, deadline_in(bounds_.readers_s));
  for (const Region* region : pausing_) {
    if (region->leases().empty()) continue;
    MemoryWait waited{region->mapped_bytes(), now(), {}};
    for (const auto& [lease, pid] : region->leases()) waited.holders.emplace_back(pid, waited.bytes);
    const bool ended = wait(lock, deadline, [&] { return region->leases().empty(); });
    waited.ended = now();
    stages_.waited(region->device, waited);
    if (ended) continue;
    std::vector<int> pids;
    for (const auto& [lease, pid] : region->leases()) pids.push_back(pid);
    throw AttachedError("region '" + region->tag + "' cannot be paused: other processes are attached to it",
                        region->tag, std::move(pids));
  }
}

// Marks the regions that do not have the wanted state yet. Waits for threads that map memory in them, and for
// evictions.
void Transition::mark() {
  const auto begin = [this](Region& region, auto mark_locked) {
    for (bool marked = false; !marked;) {
      {
        std::unique_lock lock(core().mutex);
        const Deadline late = std::max(bounds_.whole, now() + kOneLook);  // a copy ahead of a demand ends by itself
        if (!wait(lock, late, [&] { return !region.evicting(); }))
          throw_late("queue", "offered chunks were being copied out");
      }
      const Region::Remapping remapping(region);  // the wait above was without it: a thread with the GIL may take it
      std::lock_guard lock(core().mutex);
      if (marked = !region.evicting(); marked) mark_locked();
    }
  };
  for (Region* region : wanted_out_) {
    begin(*region, [&] {
      // A paused region with chunks left from a refusal pauses again, to return them.
      const bool continues = region->state() == State::paused && region->mapped_bytes() > 0;
      if (region->state() != State::active && !continues) return;
      if (continues) continued_.push_back(region);
      pausing_.push_back(region);
      region->write_state(State::draining);
    });
  }
  for (Region* region : wanted_in_) {
    begin(*region, [&] {
      if (region->state() != State::paused) return;
      resuming_.push_back(region);
      region->write_state(State::resuming);
    });
  }
}

void Transition::begin() {
  begun_at_ = now();
  stages_.enter("queue");
  Core& all = core();
  all.refresh_peers();
  {
    std::unique_lock lock(all.mutex);
    const auto is_first = [this](const Region* region) { return region->is_first(this); };
    if (!wait(lock, bounds_.whole, [&] {
          return std::all_of(wanted_out_.begin(), wanted_out_.end(), is_first) &&
                 std::all_of(wanted_in_.begin(), wanted_in_.end(), is_first);
        }))
      throw_late("queue", "earlier transitions on the same regions were under way");
    for (const auto* wanted : {&wanted_out_, &wanted_in_})
      for (const Region* region : *wanted)
        if (region->state() == State::lost)
          throw region->wrong_state(State::lost, "the context of " + region->device.driver->name +
                                                     " died. Read backups with cpu_backup(), and start a new process");
  }
  if (all.parts.gate.capturing() && std::any_of(wanted_out_.begin(), wanted_out_.end(), [](const Region* region) {
        return region->state() == State::active || region->mapped_bytes() > 0;
      }))
    throw Error(
        "a CUDA graph is being captured, and a pause would break it by its wait for the device: end the capture first");
  for (Region* region : wanted_out_)
    if (!contains(lazy_, region)) {
      const Given given = evict_within(*region, kEverywhere, bounds_.whole);
      if (given.late) throw_late("backup", "chunks that an earlier, lazy pause had offered were copied out");
      outcome_.released_bytes += given.bytes;
      outcome_.copied_bytes += given.copied;
      stages_.bytes_planned += given.copied;
      stages_.bytes_copied += given.copied;
    }
  mark();
  stages_.enter("readers");
  std::unique_lock lock(all.mutex);
  wait_for_attached(lock);
  stages_.enter("launches");
  const auto is_unused = [](const Region* region) { return !region->in_use(); };
  if (!wait(lock, bounds_.whole, [&] {
        return std::all_of(pausing_.begin(), pausing_.end(), is_unused) &&
               std::all_of(resuming_.begin(), resuming_.end(), is_unused);
      }))
    throw_late("launches", "guarded launches or readers of backups were under way");
}

void Transition::prepare(std::vector<Pause> pauses, const std::vector<bool>& restore) {
  pauses_ = std::move(pauses);
  try {
    std::map<Device*, std::unique_ptr<Transfer>> by_device;
    const auto on = [&](const Region& region) -> Transfer& {
      auto& transfer = by_device[&region.device];
      if (transfer == nullptr) transfer = std::make_unique<Transfer>(region.device, bounds_, stages_);
      return *transfer;
    };
    for (Pause& pause : pauses_) {
      pause.lazy = contains(lazy_, pause.region);
      on(*pause.region).add_leaving(pause, contains(continued_, pause.region));
      pause.common.reset();
    }
    for (std::size_t i = 0; i < resuming_.size(); ++i) on(*resuming_[i]).add_coming(*resuming_[i], restore.at(i));
    for (auto& [device, transfer] : by_device) transfers_.push_back(std::move(transfer));
    for (const auto& transfer : transfers_) transfer->wait_idle();  // in all as long as the longest
    side_by_side(transfers_, true, [&](Transfer& transfer) { transfer.prepare(!pausing_.empty()); });
  } catch (const WaitTimeoutError& error) {
    abort();
    const std::chrono::duration<double> waited = now() - began_;  // since the beginning of the call, not of this wait
    throw WaitTimeoutError(error.what(), error.stage, waited.count());
  } catch (...) {
    abort();
    throw;
  }
}

Transition::Outcome Transition::run(const std::function<void()>& arrived) {
  {
    std::lock_guard lock(core().mutex);  // other threads may read the figures of a region in a transition
    committed_ = true;
    for (const auto& transfer : transfers_) transfer->commit();
    for (Region* region : pausing_) region->write_state(State::pausing);
    for (const Pause& pause : pauses_) {
      if (pause.policy != Policy::none || contains(continued_, pause.region)) continue;
      pause.region->discard();
      discarded_.push_back(pause.region);
    }
  }
  std::exception_ptr refused, failed;
  try {
    const bool resumes_alone = pausing_.empty();  // a resume alone waits for memory now, and can be interrupted
    side_by_side(transfers_, resumes_alone, [&](Transfer& transfer) {
      transfer.run();
      if (transfer.failed()) std::rethrow_exception(transfer.failed());
    });
    if (arrived) arrived();
  } catch (...) {
    failed = std::current_exception();
  }
  Outcome outcome = outcome_;
  std::set<Device*> devices;
  if (!failed) {
    for (const auto& transfer : transfers_) transfer->fill_kept();
    std::lock_guard lock(core().mutex);
    for (const auto& transfer : transfers_) transfer->keep();
    arrived_ = true;
  }
  for (const auto& transfer : transfers_) {
    if (!refused) refused = transfer->refused();
    devices.insert(&transfer->device());
    outcome.released_bytes += transfer->moved().released_bytes;
    outcome.restored_bytes += transfer->moved().restored_bytes;
    outcome.copied_bytes += transfer->moved().copied_bytes;
  }
  transfers_.clear();  // before the states change: chunks of failed resumes are unmapped here
  for (Device* device : devices) device->source().settle();
  finish();
  if (refused) std::rethrow_exception(refused);
  if (failed) std::rethrow_exception(failed);
  outcome.seconds = std::chrono::duration<double>(now() - begun_at_).count();
  return outcome;
}

void Transition::finish() {
  if (std::exchange(finished_, true)) return;
  {
    std::lock_guard lock(core().mutex);
    for (Region* region : pausing_)
      region->settle(committed_ || contains(continued_, region) ? State::paused : State::active);
    for (Region* region : resuming_) region->settle(arrived_ ? State::active : State::paused);
    for (Region* region : committed_ ? wanted_out_ : Regions()) region->set_copies_ahead(contains(ahead_, region));
    for (const auto* wanted : {&wanted_out_, &wanted_in_})
      for (Region* region : *wanted) region->dequeue(this);
    core().changed.notify_all();
  }
  std::set<Device*> devices;
  for (const auto* marked : {&pausing_, &resuming_})
    for (Region* region : *marked) {
      region->sweep();
      try {
        region->allow_again();  // for peers that are new since the transition began
      } catch (const DriverError&) {
        // The next call tries again.
      }
      devices.insert(&region->device);
    }
  for (Device* device : devices) device->tell_offers();
  for (Region* region : ahead_) region->device.reclaimer.copy_ahead();
  for (Device* device : devices) device->resting.reap();  // sets marks for segments that were freed meanwhile
}

}  // namespace memsaver
