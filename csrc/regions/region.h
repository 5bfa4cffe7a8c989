// A region: addresses that never change, the segments carved out of them, and the chunks mapped under them.
//
// Its methods are in region.cpp (states, backups, segments, the end), allocation.cpp, and mappings.cpp.
//
// Locks, in the order in which they are taken:
//   mapping_         of one region: held by the thread that changes its mappings, over driver calls. A thread that
//                    holds the GIL only tries to lock it, but for place() and drop(): no holder takes the GIL or
//                    torch's mutex.
//   Core::mutex      states, users, leases and queues.
//   Device::mutex    segments, addresses and the list of chunks.
// A state is written with Core::mutex and Device::mutex held, so either lock is enough to read it. A transition owns
// the chunks and the backup of a region from its mark to settle(), and changes them without mapping_. The list
// of chunks is written under Device::mutex by the thread that holds mapping_, or by the owning transition. Both may
// read it without the lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backup/backup.h"
#include "memory/layout.h"
#include "memory/segments.h"
#include "regions/device.h"
#include "regions/states.h"

namespace memsaver {

constexpr std::size_t kGuard = kPage;  // behind each reserved range, so that two never touch
constexpr std::size_t kAnySlack = std::size_t{1} << 60;
using Slot = Range;  // the addresses of a chunk in a region

struct RegionOptions {
  const Policy policy = Policy::none;
  const bool frozen = false;  // the contents do not change after the first copy
  const Fill fill = Fill::clean;
  // The limit of mapped bytes without a segment, beside that of the region's size.
  const std::size_t most_slack = kAnySlack;
  const bool placed = false;      // another allocator chooses the addresses of the segments: see place()
  const bool one_handle = false;  // each segment has one chunk of its own, of the driver, of its size in whole pages
};

class Region : public RegionOptions {
 public:
  Region(std::string tag, Device& device, const RegionOptions& options);

  const std::string tag;
  Device& device;

  // The state machine. The caller holds Core::mutex, and no lock after it in the order.
  //
  //   active ----> draining --commit--> pausing --settle--> paused ----> resuming --settle--> active
  //                    |                                      ^              |
  //                    +--settle--> active                    +---settle-----+
  //
  // A paused region that still has chunks after a refusal can drain again. "lost" is final.
  State state() const { return state_; }
  bool is_at_rest() const { return (state_ == State::active || state_ == State::paused) && !evicting_; }
  void write_state(State state) {  // any but active and paused, into which settle() brings it
    std::lock_guard lock(device.mutex);
    state_ = state;
  }
  void settle(State next);  // the transition has ended; "active" after "resuming": the resumed memory stays
  // Committed: this pause keeps no contents.
  void discard() { discarded_ = policy != Policy::none && allocated_bytes() > 0; }
  // Whether a pause discarded contents that `policy` would have kept. Reset when the region has memory again.
  bool discarded() const { return discarded_; }
  // An error for the caller to throw: the region is in this state, which does not allow a call.
  RegionPausedError wrong_state(State found, const std::string& why) const {
    return {"region '" + tag + "' is " + name_of(found) + ": " + why, tag, name_of(found)};
  }
  double paused_s() const {  // seconds since the pause of a paused region; else 0
    return locked(
        [&] { return state_ == State::paused ? std::chrono::duration<double>(now() - paused_at_).count() : 0.0; });
  }
  // Changes on every resume. Tokens of shared tensors are valid only while it stays the same.
  std::uint64_t residence() const { return residence_; }

  // The queue of the transitions on the region; the first one may proceed. Core::mutex is held.
  void enqueue(const void* transition) { queue_.push_back(transition); }
  void dequeue(const void* transition) { std::erase(queue_, transition); }
  bool is_queued() const { return !queue_.empty(); }
  bool is_first(const void* transition) const { return !queue_.empty() && queue_.front() == transition; }
  // Guarded launches, and reads of the backup: transitions wait for them. Core::mutex is held.
  void begin_use() { ++users_; }
  void end_use() { --users_; }
  bool in_use() const { return users_ > 0; }
  // A lazy pause offers the chunks: they are unmapped, and keep their contents until a demand needs them. The owning
  // transition takes them by map_offered(), and an eviction (eviction.h) by copying their contents out.
  //
  // An eviction owns the chunks and the backup like a transition, but the state stays as it is. It may begin while the
  // region is paused, or while its resume waits for memory and has not claimed the offered chunks. Core::mutex is held.
  bool may_evict() const;
  bool evicting() const { return evicting_; }
  void claim(bool claimed) { claimed_ = claimed; }
  // Whether offered contents are copied ahead of a demand: see copy_ahead() in eviction.h.
  bool copies_ahead() const { return copies_ahead_; }
  void set_copies_ahead(bool wanted) { copies_ahead_ = wanted; }
  std::size_t offered_bytes() const { return offered_bytes_; }
  std::vector<Slot> offered_slots() const {
    return locked([&] { return entries_of(offered_); });
  }
  void map_offered(const std::vector<Slot>& slots);  // those of them that are offered
  // Takes such chunks, whose contents are not needed or saved, for their return. Device::mutex is held.
  void take_offered_locked(const std::vector<Slot>& slots, std::vector<Chunk>& freed);
  // The demand for whose memory the resume of this region waits: see ChunkRequest::number().
  std::uint64_t demand() const { return demand_; }
  void set_demand(std::uint64_t number) { demand_ = number; }

  // The pids of processes that are attached to the memory, by lease: pauses wait for them. Core::mutex is held.
  const std::map<std::uint64_t, int>& leases() const { return leases_; }
  void lend(std::uint64_t lease, int pid) { leases_[lease] = pid; }
  void returned(std::uint64_t lease) { leases_.erase(lease); }

  // The backup of the current pause; of a frozen region, from its first pause on.
  std::shared_ptr<Backup> backup() const {
    return locked([&] { return backup_; });
  }
  std::size_t backup_bytes() const {
    const std::shared_ptr<Backup> held = backup();
    return held != nullptr ? held->kept_bytes() : 0;
  }
  bool keeps_contents() const { return backup() != nullptr; }               // copied, or in offered chunks
  std::shared_ptr<Backup> replace_backup(std::shared_ptr<Backup> backup) {  // returns the former
    std::lock_guard lock(device.mutex);
    return std::exchange(backup_, std::move(backup));
  }
  // Frozen with a copy: it takes no allocations, since the copy would lack them.
  bool sealed() const { return frozen && backup() != nullptr; }

  // Segments, by their first address. If it throws RegionPausedError, OutOfMemoryError or an error of the source,
  // nothing has changed. `shortage`: the end of the wait for freed memory of this device. `memory`: the end of the wait
  // for memory that others hold.
  Address allocate(std::size_t size, Deadline shortage, Deadline memory = Deadline::min());
  void free(Address begin);  // in every state; addresses without a segment are ignored

  // In a placed region, another allocator reserves the addresses, and these take the place of allocate() and free().
  // No chunk reaches beyond a segment, so the chunks of one segment can be unmapped without the others.
  //
  // borrow() takes chunks for a segment of this size, a multiple of kPage. Throws as allocate().
  std::vector<Chunk> borrow(std::size_t size, Deadline shortage);
  // Maps borrowed chunks as a segment. Throws as allocate().
  void place(Range segment, std::vector<Chunk> chunks);
  // Ends a segment, in every state, and unmaps it. Nothing works on it any more: the other allocator has waited. In a
  // transition it is unmapped at the end of the transition. Returns whether there is such a segment.
  bool drop(Range segment);
  bool touches(Range range) const {  // whether a segment or a chunk is within these addresses
    std::lock_guard lock(device.mutex);
    return segments_.any_within(range.offset, range.end()) || !overlapping(chunks_, range).empty() ||
           !overlapping(offered_, range).empty();
  }
  bool owns(Address address) const {
    std::lock_guard lock(device.mutex);
    return placed ? segments_.any_within(address, address + 1) : !intersect(reserved_, {{address, 1}}).empty();
  }
  std::size_t allocated_bytes() const {
    return locked([&] { return segments_.live_bytes(); });
  }
  std::size_t resting_bytes() const {
    return locked([&] { return segments_.resting_bytes(); });
  }
  std::size_t mapped_bytes() const { return mapped_; }
  std::size_t largest_chunk() const {  // the largest class to be created for this region; 0: see one_handle
    if (one_handle) return 0;
    // Contents move chunk by chunk, and copies of smaller chunks overlap better.
    return policy == Policy::none ? kChunkClasses[0] : kChunkClasses[1];
  }
  Ranges live() const {  // segments in use, joined where they touch
    return locked([&] { return segments_.live(); });
  }
  Ranges parts(const Ranges& ranges) const {  // the parts of `ranges` within segments in use, not joined
    return locked([&] { return segments_.parts(ranges); });
  }
  // The work on a freed segment has ended. Device::mutex is held; a call of sweep() without it follows.
  void forget_locked(Address begin) {
    const Range freed = segments_.erase(begin);
    if (!placed) addresses_.put(freed);
    if (!chunks_.empty()) add_dirty_locked(freed);
  }
  // Returns chunks that no segment needs. If another thread holds mapping_, that thread does it.
  void sweep();
  void sweep_all();  // checks all chunks
  // mark_stale(): existing mappings lack the access of a new peer. allow_again() gives it if the region is active.
  void mark_stale() {
    std::lock_guard lock(device.mutex);
    stale_ = true;
  }
  void allow_again();
  bool lacks_access() const {  // whether it is active, and allow_again() has failed
    return locked([&] { return stale_ && state_ == State::active; });
  }
  void strand() { stranded_ = true; }  // the driver refused to unmap a chunk that no segment needs
  // Throws Error if a transition, a user, a reader or another process uses the region. Core::mutex is held.
  void check_unused() const;
  // Ends the region. Returns its addresses, for the caller to release. Throws Error if segments, users, leases or
  // transitions exist. Core::mutex and a Remapping are held.
  Ranges close();
  bool closed() const { return closed_; }

  // A layout for the parts of all live segments without memory. `snug`: no chunk reaches beyond the parts; else larger
  // chunks are used within the allowance.
  Layout layout(bool snug) const;
  Need need(std::size_t limit) const { return {limit, std::min(limit, largest_chunk()), limit}; }
  std::size_t missing_bytes() const;  // the least memory of a layout

  // Maps a chunk, accessible only after allow().
  void map(Slot slot, Chunk chunk);
  void allow(const std::vector<Slot>& slots) {
    for (const Range& run : runs(slots)) device.driver->allow(run.offset, run.size);
  }
  // Writes zeros over the bytes of other processes in these chunks, outside of `contents`, which are copied in later.
  // Queued with the copies in. Returns whether anything was queued. After all of this, declare_clean().
  bool clean(const std::vector<Slot>& slots, const Ranges& contents);
  void declare_clean(const std::vector<Slot>& slots) {
    if (fill == Fill::keep) return;
    std::lock_guard lock(device.mutex);
    for (const Slot& slot : slots) chunks_.at(slot.offset).set_foreign(false);
  }
  // Unmaps these chunks and appends them to `freed`; null: offers them. Chunks that the driver refuses to unmap stay
  // mapped. Returns the first refusal.
  std::optional<DriverError> unmap(const std::vector<Slot>& slots, std::vector<Chunk>* freed);
  std::vector<Slot> slots() const {  // of all mapped chunks
    return locked([&] { return entries_of(chunks_); });
  }
  struct Placed {  // a chunk, and its place
    std::size_t offset, size;
    Handle handle;
  };
  std::vector<Placed> chunks_under(Range range) const;  // by address

  // The right to change the mappings of an active region: holds mapping_.
  class Remapping {
   public:
    explicit Remapping(Region& region) : region_(region), lock_(region.mapping_) {}
    ~Remapping();

   private:
    Region& region_;
    std::unique_lock<std::mutex> lock_;
  };

 private:
  friend class Evicting;
  template <typename Read>
  std::invoke_result_t<Read> locked(Read read) const {
    const std::lock_guard lock(device.mutex);
    return read();
  }
  std::size_t allowance(std::size_t live) const;  // the limit of mapped bytes without a segment
  void check_allocatable(std::size_t size) const;
  Address take_addresses(std::size_t size);
  std::vector<Chunk> take(const Needs& needs, Deadline deadline, WaitFor wait);
  // Takes the chunks of a demand for `wanted` bytes and gives them to `use`, again and again until it returns true.
  // False: the layout has changed since the demand. Throws OutOfMemoryError.
  template <typename NeedsOf, typename Use>
  void with_chunks(std::size_t wanted, Deadline shortage, Deadline memory, NeedsOf needs_of, Use use);
  // Makes the next attempt more likely to succeed than one that saw `seen`. `wait`: of this attempt, and then of the
  // next one. `needed`: bytes of chunks. Throws OutOfMemoryError for `wanted` bytes where nothing is left to try.
  void find_more(std::size_t wanted, std::size_t needed, Deadline shortage, Deadline memory, Deadline began,
                 std::uint64_t seen, WaitFor& wait);
  void end_stranded() {  // before new mappings: unmaps these chunks, or gives access to them, which may be missing
    if (!stranded_) return;
    sweep_with_lock();
    if (stranded_) allow(slots());
  }
  Layout layout_locked(Ranges wanted, Ranges segments, std::size_t live, std::size_t slack, bool snug) const;
  Layout layout_of_new_locked(Range segment, bool snug) const;
  Needs needs_of(Range segment, bool snug) const;
  // Maps a segment. False: its layout needs other chunks. `cleaned`: the mark of zeros under it, if there are any.
  bool map_new(Range segment, std::vector<Chunk> chunks, bool snug, Driver::Ticket& cleaned);
  Driver::Ticket clean_new(const std::vector<Slot>& slots);
  Ranges present_locked(Range range) const;                       // chunks that are mapped or offered
  std::size_t unmapped_within(Address begin, Address end) const;  // bytes without such a chunk
  void sweep_offered();                                           // returns offered chunks that no segment needs
  void sweep_with_lock();
  void add_dirty_locked(Range range) {
    // The chunks that a refusal left in a paused region are checked after its resume. Until then no sweep can end.
    if (state_ == State::paused || state_ == State::lost) return;
    if (dirty_.empty()) device.resting.sweep_begins();
    dirty_.push_back(range);
  }
  void end_locked(Address begin);  // of a segment, now or when the owner of the region has ended
  Ranges runs(const std::vector<Slot>& slots) const;

  std::atomic<State> state_ = State::active;
  std::atomic<std::uint64_t> residence_ = 1;
  std::atomic<bool> discarded_ = false;
  Deadline paused_at_{};  // guarded by Device::mutex
  std::size_t users_ = 0;
  std::deque<const void*> queue_;
  std::map<std::uint64_t, int> leases_;

  mutable std::mutex mapping_;
  std::shared_ptr<Backup> backup_;
  Ranges reserved_;  // addresses, from the driver. Ranges do not touch, so no segment and no run of chunks spans two
  FreeRanges addresses_;  // those of them without a segment
  Segments segments_;
  std::map<Address, Chunk> chunks_;       // mapped
  std::map<Address, Chunk> offered_;      // not mapped
  std::vector<Address> freed_meanwhile_;  // while a transition or an eviction owned the region
  Ranges dirty_;                          // ranges in which chunks may have become empty
  bool stale_ = false;                    // see mark_stale()
  std::atomic<bool> stranded_ = false;    // see strand()
  std::atomic<bool> closed_ = false;
  std::atomic<std::size_t> mapped_ = 0;
  std::atomic<std::size_t> offered_bytes_ = 0;
  std::atomic<bool> evicting_ = false;
  std::atomic<bool> copies_ahead_ = false;
  bool claimed_ = false;  // by its resume: no eviction can begin. Guarded by Core::mutex
  std::atomic<std::uint64_t> demand_ = 0;
};

// Chunks mapped by an operation that may still fail. Without commit() the destructor unmaps and returns them.
class Mapping {
 public:
  explicit Mapping(Region& region) : region_(&region) {}
  Mapping(Mapping&& other) noexcept : region_(other.region_), slots_(std::move(other.slots_)) { other.slots_.clear(); }
  ~Mapping() { undo(); }
  void undo() {
    std::vector<Chunk> freed;  // returned to their source at the end of the scope
    if (region_->unmap(std::exchange(slots_, {}), &freed)) region_->strand();
  }
  void add(Slot slot, Chunk chunk) {
    region_->map(slot, std::move(chunk));
    slots_.push_back(slot);
  }
  const std::vector<Slot>& slots() const { return slots_; }
  // Returns the bytes mapped.
  std::size_t commit() { return bytes_of(std::exchange(slots_, {})); }

 private:
  Region* region_;
  std::vector<Slot> slots_;
};

}  // namespace memsaver
