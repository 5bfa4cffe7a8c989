#include "regions/ledger_queries.h"

#include <utility>

namespace memsaver {

LedgerQueries& ledger_queries() {
  static auto* only = new LedgerQueries;
  return *only;
}

bool LedgerQueries::note(const std::string& device) {
  std::lock_guard lock(mutex_);
  if (!served_ || stopped_) return false;
  noted_.insert(device);
  changed_.notify_all();
  return true;
}

std::optional<std::string> LedgerQueries::next() {
  std::unique_lock lock(mutex_);
  served_ = true;
  changed_.wait(lock, [this] { return stopped_ || !noted_.empty(); });
  if (stopped_) return std::nullopt;
  return std::move(noted_.extract(noted_.begin()).value());
}

void LedgerQueries::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace memsaver
