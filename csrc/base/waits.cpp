#include "base/waits.h"

#include <thread>

#include "base/errors.h"

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

std::atomic<bool> interpreter_exits = false;
std::atomic<Deadline> background_ends = kNever;
thread_local bool is_background = false;

bool waiting_is_over() { return interpreter_exits || (is_background && now() >= background_ends.load()); }

std::function<void()> between_looks = [] {};

thread_local const std::atomic<bool>* WaitsEndWith::flag_ = nullptr;

void WaitsEndWith::look() {
  if (flag_ != nullptr && *flag_) throw Error("the call has failed for another device");
  between_looks();
}

}  // namespace memsaver
