// The contents of a paused region, and the copies to and from them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/ranges.h"
#include "base/scoped.h"
#include "driver/driver.h"

namespace memsaver {

constexpr std::size_t kCopyBatch = 64 * kMiB;  // copies of this size reach 99 % of the bus

// Copies out. Batches are ranges of addresses, in order. The destructor ends copies under way.
class Saver {
 public:
  using Saved = std::function<void(std::size_t)>;
  virtual ~Saver() = default;
  // Reserves memory for the contents and begins to copy. The region is unchanged. Throws BackupError. `saved` gets the
  // numbers of batches that are saved while memory is made.
  virtual void start(const Saved& saved) = 0;
  // Waits until all contents of a batch are saved. If it throws, Backup::saved has the ranges that were saved.
  virtual void wait(std::size_t batch) = 0;
};

// Copies in, as memory becomes available.
class Loader {
 public:
  virtual ~Loader() = default;
  virtual void add(Range memory) = 0;  // this range is accessible now
  // The bytes of copies that have ended since the last call. `waits`: waits for some; 0 means that all have ended. If
  // it throws, the backup is unchanged.
  virtual std::size_t arrived(bool waits) = 0;
};

// The contents of some parts of a region. A part lies within one segment. Parts are in the order of their offsets.
class Backup : public std::enable_shared_from_this<Backup>, Immovable {
 public:
  explicit Backup(Ranges parts);
  virtual ~Backup() = default;

  const Ranges& parts() const { return parts_; }
  const Ranges& runs() const { return runs_; }  // touching parts joined: thousands of tensors move as one
  std::size_t bytes() const { return bytes_; }
  virtual std::size_t kept_bytes() const { return bytes_; }           // in host memory or on disk
  virtual std::size_t copied_bytes() const { return saved.bytes(); }  // by this process
  bool complete() const { return saved.covers(parts_); }
  RangeSet saved;  // ranges that have arrived; the contents of all others exist in the region alone

  virtual std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) = 0;
  // Loads the part of `saved` that lies in `wanted`.
  virtual std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) = 0;
  // A saved range within one part: view() as memory at a fixed place as long as the backup lives, read() as a copy.
  // Both throw BackupError.
  virtual std::byte* view(Range range) = 0;
  virtual void read(Range range, std::byte* to) = 0;

 private:
  const Ranges parts_;
  const Ranges runs_;
  const std::size_t bytes_;
};

// Contents in pinned memory, copied directly from and to the device.
class PinnedBackup : public Backup {
 public:
  // A copy: contiguous on both sides, and within a slab.
  struct Piece {
    std::size_t offset;
    std::size_t size;
    std::byte* host;
  };
  using Backup::Backup;
  virtual std::vector<Piece> pieces(const Ranges& ranges) const = 0;
  std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) final;
  void read(Range range, std::byte* to) final;
};

class HostArena;
// In memory of the arena. Takes none yet.
std::shared_ptr<Backup> host_backup(HostArena& arena, Ranges parts);

using MakePiece = std::function<std::shared_ptr<Backup>(Ranges)>;  // a backup of these contents. Throws BackupError
// In pieces, one for each copy out. Takes nothing yet.
std::shared_ptr<Backup> pieced_backup(Ranges parts, MakePiece make);

// After a failure: waits for queued copies, so that none of them accesses memory that is freed next. False: the
// device's context is dead.
bool drain_copies(Driver& driver) noexcept;

}  // namespace memsaver
