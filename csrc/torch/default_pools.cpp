#include "torch/default_pools.h"

#include <algorithm>
#include <utility>

#include "regions/core.h"
#include "torch/torch_hooks.h"

namespace memsaver {
namespace {

constexpr auto kGetter = "_ZN3c104cuda9DriverAPI3getEv";  // c10::cuda::DriverAPI::get()
constexpr Handle kMark = Handle{0x6d73} << 48;            // of the numbers given out here: above any address

// The allocation of this thread that was refused memory. Torch frees its cached blocks and tries again: only then it
// waits until other processes have returned theirs, up to one deadline for all pieces of the allocation.
struct Refusal {
  const Device* device = nullptr;  // null: none was refused
  std::optional<Deadline> until;
};
thread_local Refusal refusal;

Deadline deadline_on(const Device& device) {
  if (refusal.device != &device) return now();
  if (!refusal.until) refusal.until = device.shortage_deadline();
  return *refusal.until;
}

// The code for the exception that is handled now.
int code_of_error() {
  try {
    throw;
  } catch (const OutOfMemoryError&) {
    return DefaultPools::kNoMemory;
  } catch (const DriverError& error) {
    return error.code != DefaultPools::kDone ? error.code : DefaultPools::kUnknownError;
  } catch (const RegionPausedError&) {
    return DefaultPools::kNotPermitted;
  } catch (...) {
    return DefaultPools::kUnknownError;
  }
}

// Gives another device access to the memory of a region, now or from the next resume on. Returns whether it has it.
bool give_access(int ordinal, const Region& region) {
  Core& all = core();
  all.refresh_peers();
  const std::lock_guard lock(all.mutex);
  const std::vector<int>& peers = region.device.peers;
  return std::find(peers.begin(), peers.end(), ordinal) != peers.end() && !region.lacks_access();
}

}  // namespace

DefaultPools& default_pools() {
  static auto* only = new DefaultPools;
  return *only;
}

std::string DefaultPools::bind(const std::string& library) {
  const std::lock_guard lock(binding_);
  if (!reason_) reason_ = intercept_calls(library, kGetter, *this);
  return *reason_;
}

void DefaultPools::add(Region& region) {
  const std::lock_guard lock(mutex_);
  regions_[region.device.driver->ordinal()] = &region;
}

Region* DefaultPools::on(int ordinal) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(ordinal);
  return found == regions_.end() ? nullptr : found->second;
}

std::vector<Region*> DefaultPools::all() {
  std::vector<Region*> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [ordinal, region] : regions_) found.push_back(region);
  return found;
}

std::optional<int> DefaultPools::create(Handle& made, std::size_t size, int ordinal) {
  Region* region = on(ordinal);
  if (region == nullptr || region->state() != State::active) {
    refusal = {};
    return std::nullopt;
  }
  try {
    unreserve_late();
    const TorchAllocation under_way;
    Piece piece{region, size, region->borrow(size, deadline_on(region->device))};
    const std::lock_guard lock(mutex_);
    made = kMark | ++last_;
    pieces_.emplace(made, std::move(piece));
    return kDone;
  } catch (...) {
    const int code = code_of_error();
    if (code == kNotPermitted) return std::nullopt;  // a pause began meanwhile
    // After any other code torch could not use its segment any more, so only a dead context has its own.
    if (region->device.lost) return code;
    const bool has_waited = refusal.device == &region->device && refusal.until;
    refusal = {has_waited ? nullptr : &region->device, std::nullopt};
    return kNoMemory;
  }
}

std::optional<int> DefaultPools::release(Handle handle) {
  std::map<Handle, Piece>::node_type released;  // its chunks return to their source without the lock
  const std::lock_guard lock(mutex_);
  released = pieces_.extract(handle);
  return released.empty() ? std::nullopt : std::optional<int>(kDone);
}

std::optional<int> DefaultPools::export_handle(Handle handle) {
  // Another process would keep the memory over a pause. memsaver's own export follows the pauses.
  const std::lock_guard lock(mutex_);
  return pieces_.contains(handle) ? std::optional<int>(kNoSupport) : std::nullopt;
}

std::optional<DefaultPools::Piece> DefaultPools::take(Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = pieces_.find(handle);
  if (found == pieces_.end()) return std::nullopt;
  return Piece{found->second.region, found->second.size, std::exchange(found->second.chunks, {})};
}

std::optional<int> DefaultPools::map(Address address, std::size_t size, Handle handle) {
  try {
    auto piece = take(handle);
    if (!piece) return std::nullopt;
    if (piece->size != size || piece->chunks.empty()) return kNoSupport;  // torch maps each piece once, and whole
    refusal = {};                                                         // torch maps when it has all pieces
    piece->region->place({address, size}, std::move(piece->chunks));
    return kDone;
  } catch (...) {
    return code_of_error();
  }
}

std::optional<int> DefaultPools::unmap(Address address, std::size_t size) {
  try {
    Region* region = core().parts.addresses.at(address);
    if (region == nullptr || !region->placed) return std::nullopt;
    return region->drop({address, size}) ? kDone : kNoSupport;
  } catch (...) {
    return code_of_error();
  }
}

bool DefaultPools::is_used(Range range) {
  const std::vector<Region*> regions = all();
  return std::any_of(regions.begin(), regions.end(), [&](const Region* region) { return region->touches(range); });
}

std::optional<int> DefaultPools::unreserve(Address address, std::size_t size) {
  try {
    unreserve_late();
    if (!is_used({address, size})) return std::nullopt;
    const std::lock_guard lock(mutex_);
    late_.push_back({address, size});
    return kDone;
  } catch (...) {
    return code_of_error();
  }
}

void DefaultPools::unreserve_late() {
  Ranges waiting;
  {
    const std::lock_guard lock(mutex_);
    if (late_.empty()) return;
    waiting.swap(late_);
  }
  for (const Range& range : waiting) {
    if (!is_used(range) && unreserve_by_driver(range.offset, range.size) == kDone) continue;
    const std::lock_guard lock(mutex_);
    late_.push_back(range);
  }
}

std::optional<int> DefaultPools::allow(Address address, std::size_t size, int ordinal,
                                       const std::function<int(Address, std::size_t)>& driver) {
  try {
    Region* region = nullptr;
    Ranges ours;
    for (Region* each : all()) {
      ours = each->parts({{address, size}});
      region = each;
      if (!ours.empty()) break;
    }
    if (ours.empty()) return std::nullopt;
    // place() gives access to the device and its known peers, and so does a resume.
    if (ordinal != region->device.driver->ordinal() && !give_access(ordinal, *region)) return kNotPermitted;
    RangeSet answered;
    for (const Range& range : ours) answered.add(range);
    for (const Range& range : answered.missing_from({{address, size}}))
      if (const int code = driver(range.offset, range.size); code != kDone) return code;
    return kDone;
  } catch (...) {
    return code_of_error();
  }
}

}  // namespace memsaver
