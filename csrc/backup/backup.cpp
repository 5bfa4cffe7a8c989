#include "backup/backup.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace memsaver {
namespace {

constexpr auto kBetweenReports = std::chrono::milliseconds(20);

Ranges joined(const Ranges& parts) {
  Ranges runs;
  for (const Range& part : parts) {
    if (!runs.empty() && runs.back().end() == part.offset)
      runs.back().size += part.size;
    else
      runs.push_back(part);
  }
  return runs;
}

}  // namespace

Backup::Backup(Ranges parts) : parts_(std::move(parts)), runs_(joined(parts_)), bytes_(bytes_of(parts_)) {}

void Progress::expect(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  total_ += bytes;
}

void Progress::add(std::size_t bytes) {
  std::unique_lock lock(mutex_);
  // Bytes that are copied again, for example after a wait for memory, count once.
  done_ = std::min(done_ + bytes, total_);
  const auto now = Clock::now();
  if (!report_ || (now - last_ < kBetweenReports && done_ < total_)) return;
  last_ = now;
  lock.unlock();
  std::lock_guard one_at_a_time(reporting_);
  lock.lock();
  if (done_ == reported_) return;
  const std::size_t done = reported_ = done_, total = total_;
  lock.unlock();
  report_(done, total);
}

bool drain_copies(Driver& driver) noexcept {
  constexpr int kAttempts = 2;  // a refused call is tried once more; a dead context has no copies under way
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
