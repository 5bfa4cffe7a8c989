#include "regions/region.h"

#include <algorithm>
#include <utility>

#include "regions/core.h"

namespace memsaver {
namespace {

constexpr std::size_t kAllowance = 48 * kMiB;

}  // namespace

Region::Region(std::string region_tag, Device& on_device, const RegionOptions& options)
    : RegionOptions(options), tag(std::move(region_tag)), device(on_device) {}

// It allows large chunks in large regions only.
std::size_t Region::allowance(std::size_t live) const { return std::min({live, live / 20 + kAllowance, most_slack}); }

// States

void Region::settle(State next) {
  std::lock_guard lock(device.mutex);
  if (state_ == State::pausing && next == State::paused) paused_at_ = now();
  if (state_ == State::resuming && next == State::active) {
    discarded_ = false;
    ++residence_;
  }
  state_ = device.lost || state_ == State::lost ? State::lost : next;
  claimed_ = false;
  if ((chunks_.empty() || state_ != State::active) && !std::exchange(dirty_, {}).empty()) device.resting.sweep_ended();
  for (const Address begin : std::exchange(freed_meanwhile_, {})) end_locked(begin);
}

// Segments

void Region::end_locked(Address begin) {
  if (evicting_ || !(is_at_rest() || state_ == State::lost)) {
    freed_meanwhile_.push_back(begin);
  } else if (state_ == State::active && !placed) {
    if (segments_.rest(begin)) device.resting.add_locked(*this, begin);
  } else if (segments_.contains(begin)) {
    forget_locked(begin);
  }
}

void Region::free(Address begin) {
  {
    std::lock_guard lock(device.mutex);
    end_locked(begin);
  }
  if (state_ == State::active)
    device.resting.reap();
  else
    sweep_offered();
}

// The end

void Region::check_unused() const {
  const std::string cannot = "region '" + tag + "' cannot be closed: ";
  if (!is_at_rest()) throw Error(cannot + "it is " + name_of(state_));
  if (in_use() || !queue_.empty()) throw Error(cannot + "another thread uses it");
  if (!leases_.empty()) throw Error(cannot + "other processes are attached to it");
}

Ranges Region::close() {
  std::lock_guard lock(device.mutex);
  const std::string cannot = "region '" + tag + "' cannot be closed: ";
  if (closed_) throw Error("region '" + tag + "' was closed before");
  if (placed) throw Error(cannot + "another allocator uses it until the process ends");
  if (segments_.live_bytes() > 0)
    throw Error(cannot + std::to_string(segments_.live_bytes()) +
                " bytes of it are allocated; free its tensors and graphs first");
  if (segments_.resting_bytes() > 0)
    throw Error(cannot + "the device still works on " + std::to_string(segments_.resting_bytes()) + " freed bytes");
  if (addresses_.bytes() != bytes_of(reserved_)) throw Error(cannot + "another thread allocates in it");
  check_unused();
  if (!chunks_.empty()) throw Error(cannot + "the driver refused to unmap " + std::to_string(mapped_) + " bytes");
  closed_ = true;
  addresses_ = {};
  return std::exchange(reserved_, {});
}

}  // namespace memsaver
