#include "regions/resting.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "regions/region.h"

namespace memsaver {
namespace {

constexpr auto kFirstLook = std::chrono::microseconds(50);
constexpr auto kLastLook = std::chrono::milliseconds(5);
constexpr auto kSweep = std::chrono::seconds(1);  // in real time: calls of the driver, and a thread that gets its turn

}  // namespace

void Resting::add_locked(Region& owner, Address begin) {
  rests_.push_back({&owner, begin, ++frees_, nullptr});
  owner.device.reclaimer.freed();
}

// Sets a mark, which covers all work that was queued before the frees so far.
void Resting::mark() {
  std::uint64_t last = 0;
  {
    std::lock_guard lock(mutex_);
    if (rests_.empty() || rests_.back().ticket != nullptr) return;
    last = rests_.back().number;
  }
  const CaptureGate::Pass pass(gate_);
  if (!pass) return;  // a mark would break the capture
  Driver::Ticket ticket;
  try {
    ticket = driver_.record();
  } catch (const DriverError&) {
    return;  // no mark now: the segments keep resting
  }
  has_no_marks_ = ticket == nullptr;
  if (has_no_marks_) return;
  std::lock_guard lock(mutex_);
  for (auto rest = rests_.rbegin(); rest != rests_.rend() && rest->ticket == nullptr; ++rest)
    if (rest->number <= last) rest->ticket = ticket;
}

bool Resting::collect(std::uint64_t waited) {
  std::vector<Region*> touched;
  for (;;) {
    Driver::Ticket ticket;
    std::uint64_t passed = waited;
    {
      std::lock_guard lock(mutex_);
      if (rests_.empty()) break;
      if (rests_.front().number > waited) {
        ticket = rests_.front().ticket;
        if (ticket == nullptr) break;
        for (const Rest& rest : rests_) {  // one query for all segments that share the mark
          if (rest.ticket != ticket) break;
          passed = rest.number;
        }
      }
    }
    if (ticket != nullptr) {
      try {
        if (!driver_.done(ticket)) break;
      } catch (const DriverError&) {
        break;
      }
    }
    std::lock_guard lock(mutex_);
    while (!rests_.empty() && rests_.front().number <= passed) {
      const Rest rest = rests_.front();
      rests_.pop_front();
      rest.owner->forget_locked(rest.begin);
      if (std::find(touched.begin(), touched.end(), rest.owner) == touched.end()) touched.push_back(rest.owner);
    }
  }
  for (Region* owner : touched) owner->sweep();
  return !touched.empty();
}

bool Resting::reclaim(Deadline deadline, std::uint64_t seen) {
  Deadline swept = kNever;  // when the wait for sweeps of other threads ends
  Clock::duration pause = kFirstLook;
  for (;;) {
    const Deadline at = now();  // before the look: the last one comes when the deadline has passed
    if (reap() || given_back_ != seen) return true;
    bool sweeps = false;
    {
      std::lock_guard lock(mutex_);
      sweeps = rests_.empty();
      if (sweeps && sweeps_ == 0) return given_back_ != seen;  // the last sweep may have ended just now
    }
    // The device no longer needs this memory: the deadline of its work does not end the wait.
    if (sweeps && swept == kNever) swept = Clock::now() + std::max<Clock::duration>(deadline - at, kSweep);
    if ((sweeps ? Clock::now() >= swept : at >= deadline) || waiting_is_over() || gate_.capturing()) return false;
    if (sweeps) {
      std::this_thread::sleep_for(std::min<Clock::duration>(pause, swept - Clock::now()));
    } else if (has_no_marks_) {  // without marks only a wait for the whole device is possible
      const std::uint64_t freed = frees();
      try {
        wait_idle(driver_, gate_, deadline, false);
      } catch (const Error&) {
        return false;
      }
      if (reap(freed) || given_back_ != seen) return true;  // otherwise another thread returns the memory
    } else {
      sleep_for(std::min<Clock::duration>(pause, deadline - at));
    }
    pause = std::min<Clock::duration>(pause * 2, kLastLook);
  }
}

}  // namespace memsaver
