// The pieces of torch's expandable segments are segments of a region, at torch's addresses, over chunks of the region's
// source.
//
// torch keeps pointers to the driver's functions in a table. The table's words that point to functions for physical
// memory are found by their values, so its layout need not be known. Only calls from the code of torch's library are
// answered here: other libraries may call through the same table.
//
// Torch's allocator takes each piece in three calls of the driver: it creates memory, maps it, and gives access. It
// tries again without its cached blocks if there is no memory to create. So memory is taken in the first call, and
// mapped in the second. The handle that torch holds is a number of this file. Other handles and addresses pass through
// to the driver: pieces that torch made earlier or while the region was not active, and memory of other processes.
//
// Torch calls these functions with the mutex of its allocator held, from any thread, also during a capture. They use no
// Python. They make calls of the driver, a bounded wait for memory of other processes, and short ones for threads that
// change mappings of the region.
#include "torch/default_pools.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "driver/cuda_api.h"
#include "regions/core.h"
#include "torch/torch_hooks.h"

// torch's getter of the table may throw. An exception passes between libraries with one C++ runtime alone.
#ifndef __GLIBCXX__
#error "torch is built with libstdc++, and so must this library be"
#endif

namespace memsaver {
namespace {

using cuda::AccessDesc;
using cuda::AllocationHandle;
using cuda::AllocationProp;
using cuda::api;
using cuda::DevicePointer;
using cuda::kSuccess;
using cuda::Result;
using Flags = unsigned long long;
using Word = std::uintptr_t;
using Answer = std::optional<Result>;  // nullopt: the driver makes the call

constexpr auto kGetter = "_ZN3c104cuda9DriverAPI3getEv";            // c10::cuda::DriverAPI::get()
constexpr AllocationHandle kMark = AllocationHandle{0x6d73} << 48;  // of the numbers here: above any address
constexpr std::size_t kMostBytes = 128 * sizeof(Word);              // of a table
constexpr Result kNoMemory = 2, kNotPermitted = 800, kUnknownError = 999;

struct Piece {
  Region* region;
  std::size_t size;
  std::vector<Chunk> chunks;  // empty once the piece is mapped
};

struct Pools {
  std::mutex mutex;                // guards the following; no other lock is taken under it
  std::map<int, Region*> regions;  // by the ordinal of the device
  Ranges late;                     // addresses that torch has freed, with chunks of a transition; not sorted
  std::map<AllocationHandle, Piece> pieces;
  AllocationHandle last = 0;
};

Pools& pools() {
  static auto* only = new Pools;  // never destroyed, as Core
  return *only;
}

std::atomic<bool> intercepts = false;
std::atomic<bool> has_fabric = false;  // the driver has given memory with a fabric handle
Range callers{0, 0};                   // torch's library. Written before `intercepts`

bool contains(const Range& range, Address address) { return address >= range.offset && address < range.end(); }

// The allocation of this thread that was refused memory. Torch frees its cached blocks and tries again: only then it
// waits until other processes have returned theirs, up to one deadline for all pieces of the allocation.
struct RefusedAllocation {
  const Device* device = nullptr;  // null: none was refused
  std::optional<Deadline> until;
};
thread_local RefusedAllocation refusal;

Deadline deadline_on(const Device& device) {
  if (refusal.device != &device) return now();
  if (!refusal.until) refusal.until = device.shortage_deadline();
  return *refusal.until;
}

// The code for the exception that is handled now.
Result code_of_error() {
  try {
    throw;
  } catch (const OutOfMemoryError&) {
    return kNoMemory;
  } catch (const DriverError& error) {
    return error.code != kSuccess ? error.code : kUnknownError;
  } catch (const RegionPausedError&) {
    return kNotPermitted;
  } catch (...) {
    return kUnknownError;
  }
}

// Answers a call in place of the driver if it comes from torch's code, and never in a forked child. Throws nothing,
// since the caller is C code.
template <typename Act, typename ByDriver>
Result answer(const void* return_address, Act act, ByDriver by_driver) {
  const auto from = reinterpret_cast<Address>(return_address);
  if (!intercepts || !contains(callers, from) || !usable()) return by_driver();
  Answer code;
  try {
    code = act();
  } catch (...) {
    code = code_of_error();
  }
  return code ? *code : by_driver();
}

std::vector<Region*> all_regions() {
  std::vector<Region*> found;
  const std::lock_guard lock(pools().mutex);
  for (const auto& [ordinal, region] : pools().regions) found.push_back(region);
  return found;
}

bool is_used(Range range) {  // by a chunk or a segment of a region
  const std::vector<Region*> regions = all_regions();
  return std::any_of(regions.begin(), regions.end(), [&](const Region* region) { return region->touches(range); });
}

// Releases addresses that were freed while a transition had chunks there.
void unreserve_late() {
  Ranges waiting;
  {
    const std::lock_guard lock(pools().mutex);
    waiting.swap(pools().late);
  }
  for (const Range& range : waiting) {
    if (!is_used(range) && api().cuMemAddressFree(range.offset, range.size) == kSuccess) continue;
    const std::lock_guard lock(pools().mutex);
    pools().late.push_back(range);
  }
}

// Takes the chunks of a piece.
Answer take_chunks(AllocationHandle* handle, std::size_t size, int ordinal) {
  Region* region = default_pool_on(ordinal);
  if (region == nullptr || region->state() != State::active) {
    refusal = {};
    return std::nullopt;
  }
  try {
    unreserve_late();
    const TorchAllocation under_way;
    Piece piece{region, size, region->borrow(size, deadline_on(region->device))};
    const std::lock_guard lock(pools().mutex);
    const AllocationHandle made = kMark | ++pools().last;
    pools().pieces.emplace(made, std::move(piece));
    *handle = made;
    return kSuccess;
  } catch (...) {
    const Result code = code_of_error();
    if (code == kNotPermitted) return std::nullopt;  // a pause began meanwhile
    // After any other code torch could not use its segment any more, so only a dead context has its own.
    if (region->device.lost) return code;
    const bool has_waited = refusal.device == &region->device && refusal.until;
    refusal = {has_waited ? nullptr : &region->device, std::nullopt};
    return kNoMemory;
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

// The calls.

Result create(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  const auto take = [&]() -> Answer {
    if (handle == nullptr || properties == nullptr || flags != 0 ||
        properties->location.type != cuda::kLocationDevice || size == 0 || size % kPage != 0)
      return std::nullopt;
    // Torch tries fabric handles once, and asks for them from then on if the driver has them. Chunks have POSIX
    // descriptors alone. So the driver decides, by a page, until it has had them once.
    if ((properties->handle_types & cuda::kHandleFabric) != 0 && !has_fabric) {
      AllocationHandle probe = 0;
      if (const Result code = api().cuMemCreate(&probe, kPage, properties, flags); code != kSuccess) return code;
      api().cuMemRelease(probe);
      has_fabric = true;
    }
    return take_chunks(handle, size, properties->location.id);
  };
  return answer(__builtin_return_address(0), take, [&] { return api().cuMemCreate(handle, size, properties, flags); });
}

Result release(AllocationHandle handle) {
  std::map<AllocationHandle, Piece>::node_type released;  // its chunks return to their source without the lock
  const auto take = [&]() -> Answer {
    const std::lock_guard lock(pools().mutex);
    released = pools().pieces.extract(handle);
    return released.empty() ? std::nullopt : Answer(kSuccess);
  };
  return answer(__builtin_return_address(0), take, [&] { return api().cuMemRelease(handle); });
}

// Another process would keep the memory over a pause. memsaver's own export follows the pauses.
Result export_handle(void* shareable, AllocationHandle handle, int type, Flags flags) {
  const auto refuse = [&]() -> Answer {
    const std::lock_guard lock(pools().mutex);
    return pools().pieces.contains(handle) ? Answer(cuda::kNotSupported) : std::nullopt;
  };
  return answer(__builtin_return_address(0), refuse,
                [&] { return api().cuMemExportToShareableHandle(shareable, handle, type, flags); });
}

Result map(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  const auto place = [&]() -> Answer {
    std::unique_lock lock(pools().mutex);
    const auto found = pools().pieces.find(handle);
    if (offset != 0 || found == pools().pieces.end()) return std::nullopt;
    Region* region = found->second.region;
    const bool fits = found->second.size == size;
    std::vector<Chunk> chunks = std::exchange(found->second.chunks, {});  // the piece stays known
    lock.unlock();
    if (!fits || chunks.empty()) return cuda::kNotSupported;  // torch maps each piece once, and whole
    refusal = {};                                             // torch maps when it has all pieces
    region->place({address, size}, std::move(chunks));
    return kSuccess;
  };
  return answer(__builtin_return_address(0), place,
                [&] { return api().cuMemMap(address, size, offset, handle, flags); });
}

Result unmap(DevicePointer address, std::size_t size) {
  const auto drop = [&]() -> Answer {
    Region* region = core().parts.addresses.at(address);
    if (region == nullptr || !region->placed) return std::nullopt;
    return region->drop({address, size}) ? kSuccess : cuda::kNotSupported;
  };
  return answer(__builtin_return_address(0), drop, [&] { return api().cuMemUnmap(address, size); });
}

Result address_free(DevicePointer address, std::size_t size) {
  const auto unreserve = [&]() -> Answer {
    unreserve_late();
    if (!is_used({address, size})) return std::nullopt;
    const std::lock_guard lock(pools().mutex);
    pools().late.push_back({address, size});
    return kSuccess;
  };
  return answer(__builtin_return_address(0), unreserve, [&] { return api().cuMemAddressFree(address, size); });
}

Result set_access(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  const auto allow = [&]() -> Answer {
    if (access == nullptr || count != 1 || access->location.type != cuda::kLocationDevice) return std::nullopt;
    Region* region = nullptr;
    Ranges ours;
    for (Region* each : all_regions()) {
      ours = each->parts({{address, size}});
      region = each;
      if (!ours.empty()) break;
    }
    if (ours.empty()) return std::nullopt;
    // place() gives access to the device and its known peers, and so does a resume.
    const int ordinal = access->location.id;
    if (ordinal != region->device.driver->ordinal() && !give_access(ordinal, *region)) return kNotPermitted;
    for (const Range& range : RangeSet(ours).missing_from({{address, size}}))
      if (const Result code = api().cuMemSetAccess(range.offset, range.size, access, count); code != kSuccess)
        return code;
    return kSuccess;
  };
  return answer(__builtin_return_address(0), allow, [&] { return api().cuMemSetAccess(address, size, access, count); });
}

// A loaded library, by the addresses of its getter and of its table.
struct Library {
  Address getter, table;
  Range code{0, 0};            // empty: not found
  std::size_t bytes_left = 0;  // from the table to the end of its writable part; 0: the table is in none
};

int find_library(dl_phdr_info* info, std::size_t, void* wanted) {
  auto& library = *static_cast<Library*>(wanted);
  Library found{library.getter, library.table};
  bool is_fixed = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const Range range{static_cast<Address>(info->dlpi_addr + part.p_vaddr), static_cast<std::size_t>(part.p_memsz)};
    // The loader makes this part read-only, within a writable one.
    if (part.p_type == PT_GNU_RELRO && contains(range, library.table)) is_fixed = true;
    if (part.p_type != PT_LOAD) continue;
    if ((part.p_flags & PF_X) != 0 && contains(range, library.getter)) found.code = range;
    if ((part.p_flags & PF_W) != 0 && contains(range, library.table)) found.bytes_left = range.end() - library.table;
  }
  if (found.code.size == 0) return 0;
  if (is_fixed) found.bytes_left = 0;
  library = found;
  return 1;
}

// A word of the table that takes another value.
struct Pointer {
  const char* name;
  Word original, instead;
  Word* place = nullptr;
};

template <typename Function>
Pointer pointer(const char* name, Function* original, Function* instead) {
  return {name, reinterpret_cast<Word>(original), reinterpret_cast<Word>(instead)};
}

// Looks for the words. Returns the reason if they are not there once each.
std::string find(std::vector<Pointer>& pointers, Word* table, std::size_t words) {
  for (Word* word = table; word < table + words; ++word) {
    // The library may write to it in another thread.
    const Word value = std::atomic_ref<Word>(*word).load(std::memory_order_relaxed);
    for (Pointer& each : pointers) {
      if (value != each.original) continue;
      if (each.place != nullptr) return std::string("the table has ") + each.name + " twice";
      each.place = word;
    }
  }
  for (const Pointer& each : pointers)
    if (each.place == nullptr) return std::string("the table has no ") + each.name;
  return "";
}

// Returns the reason why the calls cannot be intercepted; empty: they are, for the rest of the process.
std::string intercept_calls(const std::string& library) {
  const cuda::Api& driver = api();
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) return library + " is not loaded";
  const auto get = reinterpret_cast<Word* (*)()>(::dlsym(opened, kGetter));
  if (get == nullptr) return library + " has no function " + kGetter;
  Word* table = nullptr;
  try {
    table = get();
  } catch (...) {
    return library + " found no functions of the driver";
  }
  Library parts{reinterpret_cast<Address>(get), reinterpret_cast<Address>(table)};
  ::dl_iterate_phdr(&find_library, &parts);
  if (parts.bytes_left == 0) return "the table of the driver's functions is not in writable memory of " + library;
  std::vector<Pointer> pointers = {
      pointer("cuMemCreate", driver.cuMemCreate, &create),
      pointer("cuMemRelease", driver.cuMemRelease, &release),
      pointer("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle, &export_handle),
      pointer("cuMemMap", driver.cuMemMap, &map),
      pointer("cuMemUnmap", driver.cuMemUnmap, &unmap),
      pointer("cuMemSetAccess", driver.cuMemSetAccess, &set_access),
      pointer("cuMemAddressFree", driver.cuMemAddressFree, &address_free)};
  std::string reason = find(pointers, table, std::min(kMostBytes, parts.bytes_left) / sizeof(Word));
  if (!reason.empty()) return reason;
  callers = parts.code;
  intercepts = true;
  for (const Pointer& each : pointers)
    std::atomic_ref<Word>(*each.place).store(each.instead, std::memory_order_release);
  return "";
}

}  // namespace

std::string bind_default_pools(const std::string& library) {
  static std::mutex binding;
  static auto* const reason = new std::optional<std::string>;  // never destroyed, as Core
  const std::lock_guard lock(binding);
  if (!*reason) *reason = intercept_calls(library);
  return **reason;
}

void add_default_pool(Region& region) {
  const std::lock_guard lock(pools().mutex);
  pools().regions[region.device.driver->ordinal()] = &region;
}

Region* default_pool_on(int ordinal) {
  const std::lock_guard lock(pools().mutex);
  const auto found = pools().regions.find(ordinal);
  return found == pools().regions.end() ? nullptr : found->second;
}

}  // namespace memsaver
