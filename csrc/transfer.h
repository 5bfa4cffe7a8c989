// One device's part of a transition: the pipeline that moves chunks and contents.
//
// Contents go out in batches of neighbouring chunks. As soon as one is saved its chunks are unmapped and handed on: to
// a region that comes in here, whose contents are then copied in while later batches still go out, or back to their
// source.
#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "backup.h"
#include "region.h"

namespace memsaver {

class Transfer {
 public:
  Transfer(Device& device, Progress& progress) : device_(device), progress_(progress) {}
  ~Transfer() { undo(); }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // `policy` of this pause; `live`: the contents that count. `half_out`: a refusal left it paused with some chunks.
  void add_leaving(Region& region, Policy policy, Ranges live, bool half_out);
  void add_coming(Region& region, bool restore);

  // Reserves host memory, files and chunks, waits for the device, and begins to copy out: nothing has changed when it
  // throws. `chunks`: whether those are reserved as well; else they come one after the other in run().
  void prepare(bool chunks, Deadline deadline);
  // The point of no return, with Core::mutex held: the regions that leave have their backups.
  void commit();
  // Unmaps what leaves, maps and fills what comes. Errors stay here: what leaves goes on when what comes has failed.
  void run(Deadline deadline) noexcept;
  const std::exception_ptr& refused() const { return refused_; }  // some of what leaves kept its chunks
  const std::exception_ptr& failed() const { return failed_; }    // what comes cannot come
  // Either what came in stays, with Core::mutex held, or it goes out again.
  void keep();
  void undo() noexcept;

  Device& device() const { return device_; }
  std::size_t released_bytes() const { return released_; }
  std::size_t restored_bytes() const { return restored_; }
  std::size_t copied_bytes() const { return copied_; }

 private:
  class Inventory;
  struct Leaving {
    Region* region;
    Policy policy;
    Ranges live;
    bool half_out;
    std::shared_ptr<Backup> backup = nullptr;     // null: the contents are given up
    std::vector<std::vector<Slot>> batches = {};  // neighbouring chunks
    std::unique_ptr<Saver> saver = nullptr;       // null: nothing to copy
    std::size_t saved_before = 0;
    bool copies() const { return backup != nullptr && !backup->complete(); }
  };
  struct Coming {
    Region* region;
    Ranges wanted;    // contents to bring
    bool fills;       // what has none is written over
    Mapping mapping;  // unmaps unless it is kept
    std::unique_ptr<Loader> loader = nullptr;
    std::vector<Slot> run = {};  // mapped, without access yet
    std::size_t to_come = 0;     // chunks
    bool had_chunks = false;     // from a pause that was refused some
  };
  struct Place {
    Coming* coming;
    Slot slot;
    Chunk chunk;  // empty: one of this size that leaves is promised to this place
  };

  void reserve_and_start(bool chunks, Deadline deadline);
  std::size_t missing_bytes() const;
  std::size_t leaving_bytes() const;
  void save_where(Leaving& leaving);
  void make_batches(Leaving& leaving);
  void reserve_chunks(Deadline deadline);
  Inventory inventory() const;
  Needs needs(bool snug) const;
  void lay_out_promised(ChunkRequest& request, bool snug);
  void map_as_they_come(ChunkRequest& request, bool snug);
  template <typename Attempt, typename GiveBack>
  void with_chunks(Deadline deadline, Attempt attempt, GiveBack give_back);
  void let_go(Leaving& leaving);
  void come_in_alone(Deadline deadline);
  void open(Coming& coming);
  void use_left_mapped(Coming& coming);
  void put(Coming& coming, Slot slot, Chunk chunk);
  void give_access(Coming& coming);
  void write_into(Coming& coming, Range range);
  void hand_on(Chunk chunk);
  void finish_coming();

  Device& device_;
  Progress& progress_;
  std::list<Leaving> leaving_;
  std::list<Coming> coming_;
  std::vector<Place> places_;
  std::map<std::size_t, std::deque<Place*>> waiting_;  // by chunk size
  std::exception_ptr refused_, failed_;
  std::vector<std::shared_ptr<Backup>> dropped_;  // let go of outside the lock
  bool under_way_ = false;                        // there may be copies, and what came in is not kept
  std::size_t released_ = 0, restored_ = 0, copied_ = 0;
};

}  // namespace memsaver
