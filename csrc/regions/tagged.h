// Regions by the tags of another library. Each is named "{prefix}.{tag}", since the same process may have regions of
// its own with these tags. A tag that is allocated in with another policy, or while its region is not active, gets
// another, "{prefix}.{tag}.2". Memory that resumes without contents is zero.
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "regions/core.h"

namespace memsaver {

class TaggedRegions {
 public:
  explicit TaggedRegions(std::string prefix) : prefix_(std::move(prefix)) {}

  // The active region of a tag with this policy on a device. Makes one if there is none. Throws as Core::region().
  Region& active(const std::string& tag, const std::string& device, Policy policy, bool one_handle = false);
  // Tag and region of each that is not closed. Throws in a forked child, as set_aside() does.
  std::vector<std::pair<std::string, Region*>> all() const {
    core();
    std::lock_guard lock(mutex_);
    std::vector<std::pair<std::string, Region*>> found = regions_;
    std::erase_if(found, [](const auto& each) { return each.second->closed(); });
    return found;
  }
  void set_aside(const std::vector<Region*>& regions, bool is_aside) {  // whether active() passes over them
    core();
    std::lock_guard lock(mutex_);
    for (const Region* region : regions)
      if (is_aside)
        aside_.insert(region);
      else
        aside_.erase(region);
  }

 private:
  const std::string prefix_;
  std::mutex making_;         // one region is made at a time. Taken before `mutex_`, by no thread with the GIL
  mutable std::mutex mutex_;  // taken before all locks of regions, and held for bookkeeping alone
  std::vector<std::pair<std::string, Region*>> regions_;  // each with its tag, in the order in which they were made
  std::set<const Region*> aside_;
};

// One for each prefix. Never destroyed.
TaggedRegions& tagged_regions(const std::string& prefix);

}  // namespace memsaver
