#include "regions/device_wait.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>

#include "base/threads.h"

namespace memsaver {
namespace {

constexpr auto kShortestLook = std::chrono::microseconds(20);
constexpr auto kLongestLook = std::chrono::microseconds(500);

// State that the waiting thread shares with its caller.
struct Wait {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  bool looked = false;  // the first query has shown that the device is busy
  bool idle = false;    // the device was idle at the end of the wait
  std::exception_ptr error;
  std::atomic<bool> abandoned = false;
};

// Sets a mark and queries it, at least once, until the device has passed it. Blocks on drivers without marks. Returns
// whether the device became idle before the deadline.
bool make(Driver& driver, CaptureGate::Pass& pass, Wait& wait, Deadline deadline) {
  const Driver::Ticket ticket = driver.record();
  if (ticket == nullptr) {
    driver.synchronize();
    return now() <= deadline;
  }
  pass.end();  // querying a mark does not break a capture
  for (Clock::duration pause = kShortestLook; !driver.done(ticket);) {
    if (!wait.looked) {
      std::lock_guard lock(wait.mutex);
      wait.looked = true;
      wait.ended.notify_all();
    }
    if (wait.abandoned || now() >= deadline) return false;
    sleep_for(pause);
    pause = std::min<Clock::duration>(pause * 2, kLongestLook);
  }
  return true;
}

void run(Driver& driver, CaptureGate::Pass& pass, Wait& wait, Deadline deadline) {
  std::exception_ptr error;
  bool idle = false;
  try {
    idle = make(driver, pass, wait, deadline);
  } catch (...) {
    error = std::current_exception();
  }
  pass.end();
  std::lock_guard lock(wait.mutex);
  wait.error = error;
  wait.idle = idle;
  wait.done = true;
  wait.ended.notify_all();
}

}  // namespace

CaptureGate::Pass::Pass(CaptureGate& gate) : gate_(&gate) {
  std::lock_guard lock(gate.mutex_);
  if (gate.captures_ > 0)
    gate_ = nullptr;
  else
    ++gate.operations_;
}

void wait_idle(Driver& driver, CaptureGate& gate, Deadline deadline, bool looks) {
  const Deadline began = now();
  auto pass = std::make_shared<CaptureGate::Pass>(gate);
  if (!*pass)
    throw Error("a CUDA graph is being captured, and waiting for " + driver.name +
                " would break it: end the capture first");
  const auto wait = std::make_shared<Wait>();
  // A driver call may block behind a driver call of another thread, which may block behind a kernel. So a separate
  // thread makes the calls. It continues after the caller's bound has passed.
  if (clock_is_virtual())
    run(driver, *pass, *wait, deadline);
  else
    run_in_spare_thread([wait, &driver, pass] { run(driver, *pass, *wait, kNever); });
  pass.reset();
  std::unique_lock lock(wait->mutex);
  const auto ended = [&] { return wait->done || waiting_is_over(); };
  try {
    const auto looked = [&] { return ended() || wait->looked; };
    if (wait_until(lock, wait->ended, std::max(deadline, began + kOneLook), looked, looks))
      wait_until(lock, wait->ended, deadline, ended, looks);
  } catch (...) {
    wait->abandoned = true;
    throw;
  }
  if (wait->done && wait->error) std::rethrow_exception(wait->error);
  if (wait->done && wait->idle) return;
  wait->abandoned = true;
  if (waiting_is_over()) throw Error("the interpreter exits: the wait for " + driver.name + " was ended");
  const std::chrono::duration<double> waited = now() - began;
  throw WaitTimeoutError("the work queued on " + driver.name + " did not end within the call's timeout", "device",
                         waited.count());
}

}  // namespace memsaver
