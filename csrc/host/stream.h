// A queue of work on a host device, for a direction of the bus or for a stream.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/scoped.h"

namespace memsaver::host {

// Has a thread, which the first work starts. Lives as long as the process.
class Stream : Immovable {
 public:
  using Work = std::function<void()>;

  void submit(Work work) {  // to run after all earlier work
    std::lock_guard lock(mutex_);
    if (!running_) std::thread([this] { run(); }).detach();
    running_ = true;
    queue_.push_back(std::move(work));
    ++submitted_;
    changed_.notify_all();
  }
  std::uint64_t submitted() const {
    std::lock_guard lock(mutex_);
    return submitted_;
  }
  bool done(std::uint64_t number) const {  // whether the work up to this number, counted from 1, is done
    std::lock_guard lock(mutex_);
    return done_locked() >= number;
  }
  void wait(std::uint64_t number) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_locked() >= number; });
  }
  void abandon() {  // work that has not begun never runs, and counts as done
    std::lock_guard lock(mutex_);
    queue_.clear();
    changed_.notify_all();
  }
  std::atomic<bool> is_unused = false;  // it was destroyed, and can be created again

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const Work work = std::move(queue_.front());
      queue_.pop_front();
      working_on_ = submitted_ - queue_.size();
      lock.unlock();
      work();
      lock.lock();
      working_on_ = 0;
      changed_.notify_all();
    }
  }
  std::uint64_t done_locked() const { return working_on_ != 0 ? working_on_ - 1 : submitted_ - queue_.size(); }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Work> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t working_on_ = 0;  // the number of the running work, from 1; it has left the queue. 0: none
  bool running_ = false;          // the thread
};

}  // namespace memsaver::host
