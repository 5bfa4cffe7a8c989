#include "driver/counted_calls.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutants.h"
#include "driver/cuda_api.h"
#include "driver/function_pointers.h"

namespace memsaver::counting {
namespace {

using namespace cuda;
using Flags = unsigned long long;

// Physical memory of a device. It counts as long as a handle or a mapping has it.
class Memory {
 public:
  Memory(std::atomic<std::size_t>& total, std::size_t bytes) : total_(total), bytes_(bytes) { total_ += bytes_; }
  ~Memory() { total_ -= bytes_; }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

 private:
  std::atomic<std::size_t>& total_;
  const std::size_t bytes_;
};
using Shared = std::shared_ptr<Memory>;
using Mappings = std::map<DevicePointer, std::pair<std::size_t, Shared>>;  // by address; bytes

struct Totals {
  std::atomic<std::size_t> own = 0, given = 0;
};

class Count {
 public:
  Totals& of(int ordinal) {
    const std::lock_guard lock(mutex_);
    return totals_[ordinal];
  }

  void made(AllocationHandle handle, std::size_t bytes, std::atomic<std::size_t>& total) {
    const std::lock_guard lock(mutex_);
    handles_.insert_or_assign(handle, Handle{1, std::make_shared<Memory>(total, bytes)});
  }

  // A reference of a handle, maybe its first one.
  void add(AllocationHandle handle, const Shared& memory) {
    const std::lock_guard lock(mutex_);
    ++handles_.try_emplace(handle, Handle{0, memory}).first->second.references;
  }

  // A reference of the handle of a mapping. Its number may be a new one.
  void retain(AllocationHandle handle, DevicePointer address) {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(handle);
    if (found != handles_.end()) {
      ++found->second.references;
      return;
    }
    const auto next = mappings_.upper_bound(address);
    if (next == mappings_.begin()) return;
    const auto& [begin, mapping] = *std::prev(next);
    if (address < begin + mapping.first) handles_.emplace(handle, Handle{1, mapping.second});
  }

  // Drops a reference of a handle. Null if the memory does not count.
  Shared drop(AllocationHandle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(handle);
    if (found == handles_.end()) return nullptr;
    Shared memory = found->second.memory;
    if (--found->second.references == 0) handles_.erase(found);
    return memory;
  }

  void map(DevicePointer address, std::size_t size, AllocationHandle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(handle);
    if (found != handles_.end()) mappings_.insert_or_assign(address, std::pair(size, found->second.memory));
  }

  Mappings unmap(DevicePointer address, std::size_t size) {
    const std::lock_guard lock(mutex_);
    Mappings gone;
    for (auto each = mappings_.lower_bound(address); each != mappings_.end() && each->first < address + size;)
      gone.insert(mappings_.extract(each++));
    return gone;
  }

  void restore(Mappings&& mappings) {
    const std::lock_guard lock(mutex_);
    mappings_.merge(mappings);
  }

 private:
  struct Handle {
    int references;
    Shared memory;
  };
  std::mutex mutex_;  // no driver call is made under it
  std::map<int, Totals> totals_;
  std::unordered_map<AllocationHandle, Handle> handles_;
  Mappings mappings_;
};

Count& count() {
  static auto* only = new Count;  // the library may call at the exit of the process
  return *only;
}

Range giver_code{0, 0};  // written before the words are replaced

// Notes the effect of a call. The memory of a call that cannot be noted does not count.
template <typename Act>
void note(Act act) {
  try {
    act();
  } catch (const std::bad_alloc&) {
  }
}

Result create(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  const auto from = reinterpret_cast<Address>(__builtin_return_address(0));
  const Result code = api().cuMemCreate(handle, size, properties, flags);
  if (code == kSuccess &&
      (properties->location.type == kLocationDevice || MEMSAVER_MUTANT(memory_of_the_host_counts_on_devices)))
    note([&] {
      Totals& totals = count().of(properties->location.id);
      count().made(*handle, size, contains(giver_code, from) ? totals.given : totals.own);
    });
  return code;
}

Result release(AllocationHandle handle) {
  const Shared memory = count().drop(handle);  // before the call: the driver may give out the number again
  const Result code = api().cuMemRelease(handle);
  if (code != kSuccess && memory != nullptr && !MEMSAVER_MUTANT(failed_releases_count))
    note([&] { count().add(handle, memory); });
  return code;
}

Result map(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  const Result code = api().cuMemMap(address, size, offset, handle, flags);
  if (code == kSuccess && !MEMSAVER_MUTANT(mappings_do_not_count)) note([&] { count().map(address, size, handle); });
  return code;
}

Result unmap(DevicePointer address, std::size_t size) {
  Mappings gone = count().unmap(address, size);  // before the call, like a release
  const Result code = api().cuMemUnmap(address, size);
  if (code != kSuccess) count().restore(std::move(gone));
  return code;
}

Result retain(AllocationHandle* handle, void* address) {
  const Result code = api().cuMemRetainAllocationHandle(handle, address);
  if (code == kSuccess)
    note([&] { count().retain(*handle, static_cast<DevicePointer>(reinterpret_cast<Address>(address))); });
  return code;
}

Range code_of(void* function) {
  Dl_info info{};
  void* symbol = nullptr;
  if (::dladdr1(function, &info, &symbol, RTLD_DL_SYMENT) == 0 || symbol == nullptr) return {0, 0};
  return {reinterpret_cast<Address>(function),
          static_cast<std::size_t>(static_cast<const ElfW(Sym)*>(symbol)->st_size)};
}

}  // namespace
}  // namespace memsaver::counting

namespace memsaver {

std::string count_calls(const std::string& library, const char* giver) {
  const cuda::Api& driver = cuda::api();
  void* opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) return library + " is not loaded";
  void* function = ::dlsym(opened, giver);
  if (function == nullptr) return library + " has no function " + giver;
  FunctionPointers words;
  words.add("cuMemRelease", driver.cuMemRelease, &counting::release);
  words.add("cuMemMap", driver.cuMemMap, &counting::map);
  words.add("cuMemUnmap", driver.cuMemUnmap, &counting::unmap);
  words.add("cuMemRetainAllocationHandle", driver.cuMemRetainAllocationHandle, &counting::retain);
  words.add("cuMemCreate", driver.cuMemCreate, &counting::create);  // last: nothing is created before it can be freed
  const LibraryParts parts = parts_of(reinterpret_cast<Address>(function));
  if (std::string reason = words.find(parts.writable, library); !reason.empty()) return reason;
  counting::giver_code = counting::code_of(function);
  words.replace();
  return "";
}

CountedBytes counted_bytes(int ordinal) {
  const counting::Totals& totals = counting::count().of(ordinal);
  return {totals.own, totals.given};
}

}  // namespace memsaver
