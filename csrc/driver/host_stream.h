// A queue of work on the host driver's device, for a direction of the bus or for a stream.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "base/clock.h"

namespace memsaver {

// Has a thread, which the first work starts. Lives as long as the process, as its driver does.
class HostStream {
 public:
  using Work = std::function<void()>;

  HostStream() = default;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  // The work runs after all earlier work, and not before `due`; kNever: not before release().
  void submit(Work work, Deadline due = {});
  std::uint64_t submitted() const;
  // Whether the work up to this number, counted from 1, is done. With a virtual clock it first waits for all work that
  // is due.
  bool done(std::uint64_t number) const;
  void wait(std::uint64_t number) const;
  void release();  // makes all submitted work due, and returns when it has run
  void abandon();  // work that has not begun never runs, and counts as done

 private:
  struct Entry {
    Work work;
    Deadline due;
  };

  void run();
  std::uint64_t done_locked() const { return working_on_ != 0 ? working_on_ - 1 : submitted_ - queue_.size(); }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Entry> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t working_on_ = 0;  // the number of the running work, from 1; it has left the queue. 0: none
  bool running_ = false;          // the thread
};

}  // namespace memsaver
