#include "pool/queries.h"

namespace memsaver {

Queries& queries() {
  static auto* only = new Queries;
  return *only;
}

bool Queries::note(const std::string& kind, const std::string& device) {
  std::lock_guard lock(mutex_);
  if (!served_ || stopped_) return false;
  noted_.emplace(kind, device);
  changed_.notify_all();
  return true;
}

std::optional<std::pair<std::string, std::string>> Queries::next() {
  std::unique_lock lock(mutex_);
  served_ = true;
  changed_.wait(lock, [this] { return stopped_ || !noted_.empty(); });
  if (stopped_) return std::nullopt;
  return std::move(noted_.extract(noted_.begin()).value());
}

void Queries::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace memsaver
