// Pause, resume and switch: one mechanism. Reserve what can fail, commit, execute.
//
// 1. The transition stands in the queue of each of its regions from the moment it is made; at the head of all,
//    begin() marks them, so that nobody else moves or uses them, and waits for guarded launches to leave.
// 2. prepare() reserves: host memory and files for what goes out, chunks for what comes in beyond those that go out. It
//    waits for the devices, and begins to copy out. A failure up to here leaves everything as it was.
// 3. It commits: from here on what goes out is paused.
// 4. It executes: chunks go out, and in, as their contents move (transfer.h). A failure takes the regions that were to
//    come in back to "paused", with their backups whole.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "region.h"
#include "transfer.h"

namespace memsaver {

class Transition {
 public:
  struct Pause {
    Region* region;
    Policy policy;  // for this pause
    Ranges live;    // the contents that count
  };
  struct Outcome {
    std::vector<Region*> paused;
    std::vector<Region*> resumed;
    std::size_t released_bytes = 0;
    std::size_t restored_bytes = 0;
    std::size_t copied_bytes = 0;
    double seconds = 0;  // from begin()
  };

  Transition(std::vector<Region*> pause, std::vector<Region*> resume);
  ~Transition() { abort(); }
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  // Waits for the transitions on these regions that were made before, and up to the deadline for other processes that
  // are attached to what goes out. Regions that are already where they should be drop out.
  void begin(Deadline attached);
  const std::vector<Region*>& pausing() const { return pausing_; }
  const std::vector<Region*>& resuming() const { return resuming_; }
  const std::vector<Region*>& discarded() const { return discarded_; }  // whose contents run() gave up

  // `pauses` speaks of every region in pausing(). Waits for memory up to the deadline. Nothing has changed when it
  // returns, or throws.
  void prepare(const std::vector<Pause>& pauses, bool restore, Deadline deadline, Progress::Report report);
  Outcome run(Deadline deadline);  // commits what was prepared
  void abort();                    // leaves the queues, and takes everything back that run() has not committed

 private:
  using Transfers = std::vector<std::unique_ptr<Transfer>>;
  template <typename Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, Ready ready) const;
  void wait_for_attached(std::unique_lock<std::mutex>& lock, Deadline deadline) const;
  Transfers make_transfers(const std::vector<Pause>& pauses, bool restore) const;
  void finish();  // leaves the marked states and the queues, and settles frees that came meanwhile
  void leave_queues_locked();

  std::vector<Region*> wanted_out_, wanted_in_;
  std::vector<Region*> pausing_, resuming_;  // marked
  std::vector<Region*> was_paused_;          // among pausing_: to give back what a refusal left mapped
  std::vector<Region*> gone_out_, come_in_;  // reached their new state
  std::vector<Region*> discarded_;
  std::unique_ptr<Progress> progress_;
  Transfers transfers_;           // prepared
  std::vector<Region*> without_;  // whose contents run() will give up
  Clock::time_point began_;
};

}  // namespace memsaver
