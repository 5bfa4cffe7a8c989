#include "driver/intercepted_calls.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "base/mutants.h"
#include "base/ranges.h"
#include "driver/cuda_api.h"
#include "driver/function_pointers.h"

namespace memsaver {
namespace {

using namespace cuda;
using Flags = unsigned long long;

constexpr int kFabricHandle = 8;
constexpr std::size_t kMostBytes = 128 * sizeof(Word);  // of a table

std::atomic<InterceptedCalls*> interceptor = nullptr;
std::atomic<bool> has_fabric = false;  // the driver has given memory with a fabric handle
Range callers{0, 0};                   // written before `interceptor`

// The calls that this library answers: those from the library's own code.
InterceptedCalls* answers(const void* return_address) {
  const auto from = reinterpret_cast<Address>(return_address);
  InterceptedCalls* calls = interceptor;
  return calls != nullptr && (contains(callers, from) || MEMSAVER_MUTANT(all_callers_are_answered)) ? calls : nullptr;
}

#define MEMSAVER_ANSWERS() answers(__builtin_return_address(0))

Result create(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && handle != nullptr && properties != nullptr && flags == 0 &&
      properties->location.type == kLocationDevice && size > 0 && size % kPage == 0) {
    // Torch tries fabric handles once, and asks for them from then on if the driver has them. Chunks have POSIX
    // descriptors alone. So the driver decides, by a page, until it has had them once.
    if ((properties->handle_types & kFabricHandle) != 0 && !has_fabric) {
      AllocationHandle probe = 0;
      if (const Result code = api().cuMemCreate(&probe, kPage, properties, flags); code != kSuccess) return code;
      api().cuMemRelease(probe);
      has_fabric = true;
    }
    Handle made = 0;
    if (const auto code = calls->create(made, size, properties->location.id)) {
      if (*code == kSuccess) *handle = made;
      return *code;
    }
  }
  return api().cuMemCreate(handle, size, properties, flags);
}

Result release(AllocationHandle handle) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->release(handle) : std::nullopt;
  return code ? *code : api().cuMemRelease(handle);
}

Result export_handle(void* shareable, AllocationHandle handle, int type, Flags flags) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->export_handle(handle) : std::nullopt;
  return code ? *code : api().cuMemExportToShareableHandle(shareable, handle, type, flags);
}

Result map(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr && offset == 0 ? calls->map(address, size, handle) : std::nullopt;
  return code ? *code : api().cuMemMap(address, size, offset, handle, flags);
}

Result unmap(DevicePointer address, std::size_t size) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->unmap(address, size) : std::nullopt;
  return code ? *code : api().cuMemUnmap(address, size);
}

Result address_free(DevicePointer address, std::size_t size) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->unreserve(address, size) : std::nullopt;
  return code ? *code : api().cuMemAddressFree(address, size);
}

Result set_access(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  InterceptedCalls* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && access != nullptr && count == 1 && access->location.type == kLocationDevice) {
    const auto by_driver = [&](Address from, std::size_t bytes) {
      return api().cuMemSetAccess(from, bytes, access, count);
    };
    if (const auto code = calls->allow(address, size, access->location.id, by_driver)) return *code;
  }
  return api().cuMemSetAccess(address, size, access, count);
}

}  // namespace

int unreserve_by_driver(Address address, std::size_t size) { return api().cuMemAddressFree(address, size); }

std::string intercept_calls(const std::string& library, const char* getter, InterceptedCalls& calls) {
  const Api& driver = api();
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) return library + " is not loaded";
  const auto get = reinterpret_cast<Word* (*)()>(::dlsym(opened, getter));
  if (get == nullptr) return library + " has no function " + getter;
  Word* table = nullptr;
  try {
    table = get();
  } catch (...) {
    return library + " found no functions of the driver";
  }
  const LibraryParts parts = parts_of(reinterpret_cast<Address>(get));
  const auto at = reinterpret_cast<Address>(table);
  Ranges searched;
  for (const Range& range : parts.writable)
    if (contains(range, at)) searched = {{at, std::min(kMostBytes, range.end() - at)}};
  if (searched.empty()) return "the table of the driver's functions is not within " + library;
  FunctionPointers pointers;
  pointers.add("cuMemCreate", driver.cuMemCreate, &create);
  pointers.add("cuMemRelease", driver.cuMemRelease, &release);
  pointers.add("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle, &export_handle);
  pointers.add("cuMemMap", driver.cuMemMap, &map);
  pointers.add("cuMemUnmap", driver.cuMemUnmap, &unmap);
  pointers.add("cuMemSetAccess", driver.cuMemSetAccess, &set_access);
  pointers.add("cuMemAddressFree", driver.cuMemAddressFree, &address_free);
  if (std::string reason = pointers.find(searched, "the table"); !reason.empty()) return reason;
  callers = parts.code;
  interceptor = &calls;
  pointers.replace();
  return "";
}

}  // namespace memsaver
