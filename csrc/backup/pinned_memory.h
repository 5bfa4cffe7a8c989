// Pinned host memory for backups: one arena for each device, kept and reused.
//
// The arena reserves ranges of addresses. A slab is a part of them that has memory and is pinned as a whole.
// Neighbouring slabs form one extent, so that the backup of a tensor is contiguous. A copy must not cross the border of
// two slabs, because each slab is a registration of its own in the driver.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "backup/host_memory.h"
#include "base/ranges.h"
#include "driver/driver.h"

namespace memsaver {

class HostArena {
 public:
  struct Extent {
    std::byte* data;
    std::size_t size;
    std::byte* end() const { return data + size; }
  };

  HostArena(Driver& driver, HostBudget& budget);

  // Throws BackupError if `bytes` could not be taken now. Takes nothing.
  void check(std::size_t bytes) const;
  // An extent of at most `bytes`, rounded up to pages: idle memory, else a new slab. Throws BackupError.
  Extent take_some(std::size_t bytes);
  // One extent of `bytes`, rounded up to pages. Throws BackupError.
  Extent take_whole(std::size_t bytes);
  void put(Extent extent);  // an extent of one of these functions, or a part of it
  // The end of the slab: a copy from `data` must end there.
  std::byte* slab_end(const std::byte* data) const;

  // Memory of a file that processes have in common: a slab of its own, in no extent. reserve() counts bytes that this
  // process adds to the system's memory. map_file() and reserve() throw BackupError. unmap_file() returns whether the
  // driver let the memory go.
  void reserve(std::size_t bytes) { budget_.take(bytes); }
  void unreserve(std::size_t bytes) { budget_.put(bytes); }
  std::byte* map_file(int file, std::size_t offset, std::size_t bytes);
  bool unmap_file(Extent extent);

  std::size_t release_idle();  // returns slabs without contents to the system; returns their bytes
  std::size_t held_bytes() const {
    std::lock_guard lock(mutex_);
    return held_;
  }
  std::size_t used_bytes() const {
    std::lock_guard lock(mutex_);
    return held_ - idle_.bytes();
  }
  std::size_t idle_bytes() const {
    std::lock_guard lock(mutex_);
    return idle_.bytes();
  }
  std::size_t common_bytes() const { return common_; }  // of files

 private:
  struct Source {
    int file;
    std::size_t offset;
  };
  // growing_ is held. The caller owns the memory, until put(). `wanted`: bytes for the error text.
  Extent make(std::size_t bytes, std::size_t wanted);
  std::size_t make_slab(std::byte* data, std::size_t bytes, std::size_t wanted);
  void fill_slab(std::byte* data, std::size_t bytes, std::size_t wanted, const std::optional<Source>& source);
  void map_memory(std::byte* data, std::size_t bytes, const std::optional<Source>& source);
  std::optional<Extent> take_idle(std::size_t bytes, bool whole);
  std::byte* take_addresses(std::size_t size);

  Driver& driver_;
  HostBudget& budget_;
  const std::optional<std::vector<int>> nodes_;  // NUMA nodes for the pages; nullopt: any
  std::mutex growing_;  // one slab at a time; taken before mutex_, and held while the system provides memory
  mutable std::mutex mutex_;
  std::size_t held_ = 0;
  std::map<Address, std::size_t> slabs_;  // sizes of slabs with memory
  FreeRanges idle_;                       // unused parts of them
  FreeRanges addresses_;                  // addresses without memory
  std::size_t reserved_ = 0;              // bytes of addresses, with or without memory
  std::atomic<std::size_t> common_ = 0;
};

}  // namespace memsaver
