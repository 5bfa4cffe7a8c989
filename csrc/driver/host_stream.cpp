#include "driver/host_stream.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "base/errors.h"

namespace memsaver {
namespace {

// A virtual clock notifies no condition variable, so the thread polls.
constexpr auto kLook = std::chrono::milliseconds(1);

}  // namespace

void HostStream::submit(Work work, Deadline due) {
  std::lock_guard lock(mutex_);
  if (!running_) {
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error& error) {
      throw DriverError("thread", error.code().value(), error.what());
    }
    running_ = true;
  }
  queue_.push_back({std::move(work), due});
  ++submitted_;
  changed_.notify_all();
}

void HostStream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const Deadline due = queue_.front().due;
    if (due == kNever) {
      changed_.wait(lock);
      continue;
    }
    if (const Clock::duration left = due - now(); left > Clock::duration::zero()) {
      changed_.wait_for(lock, clock_is_virtual() ? std::min<Clock::duration>(left, kLook) : left);
      continue;
    }
    const Work work = std::move(queue_.front().work);
    queue_.pop_front();
    working_on_ = submitted_ - queue_.size();
    lock.unlock();
    work();
    lock.lock();
    working_on_ = 0;
    changed_.notify_all();
  }
}

std::uint64_t HostStream::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool HostStream::done(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  if (clock_is_virtual())
    changed_.wait(lock, [&] {
      return done_locked() >= number || (working_on_ == 0 && !queue_.empty() && queue_.front().due > now());
    });
  return done_locked() >= number;
}

void HostStream::wait(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  while (done_locked() < number) {
    const Deadline due = working_on_ != 0 ? Deadline() : queue_.front().due;
    if (clock_is_virtual() && due != kNever && due > now()) {
      lock.unlock();
      sleep_for(due - now());
      lock.lock();
    } else {
      changed_.wait(lock);
    }
  }
}

void HostStream::release() {
  std::unique_lock lock(mutex_);
  for (Entry& entry : queue_) entry.due = {};
  changed_.notify_all();
  const std::uint64_t last = submitted_;
  changed_.wait(lock, [&] { return done_locked() >= last; });
}

void HostStream::abandon() {
  std::lock_guard lock(mutex_);
  queue_.clear();
  changed_.notify_all();
}

}  // namespace memsaver
