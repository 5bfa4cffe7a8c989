// Returns the memory of a device that this process caches and does not use, when a process waits for memory: retained
// chunks, chunks without a segment, free segments of torch's pools, and freed segments once the device has passed their
// mark; and offered chunks, as many as a broker asks for. Nothing during a capture, nothing of a region that is not
// active, no chunk under a segment in use. When it has nothing to return, it copies contents ahead of a demand.
//
// A thread does this, because a sweep may wait for a driver call of another thread. Between the requests it returns
// freed segments whose mark the device has passed. torch's pools are freed by a thread of Python
// (memsaver/broker/queries.py), when it gets the GIL.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "base/threads.h"

namespace memsaver {

struct Device;

class Reclaimer {
 public:
  explicit Reclaimer(Device& device) : device_(device) {
    worker_.start([this] { run(); });
  }

  // A request of the broker of the shared pool. Returns at once. `offered`: evicts so many bytes of offered chunks, see
  // eviction.h, but none of the regions of `demand`. 0: begins a pass. The broker learns the memory that stays, when
  // the first part of the pass is over, and, if more was to come, when Python has answered and at the end.
  void request(std::size_t offered, std::uint64_t demand);
  // Begins a pass, and waits for the end, up to the deadline; the caller holds no lock, torch's included. Returns
  // whether the pass has ended.
  bool finish(Deadline deadline);
  // Begins copies ahead of a demand: see copy_ahead() in eviction.h. Requests come first.
  void copy_ahead() {
    std::lock_guard lock(mutex_);
    ahead_ = true;
    changed_.notify_all();
  }
  // Called by the thread of Python, once for each query. `cached`: bytes of free blocks that torch keeps, and `why`.
  void python_is_done(std::size_t cached, const std::string& why) {
    std::lock_guard lock(mutex_);
    asks_python_ = false;
    cached_ = cached;
    why_cached_ = why;
    changed_.notify_all();
  }
  void freed() {  // a segment was freed on which the device may still work
    std::lock_guard lock(mutex_);
    freed_ = true;
    changed_.notify_all();
  }
  void stop(Deadline deadline);

 private:
  void run();
  void pass();
  void evict_offered(std::size_t bytes, std::uint64_t demand);
  bool rests();  // frees what can be freed now. Returns whether the device still works on some
  void tell(bool asks_python, bool is_resting);

  Device& device_;
  std::mutex mutex_;  // taken under Device::mutex too. Under it only those of the queries and of the gate are taken
  std::condition_variable changed_;
  bool tells_ = false;       // at the end of the next pass
  std::size_t offered_ = 0;  // bytes to be evicted next
  std::uint64_t demand_ = 0;
  std::uint64_t requested_ = 0, ended_ = 0;  // passes
  bool asks_python_ = false;                 // and it has not answered yet
  std::size_t cached_ = 0;                   // of its last answer
  std::string why_cached_;
  bool freed_ = false;  // segments may rest
  bool ahead_ = false;  // contents may be copied ahead of a demand
  bool stop_ = false;
  Worker worker_;
};

}  // namespace memsaver
