#include "residents.h"

#include <unistd.h>

#include <cstdlib>

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
  if (lines.size() < 4 || lines.size() % 2 != 0) throw Error("what is to be attached to cannot be read");
  Key key{lines[0], policy_of(lines[1]), {}};
  for (std::size_t at = 2; at < lines.size(); at += 2)
    key.ranges.push_back(
        {std::strtoull(lines[at].c_str(), nullptr, 10), std::strtoull(lines[at + 1].c_str(), nullptr, 10)});
  return key;
}

}  // namespace

std::vector<Residents::Row> DeviceResidents::rows() {
  std::vector<Row> found;
  std::lock_guard lock(core().mutex);
  for (const auto& region : core().regions)
    if (&region->device == &device_)
      found.push_back({region->tag, region->allocated_bytes(), region->mapped_bytes(),
                       region->backup ? region->backup->bytes() : 0, static_cast<std::uint64_t>(region->state),
                       static_cast<std::uint64_t>(region->policy)});
  return found;
}

std::vector<Placed> DeviceResidents::lend(const std::string& text, std::uint64_t residence, std::uint64_t lease,
                                          int pid) {
  const Key key = parsed(text);
  std::lock_guard lock(core().mutex);
  Region* region = nullptr;
  for (const auto& each : core().regions)
    if (&each->device == &device_ && each->tag == key.tag && each->policy == key.policy) region = each.get();
  const std::string name = "region '" + key.tag + "' of process " + std::to_string(::getpid());
  if (region == nullptr) throw Error(name + " does not exist");
  if (region->state != State::active) throw Error(name + " is " + name_of(region->state));
  if (region->residence != residence)
    throw Error(name + " was paused and resumed since the token was made (residence " + std::to_string(residence) +
                ", now " + std::to_string(region->residence) + "): share again");
  if (region->sealed()) throw Error(name + " is frozen, and a copy of its contents is kept: thaw() it first");
  if (bytes_of(region->parts(key.ranges)) != bytes_of(key.ranges))
    throw Error(name + " does not hold these tensors any more");
  std::vector<Placed> placed = region->chunks_under(sorted(key.ranges));
  Region::Lease& entered = region->leases[lease];
  entered.pid = pid;
  for (const Placed& chunk : placed) entered.chunks.push_back(chunk.handle);
  return placed;
}

void DeviceResidents::returned(std::uint64_t lease) {
  std::lock_guard lock(core().mutex);
  for (const auto& region : core().regions) region->leases.erase(lease);
  core().changed.notify_all();
}

std::vector<Residents::Owed> DeviceResidents::owed() {
  std::vector<Owed> found;
  std::lock_guard lock(core().mutex);
  for (const auto& region : core().regions)
    if (&region->device == &device_)
      for (const auto& [number, lease] : region->leases) found.push_back({number, lease.pid, lease.chunks});
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
