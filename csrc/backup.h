// Where contents wait while their region is paused, and what moves them there and back.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"
#include "ranges.h"

namespace memsaver {

// Counts the bytes that a transition copies, and tells who asked, now and then.
class Progress {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;

  explicit Progress(Report report) : report_(std::move(report)) {}
  void expect(std::size_t bytes);  // more, before any of them is copied
  void add(std::size_t bytes);     // that were

 private:
  using Clock = std::chrono::steady_clock;
  mutable std::mutex mutex_;
  Report report_;
  std::size_t total_ = 0;
  std::size_t done_ = 0;
  std::size_t reported_ = 0;
  std::mutex reporting_;  // taken before mutex_, and held while the report runs: several threads copy
  Clock::time_point last_ = Clock::now();
};

// Copies out. Batches are ranges of the region, in order; destroying it ends what it has under way.
class Saver {
 public:
  virtual ~Saver() = default;
  // Reserves what the contents need, and begins to copy: the region is as it was still. Throws BackupError.
  virtual void start() = 0;
  // Until all contents within a batch are saved. Throws, and then what was saved is in Backup::saved.
  virtual void wait(std::size_t batch) = 0;
};

// Copies in, as memory for it comes.
class Loader {
 public:
  virtual ~Loader() = default;
  virtual void add(Range memory) = 0;  // is accessible now
  virtual void finish() = 0;           // until all is there. Throws; the backup is as it was
};

// The contents of some parts of a region: never more than one segment each, by offset.
class Backup {
 public:
  explicit Backup(Ranges parts) : parts_(std::move(parts)), bytes_(bytes_of(parts_)) {}
  virtual ~Backup() = default;
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  const Ranges& parts() const { return parts_; }
  std::size_t bytes() const { return bytes_; }
  bool complete() const { return saved.covers(parts_); }
  RangeSet saved;  // what has come here: of the rest, the only contents are in the region

  virtual std::unique_ptr<Saver> saver(Driver& driver, Address base, Ranges batches, Progress& progress) = 0;
  // Of what is saved, brings what lies in `wanted`.
  virtual std::unique_ptr<Loader> loader(Driver& driver, Address base, Ranges wanted, Progress& progress) = 0;
  // A range within one part that is saved: as memory that stays where it is while the backup lives, or as a copy.
  // Both throw BackupError.
  virtual std::byte* view(Range range) = 0;
  virtual void read(Range range, std::byte* to) = 0;

 private:
  const Ranges parts_;
  const std::size_t bytes_;
};

// Waits for queued copies on the way out of a failure, so that none touches memory that is about to go. False: the
// device's context is dead.
bool drain_copies(Driver& driver) noexcept;

}  // namespace memsaver
