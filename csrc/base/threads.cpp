#include "base/threads.h"

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

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

namespace {

constexpr std::size_t kMostSpare = 8;

struct Spare {
  std::condition_variable given;
  std::function<void()> task;  // empty while the thread is free
};

struct Spares {
  std::mutex mutex;  // guards Spare::task as well
  std::vector<std::shared_ptr<Spare>> free;
};

Spares& spares() {
  static auto* const all = new Spares;  // never destroyed: threads may wait here at the end of the process
  return *all;
}

void serve(const std::shared_ptr<Spare>& self, std::function<void()> task) {
  Spares& all = spares();
  for (;;) {
    task();
    task = nullptr;  // before the thread counts as free: releases the objects of the task now
    std::unique_lock lock(all.mutex);
    if (all.free.size() == kMostSpare) return;
    all.free.push_back(self);
    self->given.wait(lock, [&] { return self->task != nullptr; });
    task = std::exchange(self->task, nullptr);
  }
}

}  // namespace

void run_in_spare_thread(std::function<void()> task) {
  Spares& all = spares();
  {
    std::lock_guard lock(all.mutex);
    if (!all.free.empty()) {
      const std::shared_ptr<Spare> spare = std::move(all.free.back());
      all.free.pop_back();
      spare->task = std::move(task);
      spare->given.notify_one();
      return;
    }
  }
  std::thread(serve, std::make_shared<Spare>(), std::move(task)).detach();
}

}  // namespace memsaver
