#include "base/faults.h"

#include <array>

#include "base/errors.h"

namespace memsaver {
namespace {

constexpr std::array kKinds = {"error", "memory", "after", "lost"};
constexpr int kUnknownCode = 999;
constexpr int kLostCode = 700;  // CUDA's after an illegal access

}  // namespace

Faults& faults() {
  static auto* only = new Faults;  // outlives every driver
  return *only;
}

void Faults::arm(std::uint64_t nth, const std::string& kind, const std::string& only) {
  if (nth == 0) throw BadArgument("nth is 0, expected 1 or more");
  std::size_t number = 0;
  while (number < kKinds.size() && kind != kKinds.at(number)) ++number;
  if (number == kKinds.size())
    throw BadArgument("kind is '" + kind + "', expected 'error', 'memory', 'after' or 'lost'");
  std::lock_guard lock(mutex_);
  calls_ = 0;
  fail_at_ = nth;
  kind_ = static_cast<Kind>(number);
  only_ = only;
}

void Faults::disarm() {
  std::lock_guard lock(mutex_);
  calls_ = 0;
  fail_at_ = 0;
  only_.clear();
}

bool Faults::begin(const char* call) {
  std::lock_guard lock(mutex_);
  if (!only_.empty() && only_ != call) return false;
  if (++calls_ != fail_at_) return false;
  fail_at_ = 0;
  if (kind_ == Kind::after) return true;
  if (kind_ == Kind::lost) throw DriverError(call, kLostCode, "injected: the context is lost", true);
  if (kind_ == Kind::memory && std::string(call) == "create") throw ChunkUnavailable(call, "injected: out of memory");
  throw DriverError(call, kUnknownCode, "injected");
}

void Faults::fail_after(const char* call) { throw DriverError(call, kUnknownCode, "injected after the call was made"); }

void Faults::check(const char* call) {
  if (begin(call)) throw DriverError(call, kUnknownCode, "injected");
}

}  // namespace memsaver
