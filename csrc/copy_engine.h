// What a GPU has for each direction of the bus: something that copies on its own, in the order it was asked to.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace memsaver {

// A thread, started by the first copy. Lives as long as the process, as the driver does that owns it.
class CopyEngine {
 public:
  CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  void submit(std::function<void()> copy);
  std::uint64_t submitted() const;
  bool done(std::uint64_t number) const;  // whether the copies up to this number, counted from 1, are
  void wait(std::uint64_t number) const;

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t done_ = 0;
  bool running_ = false;
};

}  // namespace memsaver
