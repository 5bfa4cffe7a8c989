// Physical memory: chunks that clean up after themselves, and the sources they are borrowed from.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace memsaver {

// Fixed classes: a handle can be neither split nor merged, so whoever gets a chunk must find a use for its size. The
// largest is for regions without contents to keep, whose transitions cost what remapping costs, and that is per chunk.
constexpr std::array<std::size_t, 4> kChunkClasses = {1024 * kMiB, 256 * kMiB, 32 * kMiB, 2 * kMiB};

// The largest class that is no larger than `limit`. `limit` is at least kPage.
std::size_t chunk_class(std::size_t limit);

// Set when the process goes down: whoever waits for memory, or for its turn, gives up.
extern std::atomic<bool> waiting_is_over;

// Called by whoever waits, every so often and with no lock held. What it throws ends the wait: Ctrl-C, in Python.
extern std::function<void()> between_looks;
constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

class ChunkSource;

// One driver handle, on loan. The destructor hands it back to the source it came from; without one it goes to the
// driver, and a release that fails there is put aside and tried again by the next one.
class Chunk {
 public:
  Chunk() = default;
  Chunk(Driver& driver, Handle handle, std::size_t size, ChunkSource* source)
      : driver_(&driver), source_(source), handle_(handle), size_(size) {}
  Chunk(Chunk&& other) noexcept;
  Chunk& operator=(Chunk&& other) noexcept;
  ~Chunk();

  Handle handle() const { return handle_; }
  std::size_t size() const { return size_; }
  explicit operator bool() const { return driver_ != nullptr; }
  Chunk on_loan_from(ChunkSource* source) &&;  // the same handle with another place to go back to
  Handle keep() &&;                            // the caller has the handle from now on

 private:
  void reset() noexcept;

  Driver* driver_ = nullptr;
  ChunkSource* source_ = nullptr;
  Handle handle_ = 0;
  std::size_t size_ = 0;
};

// Handles whose release the driver refused, over all devices. Each later release tries them again.
std::size_t unreleased_bytes();

// So many bytes in chunks of at most `limit`, and of at most `fresh` where they have to be made.
struct Need {
  std::size_t limit;
  std::size_t fresh;
  std::size_t bytes;
};
using Needs = std::vector<Need>;
std::size_t bytes_of(const Needs& needs);

// An open demand at a source: chunks come one after the other. Destroying it stops the asking.
class ChunkRequest {
 public:
  virtual ~ChunkRequest() = default;
  // A chunk no larger than `limit` bytes, and no larger than `fresh` if it has to be made. Waits, at most to the
  // deadline that ask() was given, unless `wait` is false. Throws ChunkUnavailable when there is none.
  virtual Chunk next(std::size_t limit, std::size_t fresh, bool wait) = 0;
  // Waits until the source has given what it can give now, whatever the deadline: for callers who then call next()
  // without waiting, under a lock. False where that is less than was asked for, and where next() itself will tell.
  virtual bool gather() = 0;
};

// What could be had from a source, and who holds the rest.
struct Supply {
  std::size_t free;
  std::vector<Driver::Process> holders;
};

class ChunkSource {
 public:
  virtual ~ChunkSource() = default;
  // Opens a demand: what will be asked of the request, as far as it is known. Neither this nor next(wait = true) nor
  // look() is called with a lock held.
  virtual std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline) = 0;
  virtual void take_back(Chunk chunk) noexcept = 0;    // called by the chunk's end; `chunk` is on loan from nobody
  virtual std::size_t give_up(std::size_t bytes) = 0;  // lets idle chunks go to the driver; returns the bytes that went
  virtual std::size_t idle_bytes() const = 0;          // held in this process, in nobody's use
  virtual Supply look() = 0;
  virtual void settle() {}  // returns when all that was taken back can be had by others
};

// To be thrown when a source has not given enough: `more_free` would have been there beside what it has.
OutOfMemoryError out_of_memory(const Driver& driver, ChunkSource& source, std::size_t needed, std::size_t more_free,
                               double waited_s = 0);

// What `retain` allows the process to keep idle, over all devices.
class RetainBudget {
 public:
  void set_limit(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  std::size_t limit() const {
    std::lock_guard lock(mutex_);
    return limit_;
  }
  std::size_t held() const {
    std::lock_guard lock(mutex_);
    return held_;
  }
  bool take(std::size_t bytes);  // false: over the limit
  void put(std::size_t bytes);

 private:
  mutable std::mutex mutex_;
  std::size_t limit_ = 0;
  std::size_t held_ = 0;
};

// The driver as a source, with a pool in front of it in which idle chunks wait, up to the budget (0: none wait).
class RetainedPool final : public ChunkSource {
 public:
  RetainedPool(Driver& driver, RetainBudget& budget) : driver_(driver), budget_(budget) {}
  ~RetainedPool() override { give_up(static_cast<std::size_t>(-1)); }

  std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline) override;
  void take_back(Chunk chunk) noexcept override;
  std::size_t give_up(std::size_t bytes) override;
  std::size_t idle_bytes() const override;
  Supply look() override;

 private:
  class Request;
  Chunk take_idle(std::size_t limit);

  Driver& driver_;
  RetainBudget& budget_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<Chunk>> idle_;  // by class; on loan from nobody
};

}  // namespace memsaver
