// The process-wide core: options, devices, regions, captures.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "regions/region.h"

namespace memsaver {

// Made at first use. Never destroyed, since torch may free segments during exit.
class Core {
 public:
  std::mutex mutex;                 // see region.h; held for bookkeeping alone
  std::condition_variable changed;  // notified when states, queues, users or leases change
  std::mutex viewing;               // one reader of backups at a time; taken before `mutex`, and held during the read
  ProcessParts parts;
  std::size_t host_device_bytes = 0;  // 0: half of the machine's memory
  std::size_t host_bytes() const;     // host_device_bytes, or its default
  std::string disk_dir;               // empty: not set
  std::map<std::string, std::unique_ptr<Device>> devices;

  // All of these are called without the lock.
  std::string disk_directory();             // throws ConfigError if it is not set
  Device& device(const std::string& name);  // opens it at first use
  std::vector<Device*> all_devices() {
    std::vector<Device*> found;
    std::lock_guard lock(mutex);
    for (const auto& [name, device] : devices) found.push_back(device.get());
    return found;
  }
  // The region of this tag and device. The options apply if it is new.
  Region& region(const std::string& tag, const std::string& device_name, const RegionOptions& options);
  Region* find(const std::string& tag, const Device& device) {
    std::lock_guard lock(mutex);
    const auto found = by_key_.find({tag, &device});
    return found != by_key_.end() ? found->second : nullptr;
  }
  std::vector<Region*> regions_of(const Device& device) {
    std::vector<Region*> found = all_regions();
    std::erase_if(found, [&](const Region* region) { return &region->device != &device; });
    return found;
  }
  std::vector<Region*> all_regions() {
    std::vector<Region*> found;
    std::lock_guard lock(mutex);
    for (const auto& region : regions_) found.push_back(region.get());
    return found;
  }
  std::size_t region_count() {
    std::lock_guard lock(mutex);
    return regions_.size();
  }
  void close(Region& region);    // see Region::close()
  void mark_lost(Device& dead);  // its context is dead: its regions become lost

  // Gives the devices with an active context access to each other's memory. Cheap if the process sees one GPU.
  void refresh_peers();

 private:
  void give_access(Device& device);  // gives access to the new peers. Throws DriverError

  std::map<std::pair<std::string, const Device*>, Region*> by_key_;
  std::vector<std::unique_ptr<Region>> regions_;  // in the order in which they were made
  std::vector<std::unique_ptr<Region>> closed_;   // kept: Python objects may refer to them
  std::mutex opening_;                            // one device at a time
  std::mutex refreshing_;
};

// Throws Error in a child that was forked from a process that uses memsaver: driver state does not survive a fork.
Core& core();
bool usable();  // false in such a child; for callbacks that must not throw

}  // namespace memsaver
