// Threads of the library. They are detached: at the end of the process they may be blocked in a driver call.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "base/clock.h"

namespace memsaver {

// One thread of an object.
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

// Runs `task`, a call that may never return, in a thread that is reused, because the first driver call in a new thread
// takes some 0.1 ms longer. Does not wait for it. `task` must not throw. Objects that it uses must live as long as
// the process, because a driver call in it may never return. Throws std::system_error.
void run_in_spare_thread(std::function<void()> task);

}  // namespace memsaver
