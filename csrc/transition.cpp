#include "transition.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <set>
#include <thread>

namespace memsaver {
namespace {

bool contains(const std::vector<Region*>& regions, const Region* region) {
  return std::find(regions.begin(), regions.end(), region) != regions.end();
}

// Does the same on several devices at once. Returns when all are done; throws the first error.
template <typename Things, typename Act>
void side_by_side(const Things& things, Act act) {
  std::vector<std::exception_ptr> errors(things.size());
  const auto guarded = [&](std::size_t i) {
    try {
      act(*things[i]);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < things.size(); ++i) {
    try {
      threads.emplace_back(guarded, i);
    } catch (const std::system_error&) {
      guarded(i);  // the system has no thread left to give
    }
  }
  if (!things.empty()) guarded(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace

Transition::Transition(std::vector<Region*> pause, std::vector<Region*> resume)
    : wanted_out_(std::move(pause)), wanted_in_(std::move(resume)) {
  std::lock_guard lock(core().mutex);
  for (const auto* wanted : {&wanted_out_, &wanted_in_})
    for (Region* region : *wanted) region->queue.push_back(this);
}

void Transition::leave_queues_locked() {
  for (auto* wanted : {&wanted_out_, &wanted_in_})
    for (Region* region : *wanted) std::erase(region->queue, this);
  core().changed.notify_all();
}

void Transition::abort() {
  if (!usable()) {  // in a forked child the marks are nobody's, and the memory is its parent's
    for (auto& transfer : transfers_) static_cast<void>(transfer.release());
    return;
  }
  transfers_.clear();
  finish();
}

template <typename Ready>
void Transition::wait_until(std::unique_lock<std::mutex>& lock, Ready ready) const {
  while (!waiting_is_over && !ready()) {
    if (core().changed.wait_for(lock, kBetweenLooks) == std::cv_status::no_timeout) continue;
    lock.unlock();
    between_looks();
    lock.lock();
  }
  if (waiting_is_over) throw Error("the interpreter is going down: no transition begins any more");
}

void Transition::wait_for_attached(std::unique_lock<std::mutex>& lock, Deadline deadline) const {
  for (const Region* region : pausing_) {
    wait_until(lock, [&] { return region->leases.empty() || Clock::now() >= deadline; });
    if (region->leases.empty()) continue;
    std::vector<int> pids;
    for (const auto& [number, lease] : region->leases) pids.push_back(lease.pid);
    throw AttachedError("region '" + region->tag + "' cannot be paused: other processes are attached to it",
                        region->tag, std::move(pids));
  }
}

void Transition::begin(Deadline attached) {
  began_ = Clock::now();
  Core& all = core();
  std::unique_lock lock(all.mutex);
  const auto first = [this](const Region* region) { return region->queue.front() == this; };
  wait_until(lock, [&] {
    return std::all_of(wanted_out_.begin(), wanted_out_.end(), first) &&
           std::all_of(wanted_in_.begin(), wanted_in_.end(), first);
  });
  for (const auto* wanted : {&wanted_out_, &wanted_in_})
    for (const Region* region : *wanted)
      if (region->state == State::lost)
        throw RegionPausedError("region '" + region->tag + "' is lost: the context of " + region->device.driver->name +
                                    " died, and only a new process brings it back",
                                region->tag, "lost");
  std::vector<Region*> out, in;
  for (Region* region : wanted_out_)  // one that a refusal left behind has memory to give back still
    if (region->state == State::active || region->mapped_bytes() > 0) out.push_back(region);
  for (Region* region : wanted_in_)
    if (region->state == State::paused) in.push_back(region);
  if (!out.empty() && all.capturing())
    throw Error("a CUDA graph is being captured: a pause would have to wait for the device, which breaks the capture");
  for (Region* region : out) {
    if (region->state == State::paused) was_paused_.push_back(region);
    region->state = State::pausing;
  }
  for (Region* region : in) region->state = State::resuming;
  pausing_ = std::move(out);
  resuming_ = std::move(in);
  const auto unused = [](const Region* region) { return region->users == 0; };
  wait_for_attached(lock, attached);
  wait_until(lock, [&] {
    return std::all_of(pausing_.begin(), pausing_.end(), unused) &&
           std::all_of(resuming_.begin(), resuming_.end(), unused);
  });
}

Transition::Transfers Transition::make_transfers(const std::vector<Pause>& pauses, bool restore) const {
  std::map<Device*, std::unique_ptr<Transfer>> by_device;
  const auto on = [&](const Region& region) -> Transfer& {
    auto& transfer = by_device[&region.device];
    if (transfer == nullptr) transfer = std::make_unique<Transfer>(region.device, *progress_);
    return *transfer;
  };
  std::lock_guard lock(core().mutex);
  for (const Pause& pause : pauses)
    on(*pause.region).add_leaving(*pause.region, pause.policy, pause.live, contains(was_paused_, pause.region));
  for (Region* region : resuming_) on(*region).add_coming(*region, restore);
  Transfers transfers;
  for (auto& [device, transfer] : by_device) transfers.push_back(std::move(transfer));
  return transfers;
}

void Transition::prepare(const std::vector<Pause>& pauses, bool restore, Deadline deadline, Progress::Report report) {
  progress_ = std::make_unique<Progress>(std::move(report));
  try {
    transfers_ = make_transfers(pauses, restore);
    side_by_side(transfers_, [&](Transfer& transfer) { transfer.prepare(!pausing_.empty(), deadline); });
  } catch (...) {
    abort();
    throw;
  }
  for (const Pause& pause : pauses)
    if (pause.policy == Policy::none && !contains(was_paused_, pause.region)) without_.push_back(pause.region);
}

Transition::Outcome Transition::run(Deadline deadline) {
  Transfers transfers = std::move(transfers_);
  {
    std::lock_guard lock(core().mutex);  // others may read the figures of a region in transition
    for (const auto& transfer : transfers) transfer->commit();
    gone_out_ = pausing_;
    discarded_ = without_;
  }
  side_by_side(transfers, [&](Transfer& transfer) { transfer.run(deadline); });

  Outcome outcome;
  std::exception_ptr refused, failed;
  for (const auto& transfer : transfers) {
    if (!refused) refused = transfer->refused();
    if (!failed) failed = transfer->failed();
  }
  if (!failed) {
    std::lock_guard lock(core().mutex);
    for (const auto& transfer : transfers) transfer->keep();
    for (Region* region : resuming_) ++region->residence;
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
  transfers.clear();  // before the states change: what did not come in is unmapped here
  for (Device* device : devices) device->source().settle();
  finish();
  if (refused) std::rethrow_exception(refused);
  if (failed) std::rethrow_exception(failed);
  outcome.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
  return outcome;
}

void Transition::finish() {
  std::lock_guard lock(core().mutex);
  for (Region* region : pausing_)
    if (region->state == State::pausing)
      region->state = contains(gone_out_, region) || contains(was_paused_, region) ? State::paused : State::active;
  for (Region* region : resuming_)
    if (region->state == State::resuming) region->state = contains(come_in_, region) ? State::active : State::paused;
  for (auto* marked : {&pausing_, &resuming_}) {
    for (Region* region : std::exchange(*marked, {})) {
      if (region->device.lost) region->state = State::lost;
      region->settle();
    }
  }
  leave_queues_locked();
}

}  // namespace memsaver
