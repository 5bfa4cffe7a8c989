#include "backup/backup.h"

#include <utility>

namespace memsaver {
Backup::Backup(Ranges parts) : parts_(std::move(parts)), runs_(joined(parts_)), bytes_(bytes_of(parts_)) {}

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
