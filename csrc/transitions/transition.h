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
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "regions/core.h"
#include "transitions/transfer.h"

namespace memsaver {

class Transition {
 public:
  using Regions = std::vector<Region*>;
  struct Outcome : Transfer::Moved {
    double seconds = 0;  // from begin()
  };

  // `lazy`: of the regions to pause, those that offer their chunks. `ahead`: of these, those whose contents are copied
  // ahead of a demand.
  Transition(Regions pause, Regions resume, Bounds bounds, Regions lazy = {}, Regions ahead = {});
  ~Transition() { abort(); }

  // Waits for earlier transitions on these regions, for processes that are attached to outgoing regions, and for
  // guarded launches. Regions that already have the wanted state are left out.
  void begin();
  const Regions& pausing() const { return pausing_; }
  const Regions& resuming() const { return resuming_; }
  const Regions& continued() const { return continued_; }  // of pausing(): earlier pauses failed in part
  const Regions& discarded() const { return discarded_; }  // whose contents run() discarded

  // `pauses` has an entry for every region in pausing(). `restore` has one for every region in resuming(): whether its
  // contents are restored. Waits for the device and for memory. Nothing has changed when it returns or throws.
  void prepare(std::vector<Pause> pauses, const std::vector<bool>& restore);
  // Commits and executes. If it returns, all regions are in their new states. `arrived` is called if all regions that
  // resume have their contents, before they are active: nothing else uses them yet. If it throws, they are paused
  // again, with their backups, and nothing may work on them.
  Outcome run(const std::function<void()>& arrived = {});
  // The stages so far. The waits are "queue", "readers", "launches", "device", "memory" and "backup". In "move" chunks
  // and contents move. Any thread may call these.
  std::vector<Stages::Begun> stages() const { return stages_.begun(); }
  std::vector<Stages::Event> events() const { return stages_.events(); }
  std::pair<std::size_t, std::size_t> progress() const { return {stages_.bytes_copied, stages_.bytes_planned}; }
  void abort();  // leaves the queues, and undoes all steps that run() has not committed

 private:
  // False: the deadline has passed.
  template <typename Ready>
  bool wait(std::unique_lock<std::mutex>& lock, Deadline deadline, Ready ready) const;
  void wait_for_attached(std::unique_lock<std::mutex>& lock);
  [[noreturn]] void throw_late(const char* stage, const std::string& why) const {
    const std::chrono::duration<double> waited = now() - began_;
    throw WaitTimeoutError("the call's timeout has passed while " + why, stage, waited.count());
  }
  void mark();
  void finish();  // settles the marked regions, leaves the queues, and handles frees that were made meanwhile

  const Bounds bounds_;
  Stages stages_;  // transfers_ refer to it
  const Deadline began_ = now();
  Deadline begun_at_;  // begin()
  Regions wanted_out_, wanted_in_;
  const Regions lazy_, ahead_;
  Regions pausing_, resuming_;  // marked
  Regions continued_;           // of pausing_, those that were paused with chunks left from a refusal
  Regions discarded_;
  Outcome outcome_;  // of begin(): offered chunks of earlier, lazy pauses
  bool committed_ = false, arrived_ = false, finished_ = false;
  std::vector<Pause> pauses_;                         // prepared
  std::vector<std::unique_ptr<Transfer>> transfers_;  // prepared, one for each device
};

}  // namespace memsaver
