// The stages of a transition, with the times of their begins.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace memsaver {

// Any thread may call both methods. The parts of a transition on several devices run side by side: the stage is the one
// that one of them entered last.
class Stages {
 public:
  using Begun = std::pair<std::string, double>;  // the stage, and the seconds from the construction to its begin

  void enter(const char* stage) {
    const std::chrono::duration<double> passed = now() - since_;
    std::lock_guard lock(mutex_);
    if (begun_.size() < kMost && (begun_.empty() || begun_.back().first != stage))
      begun_.emplace_back(stage, passed.count());
  }

  std::vector<Begun> begun() const {
    std::lock_guard lock(mutex_);
    return begun_;
  }

 private:
  static constexpr std::size_t kMost = 32;  // devices may alternate between two stages
  const Deadline since_ = now();
  mutable std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::vector<Begun> begun_;
};

}  // namespace memsaver
