// Physical memory: owned chunks, and the sources that lend them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/waits.h"
#include "driver/driver.h"

namespace memsaver {

// Fixed classes: a handle can be neither split nor merged, so a chunk must have a size that every borrower can use. The
// largest class is for regions without a backup: the cost of their transitions is remapping, which is per chunk.
inline constexpr std::array<std::size_t, 4> kChunkClasses = {1024 * kMiB, 256 * kMiB, 32 * kMiB, 2 * kMiB};

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

// The wait of a demand for memory that others hold, from its first shortage to the last chunk.
struct MemoryWait {
  std::size_t bytes;  // that it lacked at the beginning
  Deadline began, ended;
  std::vector<std::pair<int, std::size_t>> holders = {};  // pids and their bytes, as far as the source knows them
};

// The wait for a chunk: for the source's answer alone; while other processes offer chunks (lazy pauses); also while
// they return memory that they cache; or for memory that others hold. The last two end at the deadline of the demand.
enum class WaitFor { none, offers, caches, memory };

// An open demand at a source, which gives chunks one after the other. The destructor ends the demand. Chunks that
// return to the source earlier may be given to it again.
class ChunkRequest {
 public:
  virtual ~ChunkRequest() = default;
  // A chunk of at most `limit` bytes; a new one has at most `fresh` bytes. `fresh` 0: one new handle of `limit` bytes,
  // for export to libraries, which returns to the driver; the driver's source alone has such. Throws ChunkUnavailable
  // if there is none. Called without a lock.
  virtual Chunk next(std::size_t limit, std::size_t fresh, WaitFor wait) = 0;
  virtual std::uint64_t number() const { return 0; }  // by which a broker knows it; 0: by none
  virtual std::optional<MemoryWait> waited() const { return std::nullopt; }
};

// Removes and returns the largest of these pieces up to `limit`, the first one of equal ones.
template <typename Piece, typename Size>
std::optional<Piece> take_largest(std::vector<Piece>& pieces, Size size, std::size_t limit) {
  auto best = pieces.end();
  for (auto piece = pieces.begin(); piece != pieces.end(); ++piece) {
    const std::size_t bytes = std::invoke(size, *piece);
    if (bytes <= limit && (best == pieces.end() || bytes > std::invoke(size, *best))) best = piece;
  }
  if (best == pieces.end()) return std::nullopt;
  std::optional<Piece> found(std::move(*best));
  pieces.erase(best);
  return found;
}

// The available bytes of a source, and memory that processes cache and do not use, as far as it is known.
struct Supply {
  std::size_t free;
  std::vector<Unused> unused = {};
};

class ChunkSource {
 public:
  virtual ~ChunkSource() = default;
  // Opens a demand. `needs`: the expected calls of next(), as far as they are known. This function and look() are
  // called without a lock.
  // `whole`: ends the wait for chunks that others offer as well, which `deadline` does not end.
  virtual std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline, Deadline whole) = 0;
  virtual void take_back(Chunk chunk) noexcept = 0;  // called by the destructor of a chunk; `chunk` has no source
  virtual std::size_t idle_bytes() const = 0;        // of idle chunks in this process
  virtual Supply look() = 0;
  virtual void settle() {}  // returns when other processes can get all chunks that were returned
};

// The budget of the option `retain`: idle chunks of the process, over all devices.
struct RetainBudget {
  std::atomic<std::size_t> limit = 0, held = 0;

  bool take(std::size_t bytes) {  // false: over the limit
    if ((held += bytes) <= limit) return true;
    held -= bytes;
    return false;
  }
};

// The driver as a source, with a pool of idle chunks up to the budget (0: none). It has no queue, so next() never
// waits: a demand whose deadline has not passed asks again.
class RetainedPool final : public ChunkSource {
 public:
  RetainedPool(Driver& driver, RetainBudget& budget) : driver_(driver), budget_(budget) {}
  ~RetainedPool() override { give_up(static_cast<std::size_t>(-1)); }

  std::unique_ptr<ChunkRequest> ask(const Needs& needs, Deadline deadline, Deadline whole) override;
  void take_back(Chunk chunk) noexcept override;
  std::size_t give_up(std::size_t bytes);  // releases idle chunks to the driver; returns their bytes
  std::size_t idle_bytes() const override {
    std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [size, chunks] : idle_) bytes += size * chunks.size();
    return bytes;
  }
  Supply look() override { return {driver_.memory().free + idle_bytes()}; }

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
