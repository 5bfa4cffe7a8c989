#include "base/clock.h"

#include <atomic>
#include <thread>

namespace memsaver {
namespace {

std::atomic<bool> is_virtual = false;
std::atomic<Clock::rep> passed = 0;  // virtual time since use_virtual_clock(true)
std::atomic<Clock::rep> began = 0;

}  // namespace

Deadline now() {
  if (!is_virtual) return Clock::now();
  return Deadline(Clock::duration(began + passed));
}

void sleep_for(Clock::duration duration) {
  if (is_virtual)
    passed += duration.count();
  else
    std::this_thread::sleep_for(duration);
}

Deadline deadline_in(double seconds) {
  const std::chrono::duration<double> left = kNever - now();
  if (seconds >= left.count() / 2) return kNever;
  return now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void use_virtual_clock(bool on) {
  if (on && !is_virtual) {
    began = Clock::now().time_since_epoch().count();
    passed = 0;
  }
  is_virtual = on;
}

bool clock_is_virtual() { return is_virtual; }

}  // namespace memsaver
