#include "regions/residents.h"

#include "regions/queries.h"

namespace memsaver {
std::vector<Residents::Row> DeviceResidents::rows() {
  std::vector<Row> found;
  for (const Region* region : core().regions_of(device_)) {
    const std::shared_ptr<Backup> backup = region->backup();
    found.push_back({region->tag, region->allocated_bytes(), region->mapped_bytes(), backup ? backup->bytes() : 0,
                     static_cast<std::uint64_t>(region->state()), static_cast<std::uint64_t>(region->policy)});
  }
  return found;
}

void DeviceResidents::reclaim() {
  device_.reclaimer.request(
      [this](const Reclaimer::Rest& rest) { device_.shared->send_reclaimed(rest.more, rest.unused, rest.why); });
}

void DeviceResidents::waits_long() { cache_queries().note(kWaitMark + device_.driver->name); }

bool DeviceResidents::queried() { return ledger_queries().note(device_.driver->name); }

SharedPool& shared_pool(Device& device) {
  if (device.shared == nullptr) {
    static std::vector<std::unique_ptr<DeviceResidents>>& kept = *new std::vector<std::unique_ptr<DeviceResidents>>;
    kept.push_back(std::make_unique<DeviceResidents>(device));
    device.shared = std::make_unique<SharedPool>(*device.driver, *kept.back());
  }
  return *device.shared;
}

}  // namespace memsaver
