// Pause, resume and switch: one mechanism. Reserve what can fail, commit, execute.
//
// 1. begin():  mark the regions, so that nobody else moves or uses them; wait for guarded launches to leave.
// 2. reserve:  host memory for what goes out, chunks for what comes in beyond the chunks that go out, and wait for the
//              device. A failure up to here, or in copying out, leaves everything as it was.
// 3. commit:   unmap what goes out. From here on the transition rolls forward.
// 4. come in:  map, allow, copy in. A failure here takes the regions that were to come in back to "paused", with their
//              backups whole.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "region.h"

namespace memsaver {

class Transition {
 public:
  struct Pause {
    Region* region;
    Policy policy;            // for this pause
    std::vector<Range> live;  // the contents that count
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

  // Waits for other transitions on these regions. Regions that are already where they should be drop out.
  void begin();
  void abort();  // gives the marks back if run() was not reached; else nothing
  const std::vector<Region*>& pausing() const { return pausing_; }
  const std::vector<Region*>& resuming() const { return resuming_; }

  // `pauses` speaks of every region in pausing(). Waits for memory up to the deadline.
  Outcome run(const std::vector<Pause>& pauses, bool restore, Deadline deadline);

 private:
  struct Incoming;
  class Inventory;

  void reserve_chunks(Device& device, std::vector<Incoming>& incoming, Deadline deadline);
  void come_in(std::vector<Incoming>& incoming, std::map<std::size_t, std::vector<Chunk>>& handed, bool restore,
               Outcome& outcome);
  void finish();  // leaves the marked states and settles frees that came meanwhile
  std::vector<Device*> devices() const;

  std::vector<Region*> wanted_out_, wanted_in_;
  std::vector<Region*> pausing_, resuming_;  // marked
  std::vector<Region*> was_paused_;          // among pausing_: to give back what a refused unmap left
  std::vector<Region*> gone_out_, come_in_;  // reached their new state
  bool marked_ = false;
  Clock::time_point began_;
};

}  // namespace memsaver
