#include "driver.h"

namespace memsaver {

Faults& faults() {
  static auto* only = new Faults;  // outlives every driver
  return *only;
}

void Faults::arm(std::uint64_t nth, const std::string& kind) {
  if (nth == 0) throw BadArgument("nth is 0, expected 1 or more");
  if (kind != "error" && kind != "memory") throw BadArgument("kind is '" + kind + "', expected 'error' or 'memory'");
  std::lock_guard lock(mutex_);
  calls_ = 0;
  fail_at_ = nth;
  memory_ = kind == "memory";
}

void Faults::disarm() {
  std::lock_guard lock(mutex_);
  calls_ = 0;
  fail_at_ = 0;
}

void Faults::check(const char* call) {
  std::lock_guard lock(mutex_);
  if (++calls_ != fail_at_) return;
  fail_at_ = 0;
  if (memory_ && std::string(call) == "create") throw ChunkUnavailable(call, "injected: out of memory");
  throw DriverError(call, 999, "injected");
}

}  // namespace memsaver
