// GPUs without a GPU: libcuda.so.1 and libnvidia-ml.so.1 over host devices (csrc/host), for programs that find this
// file under these names in their LD_LIBRARY_PATH (tests/gpus.py). Calls that are not here are those of the host
// devices.
//
// MEMSAVER_TEST_CORE: the core's library. MEMSAVER_TEST_GPUS: the GPUs, each with its bytes and its options, separated
// by ";": "1073741824 fabric=1;1075838976". It may grow and change while the program runs.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/ranges.h"
#include "controls.h"

namespace {

using namespace memsaver;
using namespace memsaver::cuda;
using Flags = unsigned long long;

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kNotFound = 500, kUnknownError = 999;
constexpr std::size_t kPage = std::size_t{2} << 20;

void* core_table(const char* name) {
  static const auto find = [] {
    const char* path = std::getenv("MEMSAVER_TEST_CORE");
    void* core = path != nullptr ? ::dlopen(path, RTLD_NOW) : nullptr;  // the one that Python loads, or has loaded
    if (core == nullptr) {
      std::fprintf(stderr, "MEMSAVER_TEST_CORE is %s\n", path != nullptr ? ::dlerror() : "not set");
      std::abort();
    }
    return reinterpret_cast<controls::FindTable>(::dlsym(core, "memsaver_table"));
  }();
  return find(name);
}

bool gpu_may_access(Device number, DevicePointer address, std::size_t size);

const host::Calls& host_calls() {
  static const host::Calls& calls = [&]() -> host::Calls& {
    controls::may_access = &gpu_may_access;
    return controls::install(&core_table);
  }();
  return calls;
}

const Platform& host_platform() { return *static_cast<Platform*>(core_table("platform")); }

struct Gpu {
  std::size_t bytes;
  std::map<std::string, std::string> options;
};

struct Mapping {
  std::size_t size;
  AllocationHandle handle;
  std::set<Device> access;  // ordinals
};

std::mutex numbering;
std::map<Device, Device> ordinal_of;  // by the number of the host device
std::mutex mutex;
std::map<Context, Device> ordinals;  // of contexts that were retained
std::map<Device, int> retained;
std::map<Device, AllocationHandle> context_memory;
std::map<DevicePointer, Mapping> mapped;
std::map<AllocationHandle, AllocationProp> created;
std::map<DevicePointer, std::size_t> allocated;  // by cuMemAlloc
std::size_t most_unmapped = 0;                   // chunks by the next cuMemUnmap of more; 0: all

std::vector<Gpu> gpus() {
  static std::mutex parsing;
  static std::string known;
  static std::vector<Gpu> all;
  const std::lock_guard lock(parsing);
  const char* text = std::getenv("MEMSAVER_TEST_GPUS");
  if (text == nullptr || known == text) return all;
  all.clear();
  known = text;
  std::istringstream entries(known);
  for (std::string entry; std::getline(entries, entry, ';');) {
    std::istringstream words(entry);
    Gpu gpu{};
    words >> gpu.bytes;
    for (std::string word; words >> word;)
      gpu.options[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    all.push_back(std::move(gpu));
  }
  return all;
}

bool exists(Device ordinal) { return ordinal >= 0 && static_cast<std::size_t>(ordinal) < gpus().size(); }

std::string text_option(Device ordinal, const char* name) {
  const std::vector<Gpu> all = gpus();
  const auto& options = all.at(static_cast<std::size_t>(ordinal)).options;
  const auto found = options.find(name);
  return found == options.end() ? "" : found->second;
}

long option(Device ordinal, const char* name, long otherwise = 0) {
  const std::string text = text_option(ordinal, name);
  return text.empty() ? otherwise : std::strtol(text.c_str(), nullptr, 10);
}

// The number of the host device.
Device number_of(Device ordinal) {
  const Device number = host_calls().open(gpus().at(static_cast<std::size_t>(ordinal)).bytes);
  const std::lock_guard lock(numbering);
  ordinal_of[number] = ordinal;
  return number;
}

Device ordinal_here() {
  Context context = nullptr;
  if (host_calls().cuCtxPopCurrent(&context) != kSuccess) return -1;
  host_calls().cuCtxPushCurrent(context);
  const std::lock_guard lock(mutex);
  const auto found = ordinals.find(context);
  return found == ordinals.end() ? -1 : found->second;
}

bool may_access_locked(Device ordinal, DevicePointer address, std::size_t size) {
  std::size_t end = address;
  for (const auto& [begin, mapping] : overlapping(mapped, {address, size})) {
    if (begin > end || !mapping.access.contains(ordinal)) return false;
    end = begin + mapping.size;
  }
  return end >= address + size;
}

bool gpu_may_access(Device number, DevicePointer address, std::size_t size) {
  Device ordinal = -1;
  {
    const std::lock_guard lock(numbering);
    if (const auto found = ordinal_of.find(number); found != ordinal_of.end()) ordinal = found->second;
  }
  const std::lock_guard lock(mutex);
  return ordinal < 0 || may_access_locked(ordinal, address, size);  // -1: the device "cpu"
}

// The bytes of memory that this process holds on a GPU, as NVML lists them.
std::size_t own_bytes(Device ordinal) {
  for (const Holding& each : host_platform().holdings(number_of(ordinal)))
    if (each.pid == ::getpid()) return each.bytes;
  return 0;
}

std::size_t free_bytes(Device ordinal) {
  const std::size_t free = host_platform().free_memory(number_of(ordinal)).value_or(0);
  return free - std::min(free, static_cast<std::size_t>(option(ordinal, "occupied")));
}

}  // namespace

extern "C" {

Result cuDeviceGetCount(int* count) {
  *count = static_cast<int>(gpus().size());
  return kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return exists(ordinal) ? kSuccess : kInvalidDevice;
}

Result cuDeviceGetUuid(Uuid* uuid, Device device) { return host_calls().cuDeviceGetUuid(uuid, number_of(device)); }

Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

Result cuDeviceGetName(char* name, int size, Device device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Test GPU%s", option(device, "mig") != 0 ? " MIG 1g.10gb" : "");
  return kSuccess;
}

Result cuDeviceTotalMem(std::size_t* bytes, Device device) {
  return host_calls().cuDeviceTotalMem(bytes, number_of(device));
}

Result cuDeviceGetAttribute(int* value, int which, Device device) {
  constexpr int kMultiprocessors = 16, kThreads = 39, kNode = 131;
  const long node = option(device, "numa", -1);
  switch (which) {
    case kMultiprocessors: *value = 132; return kSuccess;
    case kThreads: *value = 2048; return kSuccess;
    case kAttributeVirtualMemory: *value = option(device, "virtual_memory", 1) != 0; return kSuccess;
    case kAttributePosixFd: *value = option(device, "exports", 1) != 0; return kSuccess;
    case kAttributeFabric: *value = option(device, "fabric") == 1; return kSuccess;
    case kAttributeRdma: *value = 1; return kSuccess;
    case kAttributeNumaConfig: *value = node >= 0; return kSuccess;
    case kAttributeMps:
      *value = option(device, "mps") != 0;
      return option(device, "mps") < 0 ? kInvalidValue : kSuccess;
    case kNode: *value = static_cast<int>(node); return kSuccess;
    default: return host_calls().cuDeviceGetAttribute(value, which, number_of(device));
  }
}

Result cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  const std::string reach = "," + text_option(device, "reach") + ",";
  *can = device != peer && reach.find("," + std::to_string(peer) + ",") != std::string::npos;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  if (!exists(device)) return kInvalidDevice;
  if (const Result code = host_calls().cuDevicePrimaryCtxRetain(context, number_of(device)); code != kSuccess)
    return code;
  const std::lock_guard lock(mutex);
  const auto bytes = static_cast<std::size_t>(option(device, "context"));
  if (retained[device] == 0 && bytes > 0) {
    const AllocationProp properties{kAllocationPinned, 0, {kLocationDevice, number_of(device)}, nullptr, {}};
    if (const Result code = host_calls().cuMemCreate(&context_memory[device], bytes, &properties, 0); code != kSuccess)
      return code;
  }
  ++retained[device];
  ordinals[*context] = device;
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease(Device device) {
  const std::lock_guard lock(mutex);
  if (--retained[device] == 0 && context_memory.contains(device)) {
    host_calls().cuMemRelease(context_memory[device]);
    context_memory.erase(device);
  }
  return kSuccess;
}

Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  const Result code = host_calls().cuDevicePrimaryCtxGetState(number_of(device), flags, active);
  const std::lock_guard lock(mutex);
  *active = retained[device] > 0;
  return code;
}

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
  const Result code = host_calls().cuMemGetInfo(free, total);
  const Device here = ordinal_here();
  if (code == kSuccess && here >= 0) *free = free_bytes(here);
  return code;
}

Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* properties, int) {
  *bytes = static_cast<std::size_t>(option(properties->location.id, "granularity", kPage));
  return kSuccess;
}

// Options: exports=0: no descriptors. refusal: the code for a handle with a descriptor. fabric: 1, or the code for a
// handle of this type.
Result cuMemCreate(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags flags) {
  const Device device = properties->location.id;
  if (!exists(device)) return kInvalidDevice;
  const bool exports = (properties->handle_types & kHandlePosixFd) != 0;
  const long fabric = option(device, "fabric", kNotSupported);
  if ((properties->handle_types & kHandleFabric) != 0 && fabric != 1) return static_cast<Result>(fabric);
  const long refusal = option(device, "refusal", option(device, "exports", 1) != 0 ? kSuccess : kNotSupported);
  if (exports && refusal != kSuccess) return static_cast<Result>(refusal);
  if (option(device, "occupied") > 0 && size > free_bytes(device)) return kOutOfMemory;
  AllocationProp wanted = *properties;
  wanted.handle_types &= kHandlePosixFd;
  wanted.location.id = number_of(device);
  const Result code = host_calls().cuMemCreate(handle, size, &wanted, flags);
  const std::lock_guard lock(mutex);
  if (code == kSuccess) created[*handle] = *properties;
  return code;
}

Result cuMemMap(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags flags) {
  const Result code = host_calls().cuMemMap(address, size, offset, handle, flags);
  const std::lock_guard lock(mutex);
  if (code == kSuccess) mapped[address] = {size, handle, {}};
  return code;
}

Result cuMemSetAccess(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  const Result code = host_calls().cuMemSetAccess(address, size, access, count);
  const std::lock_guard lock(mutex);
  if (code != kSuccess) return code;
  for (auto& [begin, mapping] : overlapping(mapped, {address, size}))
    for (std::size_t i = 0; i < count; ++i) mapping.access.insert(access[i].location.id);
  return code;
}

Result cuMemUnmap(DevicePointer address, std::size_t size) {
  bool stops = false;
  {
    const std::lock_guard lock(mutex);
    const auto first = mapped.lower_bound(address), last = mapped.lower_bound(address + size);
    stops = most_unmapped > 0 && static_cast<std::size_t>(std::distance(first, last)) > most_unmapped;
    if (stops) size = std::next(first, static_cast<int>(std::exchange(most_unmapped, 0)))->first - address;
  }
  const Result code = host_calls().cuMemUnmap(address, size);
  const std::lock_guard lock(mutex);
  if (code == kSuccess) mapped.erase(mapped.lower_bound(address), mapped.lower_bound(address + size));
  return code == kSuccess && stops ? kUnknownError : code;
}

Result cuMemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t size, Stream stream) {
  const Device here = ordinal_here();
  {
    const std::lock_guard lock(mutex);
    if (here >= 0 && !(may_access_locked(here, to, size) && may_access_locked(here, from, size))) to = 0;  // illegal
  }
  return host_calls().cuMemcpyDtoDAsync(to, from, size, stream);
}

Result cuMemAlloc(DevicePointer* address, std::size_t size) {
  if (controls_forbids("cuMemAlloc") != 0) return kStreamIsCapturing;
  const AllocationProp properties{kAllocationPinned, 0, {kLocationDevice, ordinal_here()}, nullptr, {}};
  const AccessDesc access{properties.location, kAccessReadWrite};
  size = (size + kPage - 1) / kPage * kPage;
  AllocationHandle handle = 0;
  Result code = cuMemCreate(&handle, size, &properties, 0);
  if (code != kSuccess) return code;
  code = host_calls().cuMemAddressReserve(address, size, 0, 0, 0);
  if (code == kSuccess) code = cuMemMap(*address, size, 0, handle, 0);
  if (code == kSuccess) code = cuMemSetAccess(*address, size, &access, 1);
  host_calls().cuMemRelease(handle);  // the mapping keeps the memory
  const std::lock_guard lock(mutex);
  if (code == kSuccess) allocated[*address] = size;
  return code;
}

Result cuMemFree(DevicePointer address) {
  if (controls_forbids("cuMemFree") != 0) return kStreamIsCapturing;
  if (const Result code = host_calls().cuCtxSynchronize(); code != kSuccess) return code;
  std::size_t size = 0;
  {
    const std::lock_guard lock(mutex);
    const auto found = allocated.find(address);
    if (found == allocated.end()) return kInvalidValue;
    size = found->second;
    allocated.erase(found);
  }
  const Result code = cuMemUnmap(address, size);
  return code == kSuccess ? host_calls().cuMemAddressFree(address, size) : code;
}

Result gpus_not_supported() { return kNotSupported; }

Result cuGetProcAddress_v2(const char* name, void** entry, int version, Flags, int* found) {
  static void* const own = [] {
    Dl_info info{};
    ::dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &info);
    return ::dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *entry = ::dlsym(own, name);
#define MEMSAVER_ENTRY(call, least, ...)                                        \
  if (*entry == nullptr && std::strcmp(name, #call) == 0 && version >= (least)) \
    *entry = reinterpret_cast<void*>(host_calls().call);
  MEMSAVER_CUDA_CALLS(MEMSAVER_ENTRY, MEMSAVER_ENTRY)
#undef MEMSAVER_ENTRY
  if (std::strcmp(name, "cuCtxRecordEvent") == 0 && exists(0) && option(0, "record", 1) == 0) *entry = nullptr;
  if (std::strcmp(name, "cuLaunchHostFunc") == 0) *entry = reinterpret_cast<void*>(host_calls().cuLaunchHostFunc);
  if (std::strncmp(name, "cuGetProcAddress", 16) == 0) *entry = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  // Torch looks for these, and the device does not support them.
  for (const char* each : {"cuCtxFromGreenCtx", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevResource",
                           "cuDevSmResource", "cuDeviceGetDevResource", "cuGreenCtx", "cuLogs", "cuMemGetAddressRange",
                           "cuMemGetAllocationProperties", "cuMemsetD32", "cuMulticast", "cuStreamWriteValue32"})
    if (std::strncmp(name, each, std::strlen(each)) == 0) *entry = reinterpret_cast<void*>(&gpus_not_supported);
  *found = *entry == nullptr ? 1 : 0;  // 1: not there
  return *entry == nullptr ? kNotFound : kSuccess;
}

// NVML. The handle of a device is its ordinal and one more.

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  constexpr int kNoDevice = 6;
  for (std::size_t i = 0; i < gpus().size(); ++i) {
    const auto ordinal = static_cast<Device>(i);
    Uuid id{};
    cuDeviceGetUuid(&id, ordinal);
    if ((option(ordinal, "mig") != 0 ? "MIG-" : "GPU-") + text_of(id) != uuid) continue;
    *device = reinterpret_cast<void*>(i + 1);
    return 0;
  }
  return kNoDevice;
}

int nvmlDeviceGetMemoryInfo(void* device, NvmlMemory* memory) {
  const auto ordinal = static_cast<Device>(reinterpret_cast<std::uintptr_t>(device)) - 1;
  std::size_t total = 0;
  cuDeviceTotalMem(&total, ordinal);
  const std::size_t free = free_bytes(ordinal);
  *memory = {total, free, total - free};
  return 0;
}

// This process, if it has a context there, and those of the option "processes": "pid:bytes,...".
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, NvmlProcess* rows) {
  const auto ordinal = static_cast<Device>(reinterpret_cast<std::uintptr_t>(device)) - 1;
  std::vector<NvmlProcess> found;
  {
    const std::lock_guard lock(mutex);
    if (retained[ordinal] > 0)
      found.push_back({static_cast<unsigned>(option(ordinal, "own_pid", ::getpid())), own_bytes(ordinal), 0, 0});
  }
  std::istringstream others(text_option(ordinal, "processes"));
  char separator = 0;
  for (NvmlProcess row{}; others >> row.pid >> separator >> row.used_bytes; others >> separator) found.push_back(row);
  if (found.size() > *count) return 7;  // too few rows
  std::copy(found.begin(), found.end(), rows);
  *count = static_cast<unsigned>(found.size());
  return 0;
}

// Torch calls the following ones.

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {  // "0000:01:00.0", or a domain of eight digits
  const char* number = std::strchr(bus, ':');
  *device = reinterpret_cast<void*>(number == nullptr ? 1 : std::strtoul(number + 1, nullptr, 16));
  return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }   // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }  // not supported

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  std::memset(static_cast<char*>(info) + sizeof(unsigned), 0, 28);  // behind the version: no fabric
  return 0;
}

}  // extern "C"

namespace {

struct Retained {
  explicit Retained(Device ordinal) : device(ordinal) {
    Context context = nullptr;
    cuDevicePrimaryCtxRetain(&context, device);
    host_calls().cuCtxPushCurrent(context);
  }
  ~Retained() {
    Context context = nullptr;
    host_calls().cuCtxPopCurrent(&context);
    cuDevicePrimaryCtxRelease(device);
  }
  Retained(const Retained&) = delete;
  Retained& operator=(const Retained&) = delete;
  const Device device;
};

}  // namespace

extern "C" {

// For tests.

int gpus_number(Device ordinal) { return number_of(ordinal); }  // of the host device

int gpus_retained(Device ordinal) {
  const std::lock_guard lock(mutex);
  return retained[ordinal];
}

int gpus_may_access(Device ordinal, DevicePointer address, std::size_t size) {
  const std::lock_guard lock(mutex);
  return may_access_locked(ordinal, address, size);
}

// The GPU of the memory that is mapped at an address. -1: none.
Device gpus_device_of(DevicePointer address) {
  const std::lock_guard lock(mutex);
  const auto found = entry_at(mapped, address);
  return found == mapped.end() ? -1 : created[found->second.handle].location.id;
}

// The types for export of the memory that is mapped at an address.
int gpus_handle_types(DevicePointer address, AllocationHandle* handle) {
  if (host_calls().cuMemRetainAllocationHandle(handle, reinterpret_cast<void*>(address)) != kSuccess) return -1;
  host_calls().cuMemRelease(*handle);
  const std::lock_guard lock(mutex);
  return created[*handle].handle_types;
}

// Takes memory of a GPU without a handle, as cudaMalloc does, and gives it back.
DevicePointer gpus_take(Device ordinal, std::size_t size) {
  DevicePointer address = 0;
  const Retained context(ordinal);
  cuMemAlloc(&address, size);
  return address;
}

void gpus_give(Device ordinal, DevicePointer address) {
  const Retained context(ordinal);
  cuMemFree(address);
}

// The next cuMemUnmap() of more chunks unmaps so many of them and fails.
void gpus_stop_unmap(std::size_t chunks) {
  const std::lock_guard lock(mutex);
  most_unmapped = chunks;
}
}
