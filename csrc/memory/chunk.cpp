#include "memory/chunk.h"

#include <algorithm>
#include <utility>

namespace memsaver {
namespace {

std::atomic<std::size_t> unreleased = 0;

}  // namespace

std::size_t chunk_class(std::size_t limit) {
  for (std::size_t size : kChunkClasses)
    if (size <= limit) return size;
  throw Error("a chunk of at most " + std::to_string(limit) + " bytes was requested, expected at least " +
              std::to_string(kPage));
}

void Chunk::reset() noexcept {
  const Loan loan = std::exchange(loan_, {});
  if (loan.driver == nullptr) return;
  if (loan.source != nullptr) {
    loan.source->take_back(Chunk(*loan.driver, loan.handle, loan.size, nullptr, loan.foreign));
    return;
  }
  try {
    loan.driver->release(loan.handle);
  } catch (const std::exception&) {
    unreleased += loan.size;  // the call may have been made: the number may be of another handle by now
  }
}

std::size_t unreleased_bytes() { return unreleased; }

std::size_t bytes_of(const Needs& needs) {
  std::size_t bytes = 0;
  for (const Need& need : needs) bytes += need.bytes;
  return bytes;
}

class RetainedPool::Request final : public ChunkRequest {
 public:
  Request(RetainedPool& pool, std::size_t bytes, Deadline deadline)
      : pool_(pool), missing_(bytes), deadline_(deadline) {}

  Chunk next(std::size_t limit, std::size_t fresh, WaitFor wait) override {
    if (wait == WaitFor::memory) check_for_all();
    if (fresh == 0) return pool_.make_whole(limit);
    // Idle chunks first, also small ones: creating memory beside idle memory would hold more than is needed.
    if (Chunk idle = pool_.take_idle(limit)) {
      const std::size_t size = idle.size();
      return Chunk(pool_.driver_, std::move(idle).keep(), size, &pool_);
    }
    std::size_t size = chunk_class(std::min(limit, fresh));
    for (;;) {
      try {
        return Chunk(pool_.driver_, pool_.driver_.create(size), size, &pool_);
      } catch (const ChunkUnavailable&) {
        // The idle chunks are too large for this place: release them and try again. After that try smaller classes: the
        // last memory of a device is available in small chunks only.
        if (pool_.give_up(size) > 0) continue;
        if (size == kPage) throw;
        size = chunk_class(size - 1);
      }
    }
  }

  std::optional<MemoryWait> waited() const override { return waited_; }

 private:
  // Until the deadline nothing is taken without the whole need. Two processes that collect chunks one by one could each
  // hold a half and block each other.
  void check_for_all() {
    const Deadline began = now();
    if (began < deadline_ && !waiting_is_over() && pool_.driver_.memory().free + pool_.idle_bytes() < missing_) {
      waited_ = MemoryWait{missing_, began, now()};
      throw ChunkUnavailable("ask", "the device has less memory than is needed");
    }
    missing_ = 0;  // once
  }

  RetainedPool& pool_;
  std::size_t missing_;
  const Deadline deadline_;
  std::optional<MemoryWait> waited_;
};

std::unique_ptr<ChunkRequest> RetainedPool::ask(const Needs& needs, Deadline deadline, Deadline) {
  return std::make_unique<Request>(*this, bytes_of(needs), deadline);
}

void RetainedPool::take_back(Chunk chunk) noexcept {
  const std::size_t size = chunk.size();
  if (!budget_.take(size)) return;  // over budget: the destructor of the chunk releases it
  try {
    std::lock_guard lock(mutex_);
    idle_[size].push_back(std::move(chunk));
  } catch (const std::exception&) {
    budget_.held -= size;
  }
}

Chunk RetainedPool::take_idle(std::size_t limit) {
  std::lock_guard lock(mutex_);
  for (auto entry = idle_.rbegin(); entry != idle_.rend(); ++entry) {
    if (entry->first > limit || entry->second.empty()) continue;
    Chunk chunk = std::move(entry->second.back());
    entry->second.pop_back();
    budget_.held -= chunk.size();
    return chunk;
  }
  return Chunk();
}

Chunk RetainedPool::make_whole(std::size_t size) {
  for (;;) {
    try {
      return Chunk(driver_, driver_.create(size, true), size, nullptr);
    } catch (const ChunkUnavailable&) {
      if (give_up(size) == 0) throw;
    }
  }
}

std::size_t RetainedPool::give_up(std::size_t bytes) {
  std::size_t released = 0;
  while (released < bytes) {
    Chunk chunk = take_idle(static_cast<std::size_t>(-1));
    if (!chunk) break;
    released += chunk.size();
  }
  return released;
}

}  // namespace memsaver
