#include "regions/core.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "host/calls.h"
#include "regions/eviction.h"

namespace memsaver {
namespace {

std::atomic<bool> used{false};    // this process has opened a driver
std::atomic<bool> forked{false};  // this process is a forked child of such a process

std::size_t half_of_memory() {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  return pages * page / 2 / kPage * kPage;
}

std::unique_ptr<Driver> open_driver(const std::string& name, std::size_t host_bytes) {
  if (name == "cpu") return std::make_unique<Driver>(host::platform(), host::open(host_bytes), name);
  constexpr std::string_view kCuda = "cuda:";
  if (name.starts_with(kCuda)) return open_cuda_driver(std::stoi(name.substr(kCuda.size())));
  throw BadArgument("device is '" + name + "', expected 'cpu' or 'cuda:N'");
}

}  // namespace

Core& core() {
  static auto* only = [] {
    ::pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });
    return new Core;
  }();
  if (forked)
    throw Error(
        "memsaver was in use before this process was forked, and a driver does not survive a fork: start the "
        "process with the 'spawn' method instead");
  return *only;
}

bool usable() { return !forked; }

std::size_t Core::host_bytes() const { return host_device_bytes != 0 ? host_device_bytes : half_of_memory(); }

std::string Core::disk_directory() {
  std::lock_guard lock(mutex);
  if (disk_dir.empty())
    throw ConfigError("backup='disk' needs a directory: set it by configure(disk_dir=...) or MEMSAVER_DISK_DIR",
                      "disk_dir");
  return disk_dir;
}

// Opens the device without `mutex`: making a CUDA context takes long.
Device& Core::device(const std::string& name) {
  {
    std::lock_guard lock(mutex);
    if (const auto found = devices.find(name); found != devices.end()) return *found->second;
  }
  const std::lock_guard one_at_a_time(opening_);
  std::size_t host = 0;
  {
    std::lock_guard lock(mutex);
    if (const auto found = devices.find(name); found != devices.end()) return *found->second;
    host = host_bytes();
  }
  used = true;
  auto opened = std::make_unique<Device>(open_driver(name, host), parts);
  std::lock_guard lock(mutex);
  return *devices.emplace(name, std::move(opened)).first->second;
}

Region& Core::region(const std::string& tag, const std::string& device_name, const RegionOptions& options) {
  Device& on = device(device_name);
  if (Region* known = find(tag, on)) return *known;
  if (options.policy == Policy::disk) disk_directory();
  if (options.one_handle && on.pooled)
    throw ConfigError("region '" + tag +
                          "' is to have one handle for each segment, which needs memory of the driver: " +
                          "pool is 'shared', expected 'process'",
                      "pool");
  Region* made = nullptr;
  {
    std::lock_guard lock(mutex);
    auto [entry, is_new] = by_key_.try_emplace({tag, &on}, nullptr);
    if (!is_new) return *entry->second;
    regions_.push_back(std::make_unique<Region>(tag, on, options));
    made = entry->second = regions_.back().get();
  }
  refresh_peers();
  return *made;
}

void Core::close(Region& region) {
  std::unique_lock lock(mutex);
  const NoCopiesAhead still(region, lock);
  lock.unlock();
  region.sweep_all();
  Ranges reserved;
  {
    const Region::Remapping remapping(region);
    std::lock_guard bookkeeping(mutex);
    reserved = region.close();
    by_key_.erase({region.tag, &region.device});
    const auto found =
        std::find_if(regions_.begin(), regions_.end(), [&](const auto& each) { return each.get() == &region; });
    closed_.push_back(std::move(*found));
    regions_.erase(found);
  }
  region.replace_backup(nullptr);
  for (const Range& range : reserved) {
    parts.addresses.remove(range);
    try {
      region.device.driver->unreserve(range.offset, range.size + kGuard);
    } catch (const DriverError&) {
      // The addresses stay reserved; a process has enough of them.
    }
  }
}

void Core::mark_lost(Device& dead) {
  std::lock_guard lock(mutex);
  dead.lost = true;
  for (const auto& region : regions_)
    if (&region->device == &dead && region->is_at_rest())
      region->write_state(State::lost);  // others: at the end of their transition
  changed.notify_all();
}

void Core::refresh_peers() {
  std::vector<Device*> gpus = all_devices();
  std::erase_if(gpus, [](const Device* device) { return device->driver->ordinal() < 0 || device->lost; });
  if (gpus.empty()) return;
  static const bool has_several = cuda_device_count() > 1;
  if (!has_several) return;
  for (Device* device : gpus) {
    try {
      give_access(*device);
    } catch (const DriverError& error) {
      // The next call tries again for regions without the new access; this call continues.
      if (error.context_lost) mark_lost(*device);
    }
  }
}

void Core::give_access(Device& device) {
  const std::lock_guard one_at_a_time(refreshing_);
  std::vector<int> wanted = device.driver->peer_candidates();
  bool is_new = false;
  {
    std::lock_guard lock(mutex);
    is_new = wanted != device.peers;
    if (!is_new && !device.has_stale) return;
  }
  const std::vector<Region*> regions = regions_of(device);
  if (is_new) {
    device.driver->use_peers(wanted);
    {
      std::lock_guard lock(mutex);
      device.peers = std::move(wanted);
    }
    for (Region* region : regions) region->mark_stale();
  }
  device.has_stale = false;
  for (Region* region : regions) region->allow_again();
}

}  // namespace memsaver
