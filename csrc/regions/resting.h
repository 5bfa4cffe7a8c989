// The freed segments of all regions on a device, until the device has passed a mark that was set after the free.
//
// The thread of the reclaimer checks them while there are any, so that memory becomes free without another call of the
// library. A shortage does not wait for the thread: reclaim() checks itself, and waits for the oldest mark.
//
// A mark breaks a capture that is under way in another thread. The library knows captures by torch, and those that are
// announced. So marks are set in calls of the library and of torch alone, never by a thread of the library at a time
// that no user can know: a free sets one, or the end of the capture during which it was made.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>

#include "base/clock.h"
#include "driver/driver.h"
#include "regions/device_wait.h"

namespace memsaver {

class Region;

class Resting {
 public:
  // `mutex`: guards this list and the bookkeeping of the device's regions.
  Resting(Driver& driver, CaptureGate& gate, std::mutex& mutex) : driver_(driver), gate_(gate), mutex_(mutex) {}

  void add_locked(Region& owner, Address begin);  // the mutex is held
  bool any() const {
    std::lock_guard lock(mutex_);
    return !rests_.empty();
  }
  std::uint64_t frees() const {
    std::lock_guard lock(mutex_);
    return frees_;
  }

  // Frees the segments whose mark the device has passed, and those up to the number `waited`: the value of frees()
  // before the caller waited for the device. Does not wait. Returns whether a segment was freed.
  bool collect(std::uint64_t waited = 0);
  // Sets a mark for segments without one, unless a capture is under way.
  void mark();
  bool reap(std::uint64_t waited = 0) {  // both
    mark();
    return collect(waited);
  }
  // For a shortage: as reap(); if that frees nothing, waits for the oldest mark up to the deadline. `seen`: the value
  // of given_back() before the caller's request; the result is true also if memory was returned since then. Waits for
  // sweeps of other threads too.
  bool reclaim(Deadline deadline, std::uint64_t seen);
  std::uint64_t given_back() const { return given_back_; }
  bool has_no_marks() const { return has_no_marks_; }
  // Called around the return of chunks that may have become empty.
  void sweep_begins() { ++sweeps_; }
  void sweep_ended() {
    returned();
    --sweeps_;
  }
  void returned() { ++given_back_; }  // memory, without a sweep

 private:
  struct Rest {
    Region* owner;
    Address begin;
    std::uint64_t number;   // the number of the free, from 1
    Driver::Ticket ticket;  // null: no mark yet
  };

  Driver& driver_;
  CaptureGate& gate_;
  std::mutex& mutex_;
  std::atomic<std::uint64_t> given_back_ = 0;  // returns of memory: ended sweeps and evictions
  std::atomic<std::size_t> sweeps_ = 0;        // pending or under way
  std::atomic<bool> has_no_marks_ = false;     // true on drivers before CUDA 12.5
  // All guarded by `mutex_`.
  std::list<Rest> rests_;
  std::uint64_t frees_ = 0;
};

}  // namespace memsaver
