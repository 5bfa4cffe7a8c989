// The clock of all deadlines and polling waits.
#pragma once

#include <chrono>

namespace memsaver {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

inline constexpr Deadline kNever = Deadline::max();

// Tests replace the functions by those of a virtual clock: time then passes only in sleep_for(), so a sequence of waits
// takes no time and is the same in every run.
struct ClockCalls {
  Deadline (*now)();
  void (*sleep_for)(Clock::duration);
  bool (*is_virtual)();
};
ClockCalls& clock_calls();

inline Deadline now() { return clock_calls().now(); }
inline void sleep_for(Clock::duration duration) { clock_calls().sleep_for(duration); }
inline bool clock_is_virtual() { return clock_calls().is_virtual(); }
// `seconds` from now; kNever if that exceeds the range of the clock.
Deadline deadline_in(double seconds);

}  // namespace memsaver
