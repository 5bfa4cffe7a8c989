// The calls of the CUDA driver by torch's library, which default pools answer in place of the driver.
//
// torch keeps pointers to the driver's functions in a table. The table's words that point to functions for physical
// memory are found by their values, so its layout need not be known. Only calls from the code of that library are
// answered here: other libraries may call through the same table.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "driver/cuda_api.h"
#include "regions/core.h"
#include "torch/default_pools.h"

// torch's getter of the table may throw. An exception passes between libraries with one C++ runtime alone.
#ifndef __GLIBCXX__
#error "torch is built with libstdc++, and so must this library be"
#endif

namespace memsaver {
namespace {

using namespace cuda;
using Flags = unsigned long long;
using Word = std::uintptr_t;

constexpr std::size_t kMostBytes = 128 * sizeof(Word);  // of a table

bool contains(const Range& range, Address address) { return address >= range.offset && address < range.end(); }

std::atomic<DefaultPools*> interceptor = nullptr;
std::atomic<bool> has_fabric = false;  // the driver has given memory with a fabric handle
Range callers{0, 0};                   // written before `interceptor`

// The calls that this library answers: those from the library's own code, but in a forked child.
DefaultPools* answers(const void* return_address) {
  const auto from = reinterpret_cast<Address>(return_address);
  DefaultPools* calls = interceptor;
  return calls != nullptr && contains(callers, from) && usable() ? calls : nullptr;
}

#define MEMSAVER_ANSWERS() answers(__builtin_return_address(0))

Result create(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && handle != nullptr && properties != nullptr && flags == 0 &&
      properties->location.type == kLocationDevice && size > 0 && size % kPage == 0) {
    // Torch tries fabric handles once, and asks for them from then on if the driver has them. Chunks have POSIX
    // descriptors alone. So the driver decides, by a page, until it has had them once.
    if ((properties->handle_types & kHandleFabric) != 0 && !has_fabric) {
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
  DefaultPools* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->release(handle) : std::nullopt;
  return code ? *code : api().cuMemRelease(handle);
}

Result export_handle(void* shareable, AllocationHandle handle, int type, Flags flags) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->export_handle(handle) : std::nullopt;
  return code ? *code : api().cuMemExportToShareableHandle(shareable, handle, type, flags);
}

Result map(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr && offset == 0 ? calls->map(address, size, handle) : std::nullopt;
  return code ? *code : api().cuMemMap(address, size, offset, handle, flags);
}

Result unmap(DevicePointer address, std::size_t size) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->unmap(address, size) : std::nullopt;
  return code ? *code : api().cuMemUnmap(address, size);
}

Result address_free(DevicePointer address, std::size_t size) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->unreserve(address, size) : std::nullopt;
  return code ? *code : api().cuMemAddressFree(address, size);
}

Result set_access(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  DefaultPools* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && access != nullptr && count == 1 && access->location.type == kLocationDevice) {
    const auto by_driver = [&](Address from, std::size_t bytes) {
      return api().cuMemSetAccess(from, bytes, access, count);
    };
    if (const auto code = calls->allow(address, size, access->location.id, by_driver)) return *code;
  }
  return api().cuMemSetAccess(address, size, access, count);
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

}  // namespace

int unreserve_by_driver(Address address, std::size_t size) { return api().cuMemAddressFree(address, size); }

std::string intercept_calls(const std::string& library, const char* getter, DefaultPools& calls) {
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
  interceptor = &calls;
  for (const Pointer& each : pointers)
    std::atomic_ref<Word>(*each.place).store(each.instead, std::memory_order_release);
  return "";
}

}  // namespace memsaver
