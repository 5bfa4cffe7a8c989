#include "driver/cuda_api.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>

#include "driver/driver.h"

namespace memsaver::cuda {
namespace {

constexpr const char* kUuidPrefix = "GPU-";

using GetProcAddress = Result (*)(const char*, void**, int, unsigned long long, int*);

Api load() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    const char* reason = ::dlerror();
    throw DriverError("dlopen", -1, reason != nullptr ? reason : "libcuda.so.1 cannot be opened");
  }
  const auto look_up = reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
  if (look_up == nullptr)
    throw DriverError("dlsym", -1, "the driver has no cuGetProcAddress_v2: it is older than CUDA 12, which is needed");
  Api api;
  const auto find = [&](const char* name, int version, bool required) {
    void* entry = nullptr;
    int found = 0;
    const Result code = look_up(name, &entry, version, 0, &found);
    if (required && entry == nullptr)
      throw DriverError("cuGetProcAddress", code, std::string("the driver has no ") + name);
    return entry;  // null where it fails
  };
#define MEMSAVER_REQUIRED(name, version, ...) \
  api.name = reinterpret_cast<Result (*)(__VA_ARGS__)>(find(#name, version, true));
#define MEMSAVER_OPTIONAL(name, version, ...) \
  api.name = reinterpret_cast<Result (*)(__VA_ARGS__)>(find(#name, version, false));
  MEMSAVER_CUDA_CALLS(MEMSAVER_REQUIRED, MEMSAVER_OPTIONAL)
#undef MEMSAVER_REQUIRED
#undef MEMSAVER_OPTIONAL
  check(api, "cuInit", api.cuInit(0));
  return api;
}

struct Nvml {
  int (*device_by_uuid)(const char*, void**) = nullptr;
  int (*running)(void*, unsigned*, NvmlProcess*) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;
  bool usable = false;

  Nvml() {
    void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlInit_v2"));
    device_by_uuid = reinterpret_cast<decltype(device_by_uuid)>(::dlsym(library, "nvmlDeviceGetHandleByUUID"));
    running = reinterpret_cast<decltype(running)>(::dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"));
    memory = reinterpret_cast<decltype(memory)>(::dlsym(library, "nvmlDeviceGetMemoryInfo"));
    usable = memory != nullptr && init != nullptr && device_by_uuid != nullptr && running != nullptr && init() == 0;
  }
};

const Nvml& nvml() {
  static const Nvml loaded;
  return loaded;
}

// Null if NVML is missing or has no such device. NVML names a part of a GPU (MIG) with another prefix.
void* nvml_device(const std::string& uuid) {
  if (!nvml().usable) return nullptr;
  void* device = nullptr;
  for (const char* prefix : {"GPU-", "MIG-"})
    if (nvml().device_by_uuid((prefix + uuid.substr(std::strlen(kUuidPrefix))).c_str(), &device) == 0) return device;
  return nullptr;
}

// The cause of a code that the driver's text does not tell.
const char* cause(std::string_view call, Result code) {
  if (code == kStreamIsCapturing)
    return ". A CUDA graph is being captured that torch did not begin, and the call breaks it: announce such captures "
           "by memsaver.capturing()";
  if (code != ChunkUnavailable::kCode) return "";
  if (call == "cuMemAddressReserve") return ". The process has no such range of addresses left";
  if (call == "cuMemMap" || call == "cuMemSetAccess") return ". The device has no memory left for page tables";
  if (call == "cuEventCreate" || call == "cuStreamCreate") return ". The driver has no memory left for it";
  return "";
}

// After these codes every call on the context fails: deinitialised, uncorrectable errors of memory and NVLink, an error
// that the GPU contained, an illegal address, a launch timeout, a context that was destroyed, an assertion, errors of
// stack, instruction, alignment, address space and program counter, a failed launch, a leak of tensor memory, an MPS
// client that its server ended, and an error in an external device.
bool loses_context(Result code) {
  static constexpr Result kLost[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
  return std::find(std::begin(kLost), std::end(kLost), code) != std::end(kLost);
}

// NVML's list of the processes that compute on the device, with their device memory. Which part of it is imported is
// not known.
std::vector<Holding> holdings(Device gpu) {
  void* device = nvml_device(uuid_of(platform(), gpu));
  if (device == nullptr) return {};
  constexpr int kTooFewRows = 7;
  std::vector<NvmlProcess> rows(256);
  auto count = static_cast<unsigned>(rows.size());
  int code = 0;
  while ((code = nvml().running(device, &count, rows.data())) == kTooFewRows) {
    rows.resize(2 * rows.size());
    count = static_cast<unsigned>(rows.size());
  }
  if (code != 0) return {};
  std::vector<Holding> found;
  constexpr auto kUnknown = static_cast<unsigned long long>(-1);
  for (unsigned i = 0; i < count; ++i)
    found.push_back({static_cast<int>(rows[i].pid), rows[i].used_bytes == kUnknown ? 0 : rows[i].used_bytes, {}});
  return found;
}

std::optional<std::size_t> free_memory(Device gpu) {
  NvmlMemory figures{};
  void* device = nvml_device(uuid_of(platform(), gpu));
  if (device == nullptr || nvml().memory(device, &figures) != 0) return std::nullopt;
  return figures.free;
}

}  // namespace

Api& api() {
  static Api loaded = load();
  return loaded;
}

const Platform& platform() {
  static const Platform only = {
      .api = api(), .uuid_prefix = kUuidPrefix, .is_gpu = true, .free_memory = &free_memory, .holdings = &holdings};
  return only;
}

std::vector<Holding> known_holdings(const Platform& platform, Device device) {
  std::vector<Holding> found = platform.holdings(device);
  std::erase_if(found, [](const Holding& each) { return each.bytes == 0; });
  return found;
}

void check(const Api& api, const char* call, Result code) {
  if (code == kSuccess) return;
  const char* found = nullptr;
  if (api.cuGetErrorString(code, &found) != kSuccess || found == nullptr) found = "unknown error";
  const std::string text = found;
  if (code == ChunkUnavailable::kCode && std::string_view(call) == "cuMemCreate") throw ChunkUnavailable(call, text);
  throw DriverError(call, code, text + cause(call, code), loses_context(code));
}

Device device_at(int ordinal) {
  const std::vector<Device> all = all_devices(api());
  const std::string name = "cuda:" + std::to_string(ordinal);
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= all.size())
    throw BadArgument("device is '" + name + "', expected one of the " + std::to_string(all.size()) +
                      " visible CUDA devices");
  return all[static_cast<std::size_t>(ordinal)];
}

std::string uuid_of(const Platform& platform, Device device) {
  const Api& api = platform.api;
  Uuid id{};
  check(api, "cuDeviceGetUuid", api.cuDeviceGetUuid(&id, device));
  return platform.uuid_prefix + text_of(id);
}

std::size_t total_memory(const Api& api, Device device) {
  std::size_t bytes = 0;
  check(api, "cuDeviceTotalMem", api.cuDeviceTotalMem(&bytes, device));
  return bytes;
}

int attribute_of(const Api& api, Device device, int which) {
  int value = 0;
  check(api, "cuDeviceGetAttribute", api.cuDeviceGetAttribute(&value, which, device));
  return value;
}

std::vector<Device> all_devices(const Api& api) {
  int count = 0;
  check(api, "cuDeviceGetCount", api.cuDeviceGetCount(&count));
  std::vector<Device> found(static_cast<std::size_t>(count));
  for (int ordinal = 0; ordinal < count; ++ordinal)
    check(api, "cuDeviceGet", api.cuDeviceGet(&found[static_cast<std::size_t>(ordinal)], ordinal));
  return found;
}

bool any_is_numa_node(const Api& api) {
  const std::vector<Device> all = all_devices(api);
  return std::any_of(all.begin(), all.end(), [&](Device device) {
    int is_node = 0;  // drivers before 12.2 lack the attribute and do not support such machines
    return api.cuDeviceGetAttribute(&is_node, kAttributeNumaConfig, device) == kSuccess && is_node == 1;
  });
}

bool refuses_handle_type(Result code) {
  constexpr Result kUnknownType = 1, kNotPermitted = 800;
  return code == kUnknownType || code == kNotPermitted || code == kNotSupported;
}

AllocationProp chunk_properties(const Api& api, Device device, const std::string& name, int handle_types) {
  if (attribute_of(api, device, kAttributeVirtualMemory) == 0)
    throw DriverError("cuDeviceGetAttribute", kNotSupported, name + " does not support virtual memory management");
  AllocationProp properties{};
  properties.type = kAllocationPinned;
  properties.handle_types = handle_types;
  properties.location = {kLocationDevice, device};  // a CUdevice is the ordinal among the visible devices
  properties.flags.gpu_direct_rdma = attribute_of(api, device, kAttributeRdma) != 0 ? 1 : 0;
  std::size_t unit = 0;
  check(api, "cuMemGetAllocationGranularity",
        api.cuMemGetAllocationGranularity(&unit, &properties, kGranularityMinimum));
  if (unit != kPage)
    throw DriverError(
        "cuMemGetAllocationGranularity", kNotSupported,
        name + " maps memory in units of " + std::to_string(unit) + " bytes, expected " + std::to_string(kPage));
  return properties;
}

}  // namespace memsaver::cuda
