#include "base/worker.h"

#include <thread>

namespace memsaver {

void Worker::start(std::function<void()> run) {
  auto state = std::make_shared<State>();
  std::thread([state, run = std::move(run)] {
    run();
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->ended.notify_all();
  }).detach();
  state_ = std::move(state);
}

bool Worker::join(Deadline deadline) {
  if (state_ == nullptr) return true;
  std::unique_lock lock(state_->mutex);
  return state_->ended.wait_until(lock, deadline, [this] { return state_->done; });
}

}  // namespace memsaver
