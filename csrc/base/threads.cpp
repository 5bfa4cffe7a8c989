#include "base/threads.h"

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace memsaver {

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
  start_thread(serve, std::make_shared<Spare>(), std::move(task));
}

}  // namespace memsaver
