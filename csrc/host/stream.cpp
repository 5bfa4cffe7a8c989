#include "host/stream.h"

#include <thread>
#include <utility>

namespace memsaver::host {

void Stream::submit(Work work) {
  std::lock_guard lock(mutex_);
  if (!running_) std::thread([this] { run(); }).detach();
  running_ = true;
  queue_.push_back(std::move(work));
  ++submitted_;
  changed_.notify_all();
}

void Stream::run() {
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

std::uint64_t Stream::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool Stream::done(std::uint64_t number) const {
  std::lock_guard lock(mutex_);
  return done_locked() >= number;
}

void Stream::wait(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_locked() >= number; });
}

void Stream::abandon() {
  std::lock_guard lock(mutex_);
  queue_.clear();
  changed_.notify_all();
}

}  // namespace memsaver::host
