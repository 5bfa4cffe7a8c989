#include "host_budget.h"

#include <algorithm>
#include <string>

#include "driver.h"
#include "host_memory.h"

namespace memsaver {
namespace {

constexpr std::size_t kReservePart = 20;  // a twentieth of the memory stays for others, but
constexpr std::size_t kLargestReserve = std::size_t{2} << 30;

constexpr std::size_t kSharers = 16;  // processes that may take memory at the same moment

std::size_t reserve_of(const HostMemory& memory) { return std::min(memory.total / kReservePart, kLargestReserve); }

std::string text(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

void HostBudget::set_limit(std::optional<std::size_t> bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void HostBudget::check(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
}

// What can be had beyond what is held.
std::size_t HostBudget::left_locked() const {
  if (limit_) return *limit_ - std::min(*limit_, held_);
  const HostMemory memory = host_memory();
  return memory.available - std::min(memory.available, reserve_of(memory));
}

void HostBudget::check_locked(std::size_t bytes) const {
  const std::size_t left = left_locked();
  if (bytes <= left) return;
  const std::string why = limit_ ? "host_limit is " + text(*limit_)
                                 : "the machine and its cgroups have " + text(left) + " to give beyond a reserve of " +
                                       text(reserve_of(host_memory()));
  throw BackupError("a backup needs " + text(bytes) + " more of pinned host memory; this process holds " + text(held_) +
                        " of it, and " + why,
                    bytes, held_, left);
}

std::size_t HostBudget::slab(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  bytes = std::min(bytes, kLargestSlab);
  if (limit_) return bytes;
  // Other processes may be making theirs at this moment: near the end each takes a small part of what it sees.
  return std::min(bytes, std::max(kPage, left_locked() / kSharers / kPage * kPage));
}

void HostBudget::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
  held_ += bytes;
}

void HostBudget::put(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  held_ -= bytes;
}

}  // namespace memsaver
