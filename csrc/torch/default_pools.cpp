#include "torch/default_pools.h"

#include <algorithm>
#include <utility>

#include "base/mutants.h"
#include "regions/core.h"

namespace memsaver {
namespace {

constexpr auto kGetter = "_ZN3c104cuda9DriverAPI3getEv";  // c10::cuda::DriverAPI::get()
constexpr Handle kMark = Handle{0x6d73} << 48;            // of the numbers given out here: above any address

// Whether torch was refused memory in this thread since its last success. Torch tries again after it has freed its
// cached blocks: only then other processes are asked for theirs.
thread_local bool refused = false;

// The code for the exception that is handled now.
int code_of_error() {
  try {
    throw;
  } catch (const OutOfMemoryError&) {
    return TakenCalls::kNoMemory;
  } catch (const DriverError& error) {
    return error.code;
  } catch (const RegionPausedError&) {
    return TakenCalls::kNotPermitted;
  } catch (...) {
    return TakenCalls::kUnknownError;
  }
}

// Whether another device has access to the memory of a region, now or from the next resume on.
bool has_access(int ordinal, const Region& region) {
  Core& all = core();
  all.refresh_peers();
  const std::lock_guard lock(all.mutex);
  const std::vector<int>& peers = region.device.peers;
  return std::find(peers.begin(), peers.end(), ordinal) != peers.end();
}

}  // namespace

DefaultPools& default_pools() {
  static auto* only = new DefaultPools;
  return *only;
}

std::string DefaultPools::bind(const std::string& library) {
  const std::lock_guard lock(binding_);
  if (!reason_) reason_ = take_calls(library, kGetter, *this);
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

Region* DefaultPools::of(const Device& device) {
  return device.driver->ordinal() < 0 ? nullptr : on(device.driver->ordinal());
}

std::vector<Region*> DefaultPools::all() {
  std::vector<Region*> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [ordinal, region] : regions_) found.push_back(region);
  return found;
}

bool DefaultPools::knows(Handle handle) {
  const std::lock_guard lock(mutex_);
  return pieces_.contains(handle);
}

std::optional<int> DefaultPools::create(Handle& made, std::size_t size, int ordinal) {
  if (!usable()) return std::nullopt;
  Region* region = on(ordinal);
  if (region == nullptr) return std::nullopt;
  // Beside a paused region torch takes memory of the driver.
  const auto beside =
      MEMSAVER_MUTANT(a_paused_pool_gives_no_memory) ? std::optional<int>(kNoMemory) : std::optional<int>();
  if (region->state() != State::active) return beside;
  try {
    Piece piece{region, size, region->borrow(size, refused ? region->device.shortage_deadline() : now())};
    refused = false;
    const std::lock_guard lock(mutex_);
    made = kMark | ++last_;
    pieces_.emplace(made, std::move(piece));
    return kDone;
  } catch (...) {
    const int code = code_of_error();
    if (code == kNotPermitted) return beside;  // a pause began meanwhile
    if (code == kNoMemory) refused = true;
    return code;
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
  return knows(handle) ? std::optional<int>(kNoSupport) : std::nullopt;
}

std::optional<DefaultPools::Piece> DefaultPools::take(Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = pieces_.find(handle);
  if (found == pieces_.end()) return std::nullopt;
  return Piece{found->second.region, found->second.size, std::exchange(found->second.chunks, {})};
}

std::optional<int> DefaultPools::map(Address address, std::size_t size, Handle handle) {
  if (!usable()) return std::nullopt;
  try {
    auto piece = take(handle);
    if (!piece) return std::nullopt;
    if (piece->size != size || piece->chunks.empty()) return kNoSupport;  // torch maps each piece once, and whole
    piece->region->place({address, size}, std::move(piece->chunks));
    return kDone;
  } catch (...) {
    return code_of_error();
  }
}

std::optional<int> DefaultPools::unmap(Address address, std::size_t size) {
  if (!usable()) return std::nullopt;
  try {
    Region* region = core().parts.addresses.at(address);
    if (region == nullptr || !region->placed) return std::nullopt;
    return region->drop({address, size}) ? kDone : kNoSupport;
  } catch (...) {
    return code_of_error();
  }
}

std::optional<int> DefaultPools::allow(Address address, std::size_t size, int ordinal,
                                       const std::function<int(Address, std::size_t)>& driver) {
  if (!usable()) return std::nullopt;
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
    if (ordinal != region->device.driver->ordinal() && !has_access(ordinal, *region)) return kNotPermitted;
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
