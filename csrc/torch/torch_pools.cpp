#include "torch/torch_pools.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "base/mutants.h"
#include "regions/core.h"
#include "torch/default_pools.h"

namespace memsaver {
namespace {

// The places of CUDAAllocator::emptyCache(MempoolId_t), releasePool(DeviceIndex, MempoolId_t) and
// getPoolUseCount(DeviceIndex, MempoolId_t) in c10/cuda/CUDACachingAllocator.h of these releases.
// tools/torch_methods.py reads them from wheels.
struct Verified {
  int major, minor;
  std::size_t empty_cache, release_pool, use_count;
};
constexpr std::array<Verified, 6> kVerified = {{{2, 8, 13, 25, 26},
                                                {2, 9, 7, 26, 27},
                                                {2, 10, 7, 28, 29},
                                                {2, 11, 7, 28, 29},
                                                {2, 12, 7, 28, 29},
                                                {2, 13, 7, 30, 31}}};

constexpr auto kWanted = std::chrono::seconds(5);  // longer than between two rounds of a broker for one demand

constexpr TorchPoolId kDefaultPool{0, 0};

constexpr auto kAllocator = "_ZN3c104cuda20CUDACachingAllocator9allocatorE";  // std::atomic<CUDAAllocator*>

using EmptyCache = void (*)(void* self, TorchPoolId id);
using ReleasePool = void (*)(void* self, std::int8_t device, TorchPoolId id);
using UseCount = int (*)(void* self, std::int8_t device, TorchPoolId id);

std::int8_t index_of(const Device& device) {
  return static_cast<std::int8_t>(std::max(0, device.driver->ordinal()));  // on the host driver a test's own
}

}  // namespace

TorchPools& torch_pools() {
  static auto* only = new TorchPools;
  return *only;
}

std::string TorchPools::bind(const std::string& path, int major, int minor) {
  const std::scoped_lock locks(ending_, mutex_);
  if (std::exchange(is_bound_, true)) return reason_;
  const std::string version = std::to_string(major) + "." + std::to_string(minor);
  const auto verified = std::find_if(kVerified.begin(), kVerified.end(),
                                     [&](const Verified& each) { return each.major == major && each.minor == minor; });
  if (verified == kVerified.end()) return reason_ = "torch " + version + " was not verified";
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return reason_ = "torch's library " + path + " is not loaded";
  const void* symbol = ::dlsym(library, kAllocator);
  if (symbol == nullptr) return reason_ = path + " has no allocator of that name";
  allocator_ = static_cast<const std::atomic<void*>*>(symbol)->load();
  if (allocator_ == nullptr) return reason_ = "torch has no allocator yet";
  methods_ = {verified->empty_cache, verified->release_pool, verified->use_count};
  release_torch_caches = [](Device& device) { torch_pools().end_idle(device); };
  return reason_ = "";
}

std::string TorchPools::unusable() {
  std::lock_guard lock(mutex_);
  return reason_;
}

template <typename Function>
Function TorchPools::method(std::size_t place) const {
  void* const* table = nullptr;
  std::memcpy(&table, allocator_, sizeof table);
  return reinterpret_cast<Function>(table[place]);
}

// torch's count of the uses of a pool; nullopt: torch does not know the pool.
std::optional<int> TorchPools::uses(TorchPoolId id, const Device& device) const {
  try {
    return method<UseCount>(methods_.use_count)(allocator_, index_of(device), id);
  } catch (...) {
    return std::nullopt;
  }
}

void TorchPools::add(TorchPoolId id, Region& region, int expected) {
  const std::lock_guard ending(ending_);
  if (allocator_ == nullptr) return;
  const int counted = uses(id, region.device).value_or(-1);
  std::lock_guard lock(mutex_);
  if (counted == expected) {
    pools_[id] = {&region, Use::lent};
    return;
  }
  allocator_ = nullptr;
  reason_ =
      "torch's allocator counts " + std::to_string(counted) + " uses of a pool, expected " + std::to_string(expected);
}

bool TorchPools::lend(TorchPoolId id) {
  std::lock_guard lock(mutex_);
  const auto found = pools_.find(id);
  if (found == pools_.end()) return true;
  if (found->second.use == Use::ended && !MEMSAVER_MUTANT(pools_that_were_ended_are_lent)) {
    pools_.erase(found);
    return false;
  }
  found->second.use = Use::lent;
  return true;
}

void TorchPools::take_back(TorchPoolId id) {
  Device* wants = nullptr;
  {
    std::lock_guard lock(mutex_);
    const auto found = pools_.find(id);
    if (found == pools_.end()) return;
    found->second.use = Use::idle;
    const auto refused = refused_.extract(&found->second.region->device);
    if (!refused.empty() && now() < refused.mapped()) wants = refused.key();
  }
  if (wants != nullptr && !MEMSAVER_MUTANT(pools_wait_for_the_next_round)) wants->reclaimer.request(nullptr);
}

void TorchPools::forget(TorchPoolId id) {
  std::lock_guard lock(mutex_);
  pools_.erase(id);
}

void TorchPools::route_begins() {
  const std::lock_guard ending(ending_);
  ++routes_;
}

void TorchPools::route_ends() {
  const std::lock_guard ending(ending_);
  if (routes_ > 0) --routes_;
}

std::vector<TorchPoolId> TorchPools::idle_on(const Device& device) {
  std::vector<TorchPoolId> found;
  std::lock_guard lock(mutex_);
  for (const auto& [id, pool] : pools_)
    if (pool.use == Use::idle && &pool.region->device == &device && pool.region->state() == State::active)
      found.push_back(id);
  return found;
}

// As the destructor of torch's MemPool, whose Python object must not run it any more.
void TorchPools::end(TorchPoolId id, const Device& device) {
  if (uses(id, device) != 1) return;  // something else refers to it, and may allocate from it
  {
    std::lock_guard lock(mutex_);
    const auto found = pools_.find(id);
    if (found == pools_.end() || found->second.use != Use::idle) return;
    found->second.use = Use::ended;
  }
  ended_[id] = &device;
  method<ReleasePool>(methods_.release_pool)(allocator_, index_of(device), id);
}

void TorchPools::end_idle(Device& device) {
  const CaptureGate::Pass pass(device.parts.gate);
  if (!pass) return;
  const std::lock_guard ending(ending_);
  if (allocator_ == nullptr) return;
  if (routes_ > 0 && !MEMSAVER_MUTANT(pools_end_under_routes)) {
    std::lock_guard lock(mutex_);
    refused_[&device] = now() + kWanted;
    return;
  }
  device.driver->within([&] {
    for (const TorchPoolId& id : idle_on(device)) {
      try {
        end(id, device);
      } catch (...) {
        // Its uses were counted before, so torch knows the pool; a failed call has changed nothing.
      }
    }
    std::erase_if(ended_, [&](const auto& entry) { return entry.second == &device && !uses(entry.first, device); });
    std::vector<TorchPoolId> to_empty;
    for (const auto& [id, on] : ended_)
      if (on == &device) to_empty.push_back(id);
    const Region* default_pool = default_pools().of(device);
    if (default_pool != nullptr && default_pool->state() == State::active) to_empty.push_back(kDefaultPool);
    for (const TorchPoolId& id : to_empty) {
      try {
        method<EmptyCache>(methods_.empty_cache)(allocator_, id);
      } catch (...) {
        // A thread is routed to a pool that is not of this library: torch allows no end of a pool now. Tried again by
        // the next pass.
      }
    }
  });
}

}  // namespace memsaver
