// Pause, resume and switch: one mechanism. Reserve all resources, commit, execute.
//
// 1. A transition is in the queue of each of its regions from its construction on. begin() waits until it is the first
//    in all queues, marks the regions, so that no other thread moves or uses them, and waits for guarded launches.
// 2. prepare() reserves host memory and files for outgoing contents, and the chunks for incoming regions that outgoing
//    ones do not provide. It waits for the devices and begins to copy out. If it fails, nothing has changed.
// 3. run() commits: from here on outgoing regions are paused.
// 4. run() executes: chunks and contents move (transfer.h). After a failure the incoming regions are "paused" again,
//    with their backups whole.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "regions/core.h"
#include "transitions/transfer.h"

namespace memsaver {

class Transition {
 public:
  struct Pause {
    Region* region;
    Policy policy;  // for this pause
    Ranges live;    // the contents to keep
  };
  struct Outcome {
    std::vector<Region*> paused;
    std::vector<Region*> resumed;
    std::size_t released_bytes = 0;
    std::size_t restored_bytes = 0;
    std::size_t copied_bytes = 0;
    double seconds = 0;  // from begin()
  };

  // The bounds of a call's waits. The earliest one ends a wait.
  struct Bounds {
    Deadline whole = kNever;  // up to the commit
    double memory_s = 0;      // seconds, for memory that others hold
    double readers_s = 0;     // seconds, for other processes that are attached
  };

  Transition(std::vector<Region*> pause, std::vector<Region*> resume, Bounds bounds);
  ~Transition() { abort(); }

  // Waits for earlier transitions on these regions, for processes that are attached to outgoing regions, and for
  // guarded launches. Regions that already have the wanted state are left out.
  void begin();
  const std::vector<Region*>& pausing() const { return pausing_; }
  const std::vector<Region*>& resuming() const { return resuming_; }
  const std::vector<Region*>& was_paused() const { return was_paused_; }  // of pausing(): earlier pauses failed in part
  const std::vector<Region*>& discarded() const { return discarded_; }    // whose contents run() discarded

  // `pauses` has an entry for every region in pausing(). `restore` has one for every region in resuming(): whether its
  // contents are restored. Waits for the device and for memory. Nothing has changed when it returns or throws.
  void prepare(std::vector<Pause> pauses, const std::vector<bool>& restore, Progress::Report report);
  // Commits and executes. `arrived` is called if all regions that resume have their contents, before they are active:
  // nothing else uses them yet. It must not throw.
  Outcome run(const std::function<void()>& arrived = {});
  // The stages so far. The waits are "queue", "readers", "launches", "device", "memory" and "backup". In "move" chunks
  // and contents move. Any thread may call this.
  std::vector<Stages::Begun> stages() const { return stages_.begun(); }
  void abort();  // leaves the queues, and undoes all steps that run() has not committed

 private:
  using Transfers = std::vector<std::unique_ptr<Transfer>>;
  // False: the deadline has passed.
  template <typename Ready>
  bool wait_until(std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready) const;
  void wait_for_attached(std::unique_lock<std::mutex>& lock) const;
  [[noreturn]] void throw_late(const char* stage, const std::string& why) const;
  Deadline memory_deadline() const;
  void mark(const std::vector<Region*>& wanted, bool out);
  Transfers make_transfers(const std::vector<bool>& restore);
  void finish();  // ends the marked states, leaves the queues, and handles frees that were made meanwhile
  void leave_queues_locked();

  const Bounds bounds_;
  Stages stages_;  // transfers_ refer to it
  const Deadline began_ = now();
  Deadline begun_at_;  // begin()
  std::vector<Region*> wanted_out_, wanted_in_;
  std::vector<Region*> pausing_, resuming_;  // marked
  std::vector<Region*> was_paused_;          // of pausing_, regions that were paused with chunks left from a refusal
  std::vector<Region*> gone_out_, come_in_;  // reached their new state
  std::vector<Region*> discarded_;
  std::unique_ptr<Progress> progress_;
  std::vector<Pause> pauses_;     // prepared
  Transfers transfers_;           // prepared
  std::vector<Region*> without_;  // whose contents run() will discard
};

}  // namespace memsaver
