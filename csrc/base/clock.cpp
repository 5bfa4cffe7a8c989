#include "base/clock.h"

#include <thread>

namespace memsaver {

ClockCalls& clock_calls() {
  static ClockCalls only = {[] { return Clock::now(); },
                            [](Clock::duration duration) { std::this_thread::sleep_for(duration); },
                            [] { return false; }};
  return only;
}

Deadline deadline_in(double seconds) {
  const std::chrono::duration<double> left = kNever - now();
  if (seconds >= left.count() / 2) return kNever;
  return now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace memsaver
