#include "copy_engine.h"

#include <system_error>
#include <thread>

#include "errors.h"

namespace memsaver {

void CopyEngine::submit(std::function<void()> copy) {
  std::lock_guard lock(mutex_);
  if (!running_) {
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error& error) {
      throw DriverError("thread", error.code().value(), error.what());
    }
    running_ = true;
  }
  queue_.push_back(std::move(copy));
  ++submitted_;
  changed_.notify_all();
}

void CopyEngine::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const auto copy = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    copy();
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

std::uint64_t CopyEngine::submitted() const {
  std::lock_guard lock(mutex_);
  return submitted_;
}

bool CopyEngine::done(std::uint64_t number) const {
  std::lock_guard lock(mutex_);
  return done_ >= number;
}

void CopyEngine::wait(std::uint64_t number) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

}  // namespace memsaver
