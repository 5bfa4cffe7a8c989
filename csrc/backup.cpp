#include "backup.h"

#include <algorithm>
#include <chrono>

namespace memsaver {
namespace {

constexpr auto kBetweenReports = std::chrono::milliseconds(20);

}  // namespace

void Progress::expect(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  total_ += bytes;
}

void Progress::add(std::size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    done_ = std::min(done_ + bytes, total_);  // what is copied twice, as after waiting for memory, counts once
    const auto now = Clock::now();
    if (!report_ || (now - last_ < kBetweenReports && done_ < total_)) return;
    last_ = now;
  }
  std::lock_guard one_at_a_time(reporting_);
  std::size_t done = 0, total = 0;
  {
    std::lock_guard lock(mutex_);
    if (done_ == reported_) return;
    reported_ = done = done_;
    total = total_;
  }
  report_(done, total);
}

bool drain_copies(Driver& driver) noexcept {
  constexpr int kAttempts = 2;  // a refused call is worth one more; a dead context has no copies left to wait for
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    try {
      driver.finish_copies();
      return true;
    } catch (const DriverError& error) {
      if (error.context_lost) return false;
    } catch (const std::exception&) {
    }
  }
  return true;
}

}  // namespace memsaver
