// A region: addresses that never change, the segments carved out of them, and the chunks mapped under them.
//
// Locking: everything in a Region is guarded by Core::mutex, except that a transition owns the chunks and the backup of
// a region it has marked "pausing" or "resuming", and works on them without the lock. The lock is never held over a
// wait, a copy or Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backup.h"
#include "chunk.h"
#include "driver.h"

namespace memsaver {

enum class State { active, pausing, paused, resuming, lost };
enum class Policy { none, host };
const char* name_of(State state);
const char* name_of(Policy policy);
Policy policy_of(const std::string& name);

// One device of this process: its driver, where its chunks come from, where its contents wait.
struct Device {
  Device(std::unique_ptr<Driver> opened, RetainBudget& budget)
      : driver(std::move(opened)), pool(*driver, budget), arena(*driver) {}
  std::unique_ptr<Driver> driver;
  RetainedPool pool;
  HostArena arena;
};

// A place that a chunk takes under a region's addresses.
struct Slot {
  std::size_t offset;
  std::size_t size;
};

class Region {
 public:
  Region(std::string tag, Device& device, Policy policy);

  const std::string tag;
  Device& device;
  const Policy policy;
  const std::size_t span;  // bytes of addresses
  const Address base;

  State state = State::active;
  std::size_t users = 0;           // guarded launches under way: a pause waits for them
  std::unique_ptr<Backup> backup;  // of the pause that is in force

  // Segments. allocate() throws RegionPausedError or OutOfMemoryError, and then nothing has changed.
  std::size_t allocate(std::size_t size);  // returns the offset
  void free(std::size_t offset);           // in every state; unknown offsets are passed over
  bool owns(Address address) const { return address >= base && address < base + span; }
  std::size_t allocated_bytes() const { return allocated_; }
  std::size_t mapped_bytes() const { return mapped_; }
  std::size_t largest_chunk() const;  // to be made for this region
  std::vector<Range> live() const;    // segments in use, joined where they touch
  std::vector<Range> live_within(const std::vector<Range>& ranges) const;

  // Freed segments whose work may still be in flight. `waited`: frees() from before the caller waited for the device.
  void reap(std::uint64_t waited);
  std::uint64_t frees() const { return frees_; }
  void settle();  // handles the frees that came while a transition owned the region

  // Picks the size of the next chunk: at most `limit`, or at most `room` where nothing else is to be had.
  using Choose = std::function<std::size_t(std::size_t limit, std::size_t room)>;
  // The slots that put memory under every live segment that has none.
  std::vector<Slot> lay_out(const Choose& choose) const;
  std::size_t missing_bytes() const;  // the memory that these slots need at least

  // Maps a chunk, accessible only after allow(). A chunk that cannot be mapped is handed to the pool.
  void map(Slot slot, Chunk chunk);
  void allow(const std::vector<Slot>& slots);
  // Unmaps these chunks and appends them to `freed`. Those that the driver refuses to unmap stay mapped; the first
  // refusal is returned.
  std::optional<DriverError> unmap(const std::vector<std::size_t>& offsets, std::vector<Chunk>& freed);
  std::vector<std::size_t> chunk_offsets() const;
  std::vector<std::size_t> chunk_sizes() const;

 private:
  struct Segment {
    std::size_t size;
    bool resting;
  };
  struct Rest {
    std::size_t offset;
    std::uint64_t number;   // of the free, from 1
    Driver::Ticket ticket;  // null: not recorded yet
  };

  std::size_t take_addresses(std::size_t size);
  void give_addresses(std::size_t offset, std::size_t size);
  void lay_out_range(std::size_t begin, std::size_t end, const Choose& choose, std::size_t& slack,
                     std::vector<Slot>& slots) const;
  std::size_t unused_within(std::size_t begin, std::size_t end) const;  // bytes without a segment
  bool used_within(std::size_t begin, std::size_t end) const;
  std::size_t unmapped_within(std::size_t begin, std::size_t end) const;  // bytes without a chunk
  std::size_t allowance() const;
  void erase(std::size_t offset);
  void return_empty_chunks(std::size_t begin, std::size_t end);

  std::map<std::size_t, Segment> segments_;       // by offset
  std::map<std::size_t, std::size_t> addresses_;  // free ranges: offset -> size
  std::map<std::size_t, Chunk> chunks_;           // mapped: by offset
  std::list<Rest> resting_;
  std::vector<std::size_t> freed_meanwhile_;  // while a transition owned the region
  std::uint64_t frees_ = 0;                   // that rested
  std::size_t allocated_ = 0;
  std::atomic<std::size_t> mapped_ = 0;  // read by others while a transition owns the region
};

// Chunks mapped by an operation that may still fail: unless committed, they are unmapped and handed back.
class Mapping {
 public:
  explicit Mapping(Region& region) : region_(&region) {}
  Mapping(Mapping&& other) noexcept : region_(other.region_), slots_(std::move(other.slots_)) { other.slots_.clear(); }
  ~Mapping();
  void add(Slot slot, Chunk chunk);
  void allow() { region_->allow(slots_); }
  std::size_t commit();  // returns the bytes mapped

 private:
  Region* region_;
  std::vector<Slot> slots_;
};

// What a process has of memsaver. Made at first use and never destroyed: torch may free segments during exit.
class Core {
 public:
  std::mutex mutex;
  std::condition_variable changed;  // states, users, captures, synchronisations
  RetainBudget budget;
  std::size_t host_device_bytes = 0;  // 0: half of the machine's memory
  std::map<std::string, std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Region>> regions;

  Device& device(const std::string& name);  // opens it at first use
  Region& region(const std::string& tag, const std::string& device_name, Policy policy);
  void mark_lost(Device& dead);  // its context is gone: so are the regions on it

  // A device-wide wait breaks a capture on any thread, so the two exclude each other.
  void capture_begins();  // waits for device-wide waits under way
  void capture_ends();
  bool capturing() const { return captures_ > 0; }
  void synchronize(Device& device);  // throws Error, before it waits, where a capture is under way

 private:
  std::size_t captures_ = 0;
  std::size_t synchronizations_ = 0;
};

// Throws Error in a child forked from a process that uses memsaver: driver state does not survive a fork.
Core& core();
bool usable();  // the same question, for callbacks that cannot throw

}  // namespace memsaver
