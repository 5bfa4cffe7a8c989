// Where contents wait while their region is paused: one arena of pinned host memory, kept and reused.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

namespace memsaver {

struct Range {
  std::size_t offset;  // within a region
  std::size_t size;
};

// Pinned host memory of one kind of driver. It grows by what is missing and never shrinks by itself.
class HostArena {
 public:
  struct Extent {
    std::byte* data;
    std::size_t size;
  };

  explicit HostArena(Driver& driver) : driver_(driver) {}

  // Extents of `bytes` in all, rounded up to whole host pages. Throws BackupError, and then holds what it held before.
  std::vector<Extent> take(std::size_t bytes);
  void put(const std::vector<Extent>& extents);
  std::size_t held_bytes() const;
  std::size_t used_bytes() const;

 private:
  struct Slab {
    std::byte* data;
    std::size_t size;
  };
  std::vector<Slab> grow(std::size_t bytes);
  void discard(const std::vector<Slab>& slabs) noexcept;
  void put_locked(Extent extent);

  Driver& driver_;  // pins; pinned memory serves all devices of the driver's kind
  mutable std::mutex mutex_;
  std::size_t held_ = 0;
  std::size_t used_ = 0;
  // Free extents by address. Slabs are registered apart from each other, so extents never join across a slab's start.
  std::map<std::byte*, std::size_t> free_;
  std::map<std::byte*, std::size_t> slabs_;
};

// The contents of some ranges of a region: the ranges in order, laid end to end over the extents.
class Backup {
 public:
  struct Piece {
    std::size_t offset;
    std::byte* host;
    std::size_t size;
  };

  Backup(HostArena& arena, std::vector<Range> live);
  ~Backup() { arena_.put(extents_); }
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  std::size_t bytes() const { return bytes_; }
  std::vector<Piece> pieces() const;  // contiguous on both sides

 private:
  HostArena& arena_;
  std::vector<Range> live_;
  std::size_t bytes_;
  std::vector<HostArena::Extent> extents_;
};

}  // namespace memsaver
