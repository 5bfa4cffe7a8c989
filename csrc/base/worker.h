// A detached thread of the library: at the end of the process it may be blocked in a driver call.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "base/clock.h"

namespace memsaver {

class Worker {
 public:
  // Runs `run` in a thread, once. Objects that it uses must live as long as the process. Throws std::system_error.
  void start(std::function<void()> run);
  bool started() const { return state_ != nullptr; }
  // Waits for the end of `run` up to the deadline. False: the thread still runs.
  bool join(Deadline deadline);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable ended;
    bool done = false;
  };
  std::shared_ptr<State> state_;
};

}  // namespace memsaver
