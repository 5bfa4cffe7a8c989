// Pinned host memory, where contents wait: one arena for each device, kept and reused.
//
// The arena is one range of addresses; slabs of it get memory, are pinned as they are, and may be unpinned and given
// back. Neighbouring slabs make one extent, so that a tensor is contiguous wherever it lies, but a copy may not cross
// from slab to slab: the driver knows each as a registration of its own.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "driver.h"
#include "host_budget.h"

namespace memsaver {

class HostArena {
 public:
  struct Extent {
    std::byte* data;
    std::size_t size;
  };

  HostArena(Driver& driver, HostBudget& budget) : driver_(driver), budget_(budget) {}
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Throws BackupError where `bytes` could not be taken now. Takes nothing.
  void check(std::size_t bytes) const;
  // An extent of at most `bytes`, rounded up to pages: of what is idle, else a new slab. Throws BackupError.
  Extent take_some(std::size_t bytes);
  // One extent of `bytes`, rounded up to pages. Throws BackupError.
  Extent take_whole(std::size_t bytes);
  void put(Extent extent);
  // How far from here a copy can go: the end of the slab.
  std::byte* slab_end(const std::byte* data) const;

  // Grows in the background until it holds `bytes`, as far as the budget goes; a later pause says what is missing.
  void grow_ahead(std::size_t bytes);
  void start_background();  // where grow_ahead() may be called from: before it
  void stop_background();   // waits for the slab that is being made

  std::size_t release_idle();  // slabs without contents go back to the system; returns their bytes
  std::size_t held_bytes() const;
  std::size_t used_bytes() const;
  std::size_t idle_bytes() const;

 private:
  void run_background();
  // With growing_ held. The memory is the caller's, to use or to put(). `wanted`: bytes for an error to name.
  Extent make(std::size_t bytes, std::size_t wanted);
  std::size_t make_slab(std::byte* data, std::size_t bytes, std::size_t wanted);
  std::optional<Extent> take_idle(std::size_t bytes, bool whole);
  std::byte* take_addresses_locked(std::size_t size);  // lowest fit
  std::optional<Extent> take_idle_locked(std::size_t bytes, bool whole);
  void join_locked(std::map<std::byte*, std::size_t>& extents, Extent extent);

  Driver& driver_;
  HostBudget& budget_;
  std::mutex growing_;  // one slab at a time; taken before mutex_, and held while the system makes memory
  mutable std::mutex mutex_;
  std::size_t held_ = 0;
  std::size_t used_ = 0;
  std::map<std::byte*, std::size_t> slabs_;      // memory that is there
  std::map<std::byte*, std::size_t> idle_;       // of that, in nobody's use
  std::map<std::byte*, std::size_t> addresses_;  // without memory

  std::condition_variable wanted_;
  std::thread background_;
  std::size_t target_ = 0;
  bool stop_ = false;
};

}  // namespace memsaver
