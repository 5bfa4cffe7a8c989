// The contents of a paused region, and the copies to and from them.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

// Counts the bytes that a transition copies, and calls the report every kBetweenReports.
class Progress {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;

  explicit Progress(Report report) : report_(std::move(report)) {}
  void expect(std::size_t bytes);  // more bytes to copy; called before the first of them is copied
  void add(std::size_t bytes);     // bytes that were copied

 private:
  using Clock = std::chrono::steady_clock;
  mutable std::mutex mutex_;
  Report report_;
  std::size_t total_ = 0;
  std::size_t done_ = 0;
  std::size_t reported_ = 0;
  std::mutex reporting_;  // taken before mutex_, and held during the report: several threads copy
  Clock::time_point last_ = Clock::now();
};

// Copies out. Batches are ranges of addresses, in order. The destructor ends copies under way.
class Saver {
 public:
  virtual ~Saver() = default;
  // Reserves memory for the contents and begins to copy. The region is unchanged. Throws BackupError.
  virtual void start() = 0;
  // Waits until all contents of a batch are saved. If it throws, Backup::saved has the ranges that were saved.
  virtual void wait(std::size_t batch) = 0;
};

// Copies in, as memory becomes available.
class Loader {
 public:
  virtual ~Loader() = default;
  virtual void add(Range memory) = 0;  // this range is accessible now
  virtual void finish() = 0;           // waits for all copies. If it throws, the backup is unchanged
};

// The contents of some parts of a region. A part lies within one segment. Parts are in the order of their offsets.
class Backup {
 public:
  explicit Backup(Ranges parts);
  virtual ~Backup() = default;
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  const Ranges& parts() const { return parts_; }
  const Ranges& runs() const { return runs_; }  // touching parts joined: thousands of tensors move as one
  std::size_t bytes() const { return bytes_; }
  bool complete() const { return saved.covers(parts_); }
  RangeSet saved;  // ranges that have arrived; the contents of all others exist in the region alone

  virtual std::unique_ptr<Saver> saver(Driver& driver, Ranges batches, Progress& progress) = 0;
  // Loads the part of `saved` that lies in `wanted`.
  virtual std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted, Progress& progress) = 0;
  // A saved range within one part: view() as memory at a fixed place as long as the backup lives, read() as a copy.
  // Both throw BackupError.
  virtual std::byte* view(Range range) = 0;
  virtual void read(Range range, std::byte* to) = 0;

 private:
  const Ranges parts_;
  const Ranges runs_;
  const std::size_t bytes_;
};

// After a failure: waits for queued copies, so that none of them accesses memory that is freed next. False: the
// device's context is dead.
bool drain_copies(Driver& driver) noexcept;

}  // namespace memsaver
