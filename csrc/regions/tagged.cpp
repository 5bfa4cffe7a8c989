#include "regions/tagged.h"

#include <map>
#include <memory>

namespace memsaver {
namespace {

// Callers of torch_memory_saver compare the driver's free memory with the bytes that they allocate. vLLM makes its KV
// cache as large as the rest of the device.
constexpr std::size_t kSlack = 32 * kMiB;

}  // namespace

TaggedRegions& tagged_regions(const std::string& prefix) {
  static std::mutex mutex;
  static auto& all = *new std::map<std::string, std::unique_ptr<TaggedRegions>>;
  std::lock_guard lock(mutex);
  std::unique_ptr<TaggedRegions>& found = all[prefix];
  if (found == nullptr) found = std::make_unique<TaggedRegions>(prefix);
  return *found;
}

Region& TaggedRegions::active(const std::string& tag, const std::string& device, Policy policy, bool one_handle) {
  // The first one, so that a tag has as few regions as it needs.
  const auto find = [&]() -> Region* {
    std::lock_guard lock(mutex_);
    for (const auto& [its, region] : regions_)
      if (its == tag && !region->closed() && region->device.driver->name == device && region->policy == policy &&
          region->one_handle == one_handle && region->state() == State::active && aside_.find(region) == aside_.end())
        return region;
    return nullptr;
  };
  if (Region* found = find()) return *found;
  Device& on = core().device(device);
  const std::lock_guard one_at_a_time(making_);
  if (Region* found = find()) return *found;
  const std::string whole = prefix_ + "." + tag;
  std::string name = whole;
  for (int number = 2; core().find(name, on) != nullptr; ++number) name = whole + "." + std::to_string(number);
  // Callers rely on the zeros that memory has from the driver. Chunks of a shared pool have another process's contents.
  Region& made = core().region(name, device,
                               {.policy = policy, .fill = Fill::zero, .most_slack = kSlack, .one_handle = one_handle});
  std::lock_guard lock(mutex_);
  regions_.emplace_back(tag, &made);
  return made;
}

}  // namespace memsaver
