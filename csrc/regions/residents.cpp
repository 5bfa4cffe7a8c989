#include "regions/residents.h"

#include <unistd.h>

#include <cstdlib>

#include "regions/lending.h"
#include "regions/queries.h"

namespace memsaver {
namespace {

struct Key {
  std::string tag;
  Policy policy = Policy::none;
  Ranges ranges;
};

// "tag\npolicy\noffset\nsize[\noffset\nsize]..."
Key parsed(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (lines.size() < 4 || lines.size() % 2 != 0)
    throw Error("the request of an attachment has " + std::to_string(lines.size()) +
                " lines, expected 4 or more: tag, policy, and an offset and a size for each range");
  Key key{lines[0], policy_of(lines[1]), {}};
  for (std::size_t at = 2; at < lines.size(); at += 2)
    key.ranges.push_back(
        {std::strtoull(lines[at].c_str(), nullptr, 10), std::strtoull(lines[at + 1].c_str(), nullptr, 10)});
  return key;
}

}  // namespace

std::vector<Residents::Row> DeviceResidents::rows() {
  std::vector<Row> found;
  for (const Region* region : core().regions_of(device_)) {
    const std::shared_ptr<Backup> backup = region->backup();
    found.push_back({region->tag, region->allocated_bytes(), region->mapped_bytes(), backup ? backup->bytes() : 0,
                     static_cast<std::uint64_t>(region->state()), static_cast<std::uint64_t>(region->policy)});
  }
  return found;
}

std::vector<Placed> DeviceResidents::attach(const std::string& text, std::uint64_t residence, std::uint64_t attachment,
                                            int pid) {
  const Key key = parsed(text);
  Region* region = core().find(key.tag, device_);
  if (region == nullptr || region->policy != key.policy)
    throw Error("region '" + key.tag + "' of process " + std::to_string(::getpid()) +
                " does not exist, expected the region that was shared");
  return lend_chunks(*region, key.ranges, residence, attachment, pid);
}

void DeviceResidents::detach(std::uint64_t attachment) {
  const auto regions = core().regions_of(device_);
  std::lock_guard lock(core().mutex);
  for (Region* region : regions) region->returned(attachment);
  core().changed.notify_all();
}

void DeviceResidents::reclaim() {
  device_.reclaimer.request(
      [this](const Reclaimer::Rest& rest) { device_.shared->send_reclaimed(rest.more, rest.unused, rest.why); });
}

void DeviceResidents::waits_long() { cache_queries().note(kWaitMark + device_.driver->name); }

bool DeviceResidents::queried() { return ledger_queries().note(device_.driver->name); }

std::vector<Residents::Attached> DeviceResidents::attachments() {
  std::vector<Attached> found;
  const auto regions = core().regions_of(device_);
  std::lock_guard lock(core().mutex);
  for (const Region* region : regions)
    for (const auto& [number, lease] : region->leases()) found.push_back({number, lease.pid, lease.chunks});
  return found;
}

SharedPool& shared_pool(Device& device) {
  if (device.shared == nullptr) {
    static std::vector<std::unique_ptr<DeviceResidents>>& kept = *new std::vector<std::unique_ptr<DeviceResidents>>;
    kept.push_back(std::make_unique<DeviceResidents>(device));
    device.shared = std::make_unique<SharedPool>(*device.driver, *kept.back());
  }
  return *device.shared;
}

}  // namespace memsaver
