// The part of a transition on one device: a pipeline that moves chunks and contents.
//
// Contents are copied out in batches of neighbouring chunks. When a batch is saved, its chunks are unmapped. They go to
// a region that resumes on this device, whose contents are copied in while later batches are still copied out, or back
// to their source.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backup/backup.h"
#include "regions/core.h"

namespace memsaver {

// The bounds of a transition's waits. The earliest one ends a wait.
struct Bounds {
  Deadline whole = kNever;  // up to the commit
  double memory_s = 0;      // seconds, for memory that others hold
  double readers_s = 0;     // seconds, for other processes that are attached
};

// A region to pause.
struct Pause {
  Region* region;
  Policy policy;                             // of this pause
  Ranges live;                               // the contents to keep
  std::shared_ptr<Backup> common = nullptr;  // of this pause, if the caller has made it
  bool lazy = false;                         // offer the chunks, see Region::may_evict(), and copy nothing
};

// The stages of a transition, with the times of their begins. Any thread may call its methods. The parts of a
// transition on several devices run side by side: the stage is the one that one of them entered last.
class Stages {
 public:
  using Begun = std::pair<std::string, double>;  // the stage, and the seconds from the construction to its begin

  void enter(const char* stage) {
    const std::chrono::duration<double> passed = now() - since_;
    std::lock_guard lock(mutex_);
    if (begun_.size() < kMost && (begun_.empty() || begun_.back().first != stage))
      begun_.emplace_back(stage, passed.count());
  }
  std::vector<Begun> begun() const {
    std::lock_guard lock(mutex_);
    return begun_;
  }

  // Copies or a wait of a device, for a trace. Times are seconds from the construction.
  struct Event {
    std::string device, kind;  // "copies out", "copies in", or "waits"
    double began, ended;
    std::size_t bytes;
    std::vector<std::pair<int, std::size_t>> holders;  // of a wait: pids and their bytes
  };
  void copied(const Device& device, Direction direction, Deadline began, std::size_t bytes) {
    if (bytes > 0) add(device, direction == Direction::out ? "copies out" : "copies in", {bytes, began, now()});
  }
  void waited(const Device& device, const std::optional<MemoryWait>& wait) {
    if (wait) add(device, "waits", *wait);
  }
  std::vector<Event> events() const {
    std::lock_guard lock(mutex_);
    return events_;
  }

  // Bytes of contents, of both directions. For a report: copied in steps of about kCopyBatch.
  std::atomic<std::size_t> bytes_planned = 0, bytes_copied = 0;

 private:
  static constexpr std::size_t kMost = 32;  // devices may alternate between two stages
  void add(const Device& device, const char* kind, const MemoryWait& span);

  const Deadline since_ = now();
  mutable std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::vector<Begun> begun_;
  std::vector<Event> events_;
};

class Transfer : Immovable {
 public:
  struct Moved {
    std::size_t released_bytes = 0;
    std::size_t restored_bytes = 0;
    std::size_t copied_bytes = 0;
  };

  Transfer(Device& device, Bounds bounds, Stages& stages) : device_(device), bounds_(bounds), stages_(stages) {}
  ~Transfer() { undo(); }

  // `continues`: the region is paused, and has chunks left from a refusal.
  void add_leaving(const Pause& pause, bool continues) {
    leaving_.push_back({pause, continues});
    leaving_.back().lazy &= !continues;
  }
  void add_coming(Region& region, bool restore);

  // Checks that there is room for the outgoing contents, and waits for the device. Called in the caller's thread,
  // because only this thread handles signals.
  void wait_idle();
  // Reserves host memory, files and chunks, and begins to copy out. If it throws, nothing has changed. `chunks`:
  // reserve chunks here; else run() takes them one after the other.
  void prepare(bool chunks);
  // The commit: gives the outgoing regions their backups.
  void commit();
  // Unmaps outgoing chunks, maps and fills incoming regions. Errors are stored: outgoing regions continue after a
  // failure of incoming ones.
  void run() noexcept;
  const std::exception_ptr& refused() const { return refused_; }  // an outgoing region kept some chunks
  const std::exception_ptr& failed() const { return failed_; }    // the incoming regions cannot resume
  // Fills memory whose contents were kept until now. Called once no device has failed.
  void fill_kept() noexcept;
  // Either keeps the incoming chunks, or unmaps and returns them.
  void keep();
  void undo() noexcept;

  Device& device() const { return device_; }
  const Moved& moved() const { return moved_; }

 private:
  struct Inventory;
  struct Leaving : Pause {
    bool continues;
    std::shared_ptr<Backup> backup = nullptr;  // null: the contents are discarded
    std::vector<Ranges> batches = {};          // neighbouring chunks, which move
    std::vector<Slot> offers = {};             // the other chunks of a lazy pause
    std::unique_ptr<Saver> saver = nullptr;    // null: nothing to copy
    std::size_t copied_before = 0;
    std::vector<std::size_t> to_count = {};  // bytes of each batch, 0 once they count as copied
    bool copies() const { return backup != nullptr && !backup->complete(); }
  };
  struct Coming {
    Region* region;
    Ranges wanted;    // contents to copy in
    bool fills;       // zeros or poison are written to all memory, since no contents are copied in
    Mapping mapping;  // unmaps unless committed
    std::unique_ptr<Loader> loader = nullptr;
    std::size_t arrived = 0;         // bytes that count as copied
    std::vector<Slot> run = {};      // mapped slots without access yet
    std::size_t to_come = 0;         // chunks still to be mapped
    std::vector<Slot> kept = {};     // chunks with their contents: offered, or left from a refusal in an earlier pause
    std::vector<Slot> offered = {};  // those of them that go back to the offers if it fails
    bool restores = false;
    bool claimed = false;  // the chunks that it offered
  };
  struct Place {
    Coming* coming;
    Slot slot;
    Chunk chunk;  // empty: an outgoing chunk of this size will be used here
  };

  template <typename Act>
  void losing_context(Act act);
  void check_backups();
  void reserve_and_start(bool chunks);
  void save_where(Leaving& leaving);
  void make_batches(Leaving& leaving);
  bool give_more(std::size_t bytes);
  bool may_give() const;
  std::size_t lacking(bool snug) const;
  Inventory inventory() const;
  Chunk claim_offered(ChunkRequest& request, bool snug);
  void claim(Coming& coming);
  void release(Coming& coming) noexcept;
  void begins(std::optional<Deadline>& copies_at);
  void fill(const Coming& coming, Range range);
  Needs needs(bool snug) const;
  template <typename Use>
  void lay_out(ChunkRequest& request, bool snug, Use use);
  template <typename Attempt, typename GiveBack>
  void with_chunks(Attempt attempt, GiveBack give_back);
  void let_go(Leaving& leaving);
  void come_in_alone(ChunkRequest& request, bool snug);
  void count_arrived(Coming& coming, std::size_t bytes);
  void open(Coming& coming);
  void close(Coming& coming) noexcept;
  void use_kept(Coming& coming);
  void put(Coming& coming, Slot slot, Chunk chunk);
  void give_access(Coming& coming);
  void load(Coming& coming, Range range);
  void hand_on(Chunk chunk);
  void finish_coming();

  Device& device_;
  const Bounds bounds_;
  Stages& stages_;
  std::list<Leaving> leaving_;
  std::list<Coming> coming_;
  std::vector<Place> places_;
  std::map<std::size_t, std::deque<Place*>> waiting_;  // places without a chunk yet, by size of chunk
  std::exception_ptr refused_, failed_;
  std::vector<std::shared_ptr<Backup>> dropped_;  // destroyed without the lock
  bool fills_ = false;                            // fills are queued
  bool under_way_ = false;                        // copies may be queued, and keep() was not called
  std::optional<Deadline> copies_out_at_, copies_in_at_;
  std::optional<Counted> copying_;  // of the device
  Moved moved_;
};

}  // namespace memsaver
