#include "backup/backup.h"

#include <utility>

namespace memsaver {
Backup::Backup(Ranges parts) : parts_(std::move(parts)), runs_(joined(parts_)), bytes_(bytes_of(parts_)) {}

void DirectLoader::copy(Address address, const void* host, std::size_t size) {
  driver_.copy_in(address, host, size);
  unmarked_ += size;
  if (unmarked_ >= kCopyBatch) mark();
}

void DirectLoader::mark() {
  marks_.emplace_back(driver_.mark(Direction::in), unmarked_);
  unmarked_ = 0;
}

std::size_t DirectLoader::arrived(bool waits) {
  if (waits && unmarked_ > 0) mark();
  if (waits && !marks_.empty()) driver_.wait(marks_.front().first);
  std::size_t bytes = 0;
  for (; !marks_.empty() && (waits ? bytes == 0 : driver_.done(marks_.front().first)); marks_.pop_front())
    bytes += marks_.front().second;
  return bytes;
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
