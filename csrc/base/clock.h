// The clock of all deadlines and polling waits. A test can make it virtual: time then passes only in sleep_for(), so a
// sequence of waits takes no time and is the same in every run.
#pragma once

#include <chrono>

namespace memsaver {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

constexpr Deadline kNever = Deadline::max();

Deadline now();
// Sleeps, or advances the virtual time.
void sleep_for(Clock::duration duration);
// `seconds` from now; kNever if that exceeds the range of the clock.
Deadline deadline_in(double seconds);

void use_virtual_clock(bool on);
bool clock_is_virtual();

}  // namespace memsaver
