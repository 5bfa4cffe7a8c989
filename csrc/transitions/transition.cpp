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

namespace memsaver {
namespace {

bool contains(const std::vector<Region*>& regions, const Region* region) {
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
  const auto guarded = [&](std::size_t i) {
    try {
      const WaitsEndWith flag(&failed);
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
  for (std::unique_lock lock(mutex); together && left > 0;) {
    if (ended.wait_for(lock, kBetweenLooks) == std::cv_status::no_timeout) continue;
    lock.unlock();
    try {
      between_looks();
    } catch (...) {
      fail(std::current_exception());
    }
    lock.lock();
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

Transition::Transition(std::vector<Region*> pause, std::vector<Region*> resume, Bounds bounds)
    : bounds_(bounds), wanted_out_(std::move(pause)), wanted_in_(std::move(resume)) {
  std::lock_guard lock(core().mutex);
  for (auto* wanted : {&wanted_out_, &wanted_in_}) {
    std::erase_if(*wanted, [](const Region* region) { return region->closed(); });  // since the caller selected it
    for (Region* region : *wanted) region->enqueue(this);
  }
}

void Transition::leave_queues_locked() {
  for (auto* wanted : {&wanted_out_, &wanted_in_})
    for (Region* region : *wanted) region->dequeue(this);
  core().changed.notify_all();
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
bool Transition::wait_until(std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready) const {
  for (Deadline looked = now(); !ready();) {
    if (waiting_is_over) throw Error("the interpreter exits: no transition can begin");
    const Deadline at = now();
    if (at >= deadline) return false;
    if (!clock_is_virtual()) {
      const auto next_look = std::min<Clock::duration>(kBetweenLooks, deadline - at);
      core().changed.wait_for(lock, next_look);
      if (now() - looked < kBetweenLooks) continue;
      looked = now();
    }
    lock.unlock();
    if (clock_is_virtual()) sleep_for(kBetweenLooks);
    between_looks();
    lock.lock();
  }
  if (waiting_is_over) throw Error("the interpreter exits: no transition can begin");
  return true;
}

void Transition::throw_late(const char* stage, const std::string& why) const {
  const std::chrono::duration<double> waited = now() - began_;
  throw WaitTimeoutError("the call's timeout has passed while " + why, stage, waited.count());
}

Deadline Transition::memory_deadline() const { return std::min(bounds_.whole, deadline_in(bounds_.memory_s)); }

void Transition::wait_for_attached(std::unique_lock<std::mutex>& lock) const {
  const Deadline deadline = std::min(bounds_.whole, deadline_in(bounds_.readers_s));
  for (const Region* region : pausing_) {
    if (wait_until(lock, deadline, [&] { return region->leases().empty(); })) continue;
    std::vector<int> pids;
    for (const auto& [number, lease] : region->leases()) pids.push_back(lease.pid);
    throw AttachedError("region '" + region->tag + "' cannot be paused: other processes are attached to it",
                        region->tag, std::move(pids));
  }
}

// Marks the regions that do not have the wanted state yet. Waits for threads that map memory in them.
void Transition::mark(const std::vector<Region*>& wanted, bool out) {
  for (Region* region : wanted) {
    const Region::Remapping remapping(*region);
    std::lock_guard lock(core().mutex);
    // A paused region with chunks left from a refusal pauses again, to return them.
    if (out && (region->state() == State::active || (region->state() == State::paused && region->mapped_bytes() > 0))) {
      if (region->state() == State::paused) was_paused_.push_back(region);
      region->drain();
      pausing_.push_back(region);
    } else if (!out && region->state() == State::paused) {
      region->come();
      resuming_.push_back(region);
    }
  }
}

void Transition::begin() {
  begun_at_ = now();
  stages_.enter("queue");
  Core& all = core();
  all.refresh_peers();
  const auto first = [this](const Region* region) { return region->is_first(this); };
  {
    std::unique_lock lock(all.mutex);
    if (!wait_until(lock, bounds_.whole, [&] {
          return std::all_of(wanted_out_.begin(), wanted_out_.end(), first) &&
                 std::all_of(wanted_in_.begin(), wanted_in_.end(), first);
        }))
      throw_late("queue", "earlier transitions on the same regions were under way");
    for (const auto* wanted : {&wanted_out_, &wanted_in_})
      for (const Region* region : *wanted)
        if (region->state() == State::lost)
          throw RegionPausedError("region '" + region->tag + "' is lost: the context of " +
                                      region->device.driver->name +
                                      " died. Read backups with cpu_backup(), and start a new process",
                                  region->tag, "lost");
  }
  if (!wanted_out_.empty() && all.parts.gate.capturing()) {
    const bool any = std::any_of(wanted_out_.begin(), wanted_out_.end(), [](const Region* region) {
      return region->state() == State::active || region->mapped_bytes() > 0;
    });
    if (any)
      throw Error(
          "a CUDA graph is being captured, and a pause would break it by its wait for the device: end the capture "
          "first");
  }
  mark(wanted_out_, true);
  mark(wanted_in_, false);
  stages_.enter("readers");
  std::unique_lock lock(all.mutex);
  wait_for_attached(lock);
  stages_.enter("launches");
  const auto unused = [](const Region* region) { return !region->in_use(); };
  if (!wait_until(lock, bounds_.whole, [&] {
        return std::all_of(pausing_.begin(), pausing_.end(), unused) &&
               std::all_of(resuming_.begin(), resuming_.end(), unused);
      }))
    throw_late("launches", "guarded launches or readers of backups were under way");
}

Transition::Transfers Transition::make_transfers(const std::vector<bool>& restore) {
  std::map<Device*, std::unique_ptr<Transfer>> by_device;
  const auto on = [&](const Region& region) -> Transfer& {
    auto& transfer = by_device[&region.device];
    if (transfer == nullptr) transfer = std::make_unique<Transfer>(region.device, *progress_, stages_);
    return *transfer;
  };
  for (const Pause& pause : pauses_)
    on(*pause.region).add_leaving(*pause.region, pause.policy, pause.live, contains(was_paused_, pause.region));
  for (std::size_t i = 0; i < resuming_.size(); ++i) on(*resuming_[i]).add_coming(*resuming_[i], restore.at(i));
  Transfers transfers;
  for (auto& [device, transfer] : by_device) transfers.push_back(std::move(transfer));
  return transfers;
}

void Transition::prepare(std::vector<Pause> pauses, const std::vector<bool>& restore, Progress::Report report) {
  pauses_ = std::move(pauses);
  progress_ = std::make_unique<Progress>(std::move(report));
  try {
    transfers_ = make_transfers(restore);
    for (const auto& transfer : transfers_) transfer->wait_idle(bounds_.whole);  // in all as long as the longest
    side_by_side(transfers_, true, [&](Transfer& transfer) {
      transfer.prepare(!pausing_.empty(), [this] { return memory_deadline(); });
    });
  } catch (const WaitTimeoutError& error) {
    abort();
    const std::chrono::duration<double> waited = now() - began_;  // since the beginning of the call, not of this wait
    throw WaitTimeoutError(error.what(), error.stage, waited.count());
  } catch (...) {
    abort();
    throw;
  }
  for (const Pause& pause : pauses_)
    if (pause.policy == Policy::none && !contains(was_paused_, pause.region)) without_.push_back(pause.region);
}

Transition::Outcome Transition::run(const std::function<void()>& arrived) {
  Transfers transfers = std::move(transfers_);
  {
    std::lock_guard lock(core().mutex);  // other threads may read the figures of a region in a transition
    for (const auto& transfer : transfers) transfer->commit();
    for (Region* region : pausing_) region->leave();
    for (const Pause& pause : pauses_) pause.region->expect_policy(pause.policy);
    for (Region* region : without_) region->discard();
    gone_out_ = pausing_;
    discarded_ = without_;
  }
  std::exception_ptr refused, failed;
  try {
    const bool resumes_alone = pausing_.empty();  // a resume alone waits for memory now, and can be interrupted
    side_by_side(transfers, resumes_alone, [&](Transfer& transfer) {
      transfer.run([this] { return memory_deadline(); });
      if (transfer.failed()) std::rethrow_exception(transfer.failed());
    });
  } catch (...) {
    failed = std::current_exception();
  }
  for (const auto& transfer : transfers)
    if (!refused) refused = transfer->refused();

  Outcome outcome;
  if (!failed) {
    std::lock_guard lock(core().mutex);
    for (const auto& transfer : transfers) transfer->keep();
    for (Region* region : resuming_) region->arrived();
    come_in_ = resuming_;
  }
  for (const auto& transfer : transfers) {
    outcome.released_bytes += transfer->released_bytes();
    outcome.restored_bytes += transfer->restored_bytes();
    outcome.copied_bytes += transfer->copied_bytes();
  }
  outcome.paused = gone_out_;
  outcome.resumed = come_in_;
  std::set<Device*> devices;
  for (const auto& transfer : transfers) devices.insert(&transfer->device());
  transfers.clear();  // before the states change: chunks of failed resumes are unmapped here
  for (Device* device : devices) device->source().settle();
  if (arrived && !failed) arrived();
  finish();
  if (refused) std::rethrow_exception(refused);
  if (failed) std::rethrow_exception(failed);
  outcome.seconds = std::chrono::duration<double>(now() - begun_at_).count();
  return outcome;
}

void Transition::finish() {
  std::vector<Region*> marked;
  {
    std::lock_guard lock(core().mutex);
    for (auto* regions : {&pausing_, &resuming_})
      for (Region* region : std::exchange(*regions, {})) {
        region->settle();
        marked.push_back(region);
      }
    leave_queues_locked();
  }
  std::set<Device*> devices;
  for (Region* region : marked) {
    region->sweep();
    try {
      region->allow_again();  // for peers that are new since the transition began
    } catch (const DriverError&) {
      // The next call tries again.
    }
    devices.insert(&region->device);
  }
  for (Device* device : devices) device->resting.reap();  // sets marks for segments that were freed meanwhile
}

}  // namespace memsaver
