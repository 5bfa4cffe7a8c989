// Threads for calls that may never return. They are reused, because the first driver call in a new thread takes some
// 0.1 ms longer.
#pragma once

#include <functional>

namespace memsaver {

// Runs `task` in a thread and does not wait for it. `task` must not throw. Objects that it uses must live as long as
// the process, because a driver call in it may never return. Throws std::system_error.
void run_in_spare_thread(std::function<void()> task);

}  // namespace memsaver
