// Threads of the library. They are detached: at the end of the process they may be blocked in a driver call.
#pragma once

#include <functional>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/errors.h"

namespace memsaver {

// Throws Error if the system has no thread, as the functions below.
template <typename... Arguments>
void start_thread(Arguments&&... arguments) {
  try {
    std::thread(std::forward<Arguments>(arguments)...).detach();
  } catch (const std::system_error& error) {
    throw Error(std::string("the system has no thread: ") + error.what());
  }
}

// One thread of an object.
class Worker {
 public:
  // Runs `run`, which must not throw, in a thread, once. Objects that it uses must live as long as the process.
  void start(std::function<void()> run) {
    std::packaged_task<void()> task(std::move(run));
    std::future<void> ended = task.get_future();
    start_thread(std::move(task));
    ended_ = std::move(ended);
  }
  bool started() const { return ended_.valid(); }
  // Waits for the end of `run` up to the deadline. False: the thread still runs.
  bool join(Deadline deadline) { return !started() || ended_.wait_until(deadline) == std::future_status::ready; }

 private:
  std::future<void> ended_;
};

// Runs `task`, a call that may never return, in a thread that is reused, because the first driver call in a new thread
// takes some 0.1 ms longer. Does not wait for it. `task` must not throw. Objects that it uses must live as long as
// the process, because a driver call in it may never return.
void run_in_spare_thread(std::function<void()> task);

}  // namespace memsaver
