// Waits that end: at a deadline, at the exit of the interpreter, or by an exception such as Ctrl-C.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/scoped.h"

namespace memsaver {

// Set when the interpreter exits: all waits end. The interpreter waits for the threads of background transitions before
// it is set: the waits of these threads end at `background_ends`.
extern std::atomic<bool> interpreter_exits;
extern std::atomic<Deadline> background_ends;
extern thread_local bool is_background;  // whether this is the thread of a background transition
bool waiting_is_over();

// Called by waiting threads every kBetweenLooks, with no lock held. An exception in it ends the wait: Ctrl-C in Python.
extern std::function<void()> between_looks;
constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

// While it lives, waits of this thread end when the flag is set. So a call with one thread for each device fails as a
// whole.
class WaitsEndWith : Immovable {
 public:
  explicit WaitsEndWith(const std::atomic<bool>& flag) : former_(std::exchange(flag_, &flag)) {}
  ~WaitsEndWith() { flag_ = former_; }

  // Calls between_looks(). Throws Error if the flag of this thread is set.
  static void look();

 private:
  static thread_local const std::atomic<bool>* flag_;
  const std::atomic<bool>* const former_;
};

// Waits until `ready`, which is called with the lock held, or up to the deadline, or the exit. Returns whether it is
// ready. `changed` is notified of changes. `looks`: calls WaitsEndWith::look(), which may take the GIL. `is_virtual`:
// false for the work of another thread or process, which takes real time.
template <typename Ready>
bool wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Deadline deadline, Ready ready,
                bool looks = true, bool is_virtual = clock_is_virtual()) {
  const auto time = [=] { return is_virtual ? now() : Clock::now(); };
  for (Deadline looked = time(); !ready();) {
    const Deadline at = time();
    if (at >= deadline || waiting_is_over()) return false;
    if (!is_virtual) {
      changed.wait_for(lock, std::min<Clock::duration>(kBetweenLooks, deadline - at));
      if (time() - looked < kBetweenLooks || !looks) continue;
      looked = time();
    }
    lock.unlock();
    if (is_virtual) sleep_for(kBetweenLooks);
    WaitsEndWith::look();
    lock.lock();
  }
  return true;
}

}  // namespace memsaver
