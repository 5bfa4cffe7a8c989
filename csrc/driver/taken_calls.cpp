#include "driver/taken_calls.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/mutants.h"
#include "base/ranges.h"
#include "driver/cuda_api.h"

namespace memsaver {
namespace {

using namespace cuda;
using Word = std::uintptr_t;
using Flags = unsigned long long;

constexpr int kFabricHandle = 8;
constexpr std::size_t kMostWords = 128;  // of a table

bool contains(const Range& range, Address address) { return address >= range.offset && address < range.end(); }

// The parts of a loaded library, found by an address in its code.
struct Parts {
  Address within;
  Range code{0, 0};
  std::vector<Range> writable = {};
};

int find_parts(dl_phdr_info* info, std::size_t, void* wanted) {
  auto& found = *static_cast<Parts*>(wanted);
  Parts parts{found.within};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    const Range range{static_cast<Address>(info->dlpi_addr + part.p_vaddr), static_cast<std::size_t>(part.p_memsz)};
    if ((part.p_flags & PF_X) != 0 && contains(range, found.within)) parts.code = range;
    if ((part.p_flags & PF_W) != 0) parts.writable.push_back(range);
  }
  if (parts.code.size == 0) return 0;
  found = std::move(parts);
  return 1;
}

std::atomic<TakenCalls*> taken = nullptr;
Range callers{0, 0};  // written before `taken`

// The calls that this library answers: those from the library's own code.
TakenCalls* answers(const void* return_address) {
  const auto from = reinterpret_cast<Address>(return_address);
  TakenCalls* calls = taken;
  return calls != nullptr && (contains(callers, from) || MEMSAVER_MUTANT(all_callers_are_answered)) ? calls : nullptr;
}

#define MEMSAVER_ANSWERS() answers(__builtin_return_address(0))

Result create(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && handle != nullptr && properties != nullptr && flags == 0 &&
      properties->location.type == kLocationDevice && size > 0 && size % kPage == 0) {
    // Chunks have POSIX descriptors alone. Torch asks for these next.
    if ((properties->handle_types & kFabricHandle) != 0) return kNotSupported;
    Handle made = 0;
    if (const auto code = calls->create(made, size, properties->location.id)) {
      if (*code == kSuccess) *handle = made;
      return *code;
    }
  }
  return api().cuMemCreate(handle, size, properties, flags);
}

Result release(AllocationHandle handle) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->release(handle) : std::nullopt;
  return code ? *code : api().cuMemRelease(handle);
}

Result export_handle(void* shareable, AllocationHandle handle, int type, Flags flags) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->export_handle(handle) : std::nullopt;
  return code ? *code : api().cuMemExportToShareableHandle(shareable, handle, type, flags);
}

Result map(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr && offset == 0 ? calls->map(address, size, handle) : std::nullopt;
  return code ? *code : api().cuMemMap(address, size, offset, handle, flags);
}

Result unmap(DevicePointer address, std::size_t size) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  const auto code = calls != nullptr ? calls->unmap(address, size) : std::nullopt;
  return code ? *code : api().cuMemUnmap(address, size);
}

Result set_access(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  TakenCalls* calls = MEMSAVER_ANSWERS();
  if (calls != nullptr && access != nullptr && count == 1 && access->location.type == kLocationDevice) {
    const auto by_driver = [&](Address from, std::size_t bytes) {
      return api().cuMemSetAccess(from, bytes, access, count);
    };
    if (const auto code = calls->allow(address, size, access->location.id, by_driver)) return *code;
  }
  return api().cuMemSetAccess(address, size, access, count);
}

struct Replacement {
  const char* name;
  Word original, instead;
};

template <typename Function>
Replacement replaced(const char* name, Function* original, Function* instead) {
  return {name, reinterpret_cast<Word>(original), reinterpret_cast<Word>(instead)};
}

}  // namespace

std::string take_calls(const std::string& library, const char* getter, TakenCalls& calls) {
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
  Parts found{reinterpret_cast<Address>(get)};
  ::dl_iterate_phdr(&find_parts, &found);
  const auto at = reinterpret_cast<Address>(table);
  std::size_t words = 0;
  for (const Range& range : found.writable)
    if (contains(range, at)) words = std::min(kMostWords, (range.end() - at) / sizeof(Word));
  if (words == 0) return "the table of the driver's functions is not within " + library;

  const std::array<Replacement, 6> wanted = {
      replaced("cuMemCreate", driver.cuMemCreate, &create),
      replaced("cuMemRelease", driver.cuMemRelease, &release),
      replaced("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle, &export_handle),
      replaced("cuMemMap", driver.cuMemMap, &map),
      replaced("cuMemUnmap", driver.cuMemUnmap, &unmap),
      replaced("cuMemSetAccess", driver.cuMemSetAccess, &set_access),
  };
  std::array<Word*, wanted.size()> places{};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    for (std::size_t word = 0; word < words; ++word) {
      if (table[word] != wanted[i].original) continue;
      if (places[i] != nullptr) return std::string("the table has ") + wanted[i].name + " twice";
      places[i] = &table[word];
    }
    if (places[i] == nullptr) return std::string("the table has no ") + wanted[i].name;
  }
  callers = found.code;
  taken = &calls;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    std::atomic_ref<Word>(*places[i]).store(wanted[i].instead, std::memory_order_release);
  return "";
}

}  // namespace memsaver
