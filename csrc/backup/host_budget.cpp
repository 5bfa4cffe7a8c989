#include "backup/host_budget.h"

#include <algorithm>
#include <string>

#include "driver/driver.h"

namespace memsaver {
namespace {

constexpr std::size_t kSharers = 16;  // processes that may take memory at the same time

std::string text(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

void HostBudget::set_limit(std::optional<std::size_t> bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void HostBudget::use_nodes_with_cpus() {
  std::lock_guard lock(mutex_);
  nodes_ = HostNodes::with_cpus;
}

void HostBudget::check(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  check_locked(bytes);
}

// The bytes that can be taken beyond held_.
std::size_t HostBudget::left_locked() const {
  if (limit_) return *limit_ - std::min(*limit_, held_);
  return host_memory(nodes_).left;
}

void HostBudget::check_locked(std::size_t bytes) const {
  const std::size_t left = left_locked();
  if (bytes <= left) return;
  const std::string why = limit_ ? "host_limit is " + text(*limit_)
                                 : text(left) +
                                       " can be taken until nine tenths of the machine, or of the limit of "
                                       "one of its cgroups, are in use";
  throw BackupError("a backup needs " + text(bytes) + " more of pinned host memory; this process holds " + text(held_) +
                        ", and " + why,
                    bytes, held_, left, true);
}

std::size_t HostBudget::slab(std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  bytes = std::min(bytes, kLargestSlab);
  if (limit_) return bytes;
  // Other processes may take memory at the same time: near the limit each takes a small part of the rest.
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
