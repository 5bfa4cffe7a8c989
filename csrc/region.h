// A region: addresses that never change, the segments carved out of them, and the chunks mapped under them.
//
// Locking: everything in a Region is guarded by Core::mutex, except that a transition owns the chunks and the backup of
// a region it has marked "pausing" or "resuming", and works on them without the lock. The lock is never held over a
// wait, a copy or Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "arena.h"
#include "backup.h"
#include "chunk.h"
#include "disk_store.h"
#include "driver.h"
#include "ranges.h"
#include "shared_pool.h"
#include "states.h"

namespace memsaver {

// One device of this process: its driver, where its chunks come from, where its contents wait.
struct Device {
  Device(std::unique_ptr<Driver> opened, RetainBudget& retain, HostBudget& host)
      : driver(std::move(opened)), retained(*driver, retain), arena(*driver, host) {}
  // Where chunks come from now. Those that came from the other go back there.
  ChunkSource& source() { return pooled ? static_cast<ChunkSource&>(*shared) : retained; }

  std::unique_ptr<Driver> driver;
  RetainedPool retained;
  std::unique_ptr<SharedPool> shared;  // made when it is first wanted, and kept
  std::atomic<bool> pooled = false;
  HostArena arena;
  DiskStore files;
  bool lost = false;           // its context died; guarded by Core::mutex
  std::size_t to_back_up = 0;  // bytes of segments in regions with policy "host"; guarded by Core::mutex
};

using Slot = Range;  // the place that a chunk takes under a region's addresses

class Region {
 public:
  struct Options {
    Policy policy = Policy::none;
    bool frozen = false;  // the contents never change once there is a copy of them
    Fill fill = Fill::nothing;
  };

  Region(std::string tag, Device& device, Options options);

  const std::string tag;
  Device& device;
  const Policy policy;
  const bool frozen;
  const Fill fill;
  const std::size_t span;  // bytes of addresses
  const Address base;

  State state = State::active;
  std::size_t users = 0;           // guarded launches, and readers of the backup: transitions wait for them
  std::shared_ptr<Backup> backup;  // of the pause that is in force; of a frozen region, from its first pause on
  std::deque<const void*> queue;   // transitions that want the region, the first of which has it
  std::uint64_t residence = 1;     // counts the stays in memory: what was said of one does not hold in the next
  struct Lease {
    int pid;
    std::vector<Handle> chunks;
  };
  std::map<std::uint64_t, Lease> leases;  // other processes attached to the memory, by number. Pauses wait for them

  // Segments. allocate() returns the offset; it lets go of `held`, the lock of Core::mutex, while its source may wait.
  // Throws RegionPausedError, OutOfMemoryError or what the source throws, and then nothing has changed.
  std::size_t allocate(std::size_t size, std::unique_lock<std::mutex>& held);
  void free(std::size_t offset);  // in every state; unknown offsets are passed over
  bool owns(Address address) const { return address >= base && address < base + span; }
  std::size_t allocated_bytes() const { return allocated_; }
  std::size_t mapped_bytes() const { return mapped_; }
  std::size_t largest_chunk() const;         // to be made for this region
  Ranges live() const;                       // segments in use, joined where they touch
  Ranges parts(const Ranges& ranges) const;  // what of these is within segments in use, not joined; in any order
  bool sealed() const { return frozen && backup != nullptr; }  // takes no allocations: its copy would not have them

  // Freed segments whose work may still be in flight. `waited`: frees() from before the caller waited for the device.
  void reap(std::uint64_t waited);
  std::uint64_t frees() const { return frees_; }
  void return_empty() { return_empty_chunks(0, span); }  // chunks that no segment needs
  void settle();  // handles the frees that came while a transition owned the region

  // Picks the next chunk: at most `limit`, or at most `room` where nothing else is to be had.
  struct Choice {
    std::size_t size;
    Chunk chunk;  // empty: one of this size will be there
  };
  using Choose = std::function<Choice(std::size_t limit, std::size_t room)>;
  using Place = std::function<void(Slot slot, Chunk chunk)>;
  // Puts memory under every live segment that has none, chunk after chunk.
  // `snug`: with no chunk that reaches beyond what needs it; else larger ones are used where little is wasted.
  void lay_out(const Choose& choose, const Place& place, bool snug = false) const;
  Need need(std::size_t limit) const {
    return {limit, std::min(limit, largest_chunk()), limit};
  }  // for one such choice
  std::size_t missing_bytes() const;  // the memory that these slots need at least

  // Maps a chunk, accessible only after allow().
  void map(Slot slot, Chunk chunk);
  void allow(const std::vector<Slot>& slots);
  // Unmaps these chunks and appends them to `freed`. Those that the driver refuses to unmap stay mapped; the first
  // refusal is returned.
  std::optional<DriverError> unmap(const std::vector<std::size_t>& offsets, std::vector<Chunk>& freed);
  std::vector<Slot> slots() const;                               // of the chunks that are mapped
  std::vector<Placed> chunks_under(const Ranges& ranges) const;  // by offset, each once

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

  void check_allocatable(std::size_t size) const;
  void lay_out_new(Range segment, const Choose& choose, const Place& place, bool snug);
  void uncount_new(Range segment);
  Needs needs_of(Range segment, bool snug);
  void map_new(Range segment, ChunkRequest& request, bool snug);
  std::size_t take_addresses(std::size_t size);
  void give_addresses(std::size_t offset, std::size_t size);
  // Returns where the last chunk ends; the first begins at `from` or later.
  std::size_t lay_out_range(std::size_t from, Range range, const Choose& choose, const Place& place,
                            std::size_t& slack) const;
  std::size_t unused_within(std::size_t begin, std::size_t end) const;  // bytes without a segment
  bool used_within(std::size_t begin, std::size_t end) const;
  std::size_t unmapped_within(std::size_t begin, std::size_t end) const;  // bytes without a chunk
  void count(std::ptrdiff_t bytes);                                       // into allocated_, and what that entails
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
  std::size_t resting_bytes_ = 0;
  bool stranded_ = false;                // the driver refused to unmap a chunk that no segment needs
  std::atomic<std::size_t> mapped_ = 0;  // read by others while a transition owns the region
};

// Chunks mapped by an operation that may still fail: unless committed, they are unmapped and handed back.
class Mapping {
 public:
  explicit Mapping(Region& region) : region_(&region) {}
  Mapping(Mapping&& other) noexcept : region_(other.region_), slots_(std::move(other.slots_)) { other.slots_.clear(); }
  ~Mapping() { undo(); }
  void undo();
  void add(Slot slot, Chunk chunk);
  const std::vector<Slot>& slots() const { return slots_; }
  std::size_t commit();  // returns the bytes mapped

 private:
  Region* region_;
  std::vector<Slot> slots_;
};

// What a process has of memsaver. Made at first use and never destroyed: torch may free segments during exit.
class Core {
 public:
  std::mutex mutex;
  std::condition_variable changed;  // states, queues, users, captures, synchronisations
  std::mutex viewing;               // one reader of backups at a time; taken before `mutex`, and held while one is read
  RetainBudget retain;
  HostBudget host_budget;
  std::size_t host_device_bytes = 0;  // 0: half of the machine's memory
  std::size_t host_bytes() const;     // that figure
  bool backup_ahead = true;           // whether pinned host memory grows before a pause needs it
  std::string disk_dir;               // empty: none was named
  std::map<std::string, std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Region>> regions;

  const std::string& disk_directory() const;  // throws ConfigError where there is none
  Device& device(const std::string& name);    // opens it at first use
  // The region of this tag, device and policy; other options hold where it is made.
  Region& region(const std::string& tag, const std::string& device_name, Region::Options options);
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
