// torch calls these functions with the mutex of its allocator held, from any thread, also during a capture; it frees
// even during exit. So they use no Python and let no exception out. They make virtual memory calls, wait for the broker
// of a shared pool, and make a bounded wait for freed memory. The entry point determines the region of an allocation; a
// free finds the region by its address. The only state of a thread is the error for its user.
#include "torch/torch_hooks.h"

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "driver/driver.h"
#include "regions/core.h"
#include "regions/eviction.h"

namespace memsaver {
namespace {

std::array<std::atomic<Region*>, kEntryPoints> bound_regions{};
std::mutex binding;

thread_local std::string allocation_error;
thread_local Deadline wait_failed = Deadline::min();  // the end of this thread's last wait that found no memory

constexpr auto kSecondTry = std::chrono::seconds(1);  // after the first one, at most

}  // namespace

thread_local bool TorchAllocation::is_under_way_ = false;

Address TorchAllocation::allocate(Region& region, std::size_t size) {
  const TorchAllocation under_way;
  const Deadline shortage = region.device.shortage_deadline();
  const Deadline memory = now() > wait_failed + kSecondTry ? region.device.memory_deadline() : Deadline::min();
  try {
    return region.allocate(size, shortage, memory);
  } catch (const OutOfMemoryError&) {
    if (memory != Deadline::min()) wait_failed = now();
    throw;
  }
}

namespace {

void* allocate_numbered(std::size_t number, ssize_t size) {
  Region* region = bound_regions[number].load();
  if (region == nullptr || size <= 0 || !usable()) return nullptr;
  // torch raises its own out-of-memory error.
  try {
    allocation_error.clear();
    return reinterpret_cast<void*>(TorchAllocation::allocate(*region, static_cast<std::size_t>(size)));
  } catch (const OutOfMemoryError&) {
    return nullptr;
  } catch (const RegionPausedError&) {
    return nullptr;  // the region's state tells
  } catch (const std::exception& error) {
    try {
      allocation_error =
          "an allocation of " + std::to_string(size) + " bytes in region '" + region->tag + "' failed: " + error.what();
    } catch (const std::exception&) {
      // No host memory for the text.
    }
    return nullptr;
  }
}

void free_any(void* data, ssize_t, int, void*) {
  if (data == nullptr || !usable()) return;
  try {
    const auto address = reinterpret_cast<Address>(data);
    if (Region* region = core().parts.addresses.at(address)) region->free(address);
  } catch (const std::exception&) {
    // The segment stays: torch's interface has no way to report an error.
  }
}

void* refuse(ssize_t, int, void*) { return nullptr; }
void pass_over(void*, ssize_t, int, void*) {}

// Torch has made a context there, so this opens the device quickly.
Device& gpu(int ordinal) { return core().device("cuda:" + std::to_string(ordinal)); }

// Allocates memory of the driver. In a shortage it takes resting, retained and offered chunks of the regions, as an
// allocation in a region does. It takes no chunks of a broker.
Address allocate_beside(Device& device, std::size_t size) {
  const TorchAllocation under_way;
  const Deadline until = device.shortage_deadline();
  for (;;) {
    const std::uint64_t seen = device.resting.given_back();
    try {
      return device.driver->allocate(size);
    } catch (const DriverError& error) {
      if (error.code != ChunkUnavailable::kCode || device.pooled) throw;
      const bool rested = device.resting.reclaim(until, seen);
      if (device.retained.give_up(static_cast<std::size_t>(-1)) > 0 || rested) continue;
      const Evicted evicted = evict_for(device, size);
      if (evicted == Evicted::none || (evicted == Evicted::busy && now() >= until)) throw;
      if (evicted == Evicted::busy) sleep_for(kNextWait);
    }
  }
}

void* allocate_plain(ssize_t size, int ordinal, void*) {
  try {
    return reinterpret_cast<void*>(allocate_beside(gpu(ordinal), static_cast<std::size_t>(size)));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void free_plain(void* data, ssize_t, int ordinal, void*) {
  if (data == nullptr || !usable()) return;
  try {
    gpu(ordinal).driver->free(reinterpret_cast<Address>(data));
  } catch (const std::exception&) {
    // The context is dead, and its memory with it.
  }
}

template <std::size_t number>
void* allocate_in(ssize_t size, int, void*) {
  return allocate_numbered(number, size);
}

template <std::size_t... numbers>
std::array<void* (*)(ssize_t, int, void*), sizeof...(numbers)> functions(std::index_sequence<numbers...>) {
  return {&allocate_in<numbers>...};
}

}  // namespace

EntryPoints bind_entry_points(Region& region) {
  static const auto entry_points = functions(std::make_index_sequence<kEntryPoints>());
  std::lock_guard lock(binding);
  for (std::size_t number = 0; number < kEntryPoints; ++number) {
    Region* owner = bound_regions[number].load();
    if (owner == nullptr) bound_regions[number] = &region;
    if (owner == nullptr || owner == &region)
      return {reinterpret_cast<std::uintptr_t>(entry_points[number]), reinterpret_cast<std::uintptr_t>(&free_any)};
  }
  throw ConfigError("region '" + region.tag + "' is one too many: torch can allocate in at most " +
                    std::to_string(kEntryPoints) + " regions of a process");
}

void unbind_entry_points(const Region& region) {
  std::lock_guard lock(binding);
  for (auto& owner : bound_regions)
    if (owner.load() == &region) owner = nullptr;
}

std::string take_allocation_error() { return std::exchange(allocation_error, {}); }

EntryPoints refusing_entry_points() {
  return {reinterpret_cast<std::uintptr_t>(&refuse), reinterpret_cast<std::uintptr_t>(&pass_over)};
}

EntryPoints plain_entry_points() {
  return {reinterpret_cast<std::uintptr_t>(&allocate_plain), reinterpret_cast<std::uintptr_t>(&free_plain)};
}

}  // namespace memsaver
