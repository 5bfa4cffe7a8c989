// The bounded wait for the work of a device, and the gate that keeps such waits apart from captures.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>

#include "base/waits.h"
#include "driver/driver.h"

namespace memsaver {

// Excludes device-wide operations during graph captures: a device-wide wait or mark breaks a capture on any thread.
class CaptureGate {
 public:
  void capture_begins() {  // waits for device-wide operations under way
    std::unique_lock lock(mutex_);
    ++coming_;
    changed_.wait(lock, [this] { return operations_ == 0; });
    --coming_;
    ++captures_;
  }
  void capture_ends() {
    std::lock_guard lock(mutex_);
    if (captures_ > 0) --captures_;
  }
  bool capturing() const {
    std::lock_guard lock(mutex_);
    return captures_ > 0;
  }
  bool is_wanted() const {  // by a capture that is under way, or waits to begin
    std::lock_guard lock(mutex_);
    return captures_ + coming_ > 0;
  }

  // Permission for a device-wide operation, as long as it lives. False: a capture is under way.
  class Pass : Immovable {
   public:
    explicit Pass(CaptureGate& gate);
    ~Pass() { end(); }
    explicit operator bool() const { return gate_ != nullptr; }
    void end() {
      CaptureGate* gate = std::exchange(gate_, nullptr);
      if (gate == nullptr) return;
      std::lock_guard lock(gate->mutex_);
      --gate->operations_;
      gate->changed_.notify_all();
    }

   private:
    CaptureGate* gate_;
  };

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t captures_ = 0;
  std::size_t coming_ = 0;      // captures that wait to begin
  std::size_t operations_ = 0;  // device-wide operations under way
};

// The shortest bound of a wait, up to the first query of the device. So a wait with the bound 0 still succeeds on an
// idle device. Only a driver call that blocks takes longer.
constexpr auto kOneLook = std::chrono::milliseconds(250);

// Waits for all work that was submitted so far to the device and to peers with access to its memory. Throws
// WaitTimeoutError at the deadline, Error during a capture or when the interpreter exits, DriverError. `looks`: calls
// WaitsEndWith::look(), which may take the GIL.
void wait_idle(Driver& driver, CaptureGate& gate, Deadline deadline, bool looks);

}  // namespace memsaver
