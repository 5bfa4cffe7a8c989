// The bounded wait for the work of a device.
#pragma once

#include <atomic>
#include <chrono>

#include "driver/driver.h"
#include "memory/chunk.h"
#include "regions/capture_gate.h"

namespace memsaver {

// Set when the exit of the interpreter begins. Waits for a device then last at most kEnd more.
extern std::atomic<bool> exit_has_begun;
constexpr auto kEnd = std::chrono::seconds(4);

// The shortest bound of a wait, up to the first query of the device. So a wait with the bound 0 still succeeds on an
// idle device. Only a driver call that blocks takes longer.
constexpr auto kOneLook = std::chrono::milliseconds(250);

// Waits for all work that was submitted so far to the device and to peers with access to its memory. Throws
// WaitTimeoutError at the deadline, Error during a capture or when the interpreter exits, DriverError. `looks`: calls
// between_looks(), which may take the GIL.
void wait_idle(Driver& driver, CaptureGate& gate, Deadline deadline, bool looks);

}  // namespace memsaver
