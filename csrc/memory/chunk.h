// Physical memory: owned chunks, and the sources that lend them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/waits.h"
#include "driver/driver.h"

namespace memsaver {

// Fixed classes: a handle can be neither split nor merged, so a chunk must have a size that every borrower can use. The
// largest class is for regions without a backup: the cost of their transitions is remapping, which is per chunk.
constexpr std::array<std::size_t, 4> kChunkClasses = {1024 * kMiB, 256 * kMiB, 32 * kMiB, 2 * kMiB};

// The largest class that is no larger than `limit`. `limit` is at least kPage.
std::size_t chunk_class(std::size_t limit);

class ChunkSource;

// One driver handle, on loan. The destructor returns it to its source, or without a source to the driver.
// `foreign`: it may hold bytes that another process wrote. See Region::clean().
class Chunk {
 public:
  Chunk() = default;
  Chunk(Driver& driver, Handle handle, std::size_t size, ChunkSource* source, bool foreign = false)
      : loan_{&driver, source, handle, size, foreign} {}
  Chunk(Chunk&& other) noexcept : loan_(std::exchange(other.loan_, {})) {}
  Chunk& operator=(Chunk&& other) noexcept {
    if (this == &other) return *this;
    reset();
    loan_ = std::exchange(other.loan_, {});
    return *this;
  }
  ~Chunk() { reset(); }

  Handle handle() const { return loan_.handle; }
  std::size_t size() const { return loan_.size; }
  bool foreign() const { return loan_.foreign; }
  void set_foreign(bool foreign) { loan_.foreign = foreign; }
  explicit operator bool() const { return loan_.driver != nullptr; }
  Chunk on_loan_from(ChunkSource* source) && {  // the same handle, to be returned to another source
    loan_.source = source;
    return std::move(*this);
  }
  Handle keep() && { return std::exchange(loan_, {}).handle; }  // the caller owns the handle from now on

 private:
  struct Loan {
    Driver* driver = nullptr;
    ChunkSource* source = nullptr;
    Handle handle = 0;
    std::size_t size = 0;
    bool foreign = false;
  };
  void reset() noexcept;

  Loan loan_;
};

// The bytes of chunks whose release reported an error, over all devices. They may be lost until the process ends: an
// error can be that of other work, after a release that was made.
std::size_t unreleased_bytes();

// A need for `bytes`, in chunks of at most `limit`; new chunks have at most `fresh`.
struct Need {
  std::size_t limit;
  std::size_t fresh;
  std::size_t bytes;
};
using Needs = std::vector<Need>;
std::size_t bytes_of(const Needs& needs);

// An open demand at a source, which gives chunks one after the other. The destructor cancels the demand.
class ChunkRequest {
 public:
  virtual ~ChunkRequest() = default;
  // A chunk of at most `limit` bytes; a new one has at most `fresh` bytes. `fresh` 0: one new handle of `limit` bytes,
  // for export to libraries, which returns to the driver; the driver's source alone has such. If `wait`, waits up to
  // the deadline of ask(). Throws ChunkUnavailable if there is none.
  virtual Chunk next(std::size_t limit, std::size_t fresh, bool wait) = 0;
  // Waits until the source has given all chunks that it can give now, without regard to the deadline. Callers then call
  // next() without waiting, under a lock. False: the chunks are fewer than the demand, or only next() can find out.
  virtual bool gather() = 0;
  // As gather(), and then waits up to the deadline while other processes return memory that they cache.
  virtual bool gather_from_others() { return gather(); }
  // Ends the demand. Chunks that return to the source from here on are for other demands. Callers call it before they
  // return chunks of a demand that is not met. No other function may be called after it.
  virtual void end() {}
};

// The available bytes of a source, and memory that processes cache and do not use, as far as it is known.
struct Supply {
  std::size_t free;
  std::vector<Unused> unused = {};
};

class ChunkSource {
 public:
  virtual ~ChunkSource() = default;
  // Opens a demand. `needs`: the expected calls of next(), as far as they are known. This function, next(wait = true)
  // and look() are called without a lock.
  virtual std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline) = 0;
  virtual void take_back(Chunk chunk) noexcept = 0;    // called by the destructor of a chunk; `chunk` has no source
  virtual std::size_t give_up(std::size_t bytes) = 0;  // releases idle chunks to the driver; returns their bytes
  virtual std::size_t idle_bytes() const = 0;          // of idle chunks in this process
  virtual Supply look() = 0;
  virtual void settle() {}  // returns when other processes can get all chunks that were returned
};

// For the caller to throw when a source has not given enough. `more_free`: bytes beside the source's that the call
// itself would free.
OutOfMemoryError out_of_memory(const Driver& driver, ChunkSource& source, std::size_t needed, std::size_t more_free,
                               double waited_s = 0);

// The budget of the option `retain`: idle chunks of the process, over all devices.
struct RetainBudget {
  std::atomic<std::size_t> limit = 0, held = 0;

  bool take(std::size_t bytes) {  // false: over the limit
    if ((held += bytes) <= limit) return true;
    held -= bytes;
    return false;
  }
};

// The driver as a source, with a pool of idle chunks up to the budget (0: none).
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
  Chunk make_whole(std::size_t size);

  Driver& driver_;
  RetainBudget& budget_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<Chunk>> idle_;  // by class; without a source
};

}  // namespace memsaver
