#include "driver/cuda_api.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
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
    if (code == kSuccess && entry != nullptr) return entry;
    if (required) throw DriverError("cuGetProcAddress", code, std::string("the driver has no ") + name);
    return static_cast<void*>(nullptr);
  };
#define MEMSAVER_REQUIRED(name, version, ...) \
  api.name = reinterpret_cast<Result (*)(__VA_ARGS__)>(find(#name, version, true));
#define MEMSAVER_OPTIONAL(name, version, ...) \
  api.name = reinterpret_cast<Result (*)(__VA_ARGS__)>(find(#name, version, false));
  MEMSAVER_CUDA_CALLS(MEMSAVER_REQUIRED, MEMSAVER_OPTIONAL)
#undef MEMSAVER_REQUIRED
#undef MEMSAVER_OPTIONAL
  const Result code = api.cuInit(0);
  if (code != kSuccess) {
    const char* text = nullptr;
    api.cuGetErrorString(code, &text);
    throw DriverError("cuInit", code, text != nullptr ? text : "unknown error");
  }
  return api;
}

// NVML's structure for one process, second version.
struct NvmlProcess {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance;
  unsigned compute_instance;
};

struct NvmlMemory {
  unsigned long long total, free, used;
};

struct Nvml {
  int (*init)() = nullptr;
  int (*device_by_uuid)(const char*, void**) = nullptr;
  int (*running)(void*, unsigned*, NvmlProcess*) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;
  bool usable = false;

  Nvml() {
    void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return;
    init = reinterpret_cast<decltype(init)>(::dlsym(library, "nvmlInit_v2"));
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

// True for the codes after which every call on the context fails.
bool loses_context(Result code) {
  switch (code) {
    case kDeinitialized:
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 226:  // error contained by the GPU
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context destroyed
    case 710:  // device-side assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 721:  // tensor memory leak
    case 810:  // MPS client terminated by its server
    case 911:  // error in an external device
      return true;
    default: return false;
  }
}

// NVML's list of the processes that compute on the device, with their device memory in bytes.
std::vector<Process> processes(Device gpu) {
  void* device = nvml_device(uuid_of(platform(), gpu));
  if (device == nullptr) return {};
  std::vector<NvmlProcess> rows(256);
  auto count = static_cast<unsigned>(rows.size());
  if (nvml().running(device, &count, rows.data()) != 0) return {};
  std::vector<Process> found;
  constexpr auto kUnknown = static_cast<unsigned long long>(-1);
  for (unsigned i = 0; i < count; ++i)
    found.push_back({static_cast<int>(rows[i].pid), rows[i].used_bytes == kUnknown ? 0 : rows[i].used_bytes});
  return found;
}

std::vector<int> computing(Device gpu) {
  std::vector<int> pids;
  for (const Process& each : processes(gpu)) pids.push_back(each.pid);
  return pids;
}

std::vector<Holding> holdings(Device gpu) {
  std::vector<Holding> found;
  for (const Process& each : processes(gpu))
    if (each.bytes > 0) found.push_back({each.pid, each.bytes, std::nullopt});  // 0: NVML does not tell
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
  static const Platform only = {.api = api(),
                                .uuid_prefix = kUuidPrefix,
                                .is_gpu = true,
                                .lists_all = false,
                                .free_memory = &free_memory,
                                .processes = &processes,
                                .computing = &computing,
                                .holdings = &holdings,
                                .adopt = nullptr};
  return only;
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
  const Api& api = cuda::api();
  int count = 0;
  check(api, "cuDeviceGetCount", api.cuDeviceGetCount(&count));
  const std::string name = "cuda:" + std::to_string(ordinal);
  if (ordinal < 0 || ordinal >= count)
    throw BadArgument("device is '" + name + "', expected one of the " + std::to_string(count) +
                      " visible CUDA devices");
  Device device = 0;
  check(api, "cuDeviceGet", api.cuDeviceGet(&device, ordinal));
  if (attribute_of(api, device, kAttributeVirtualMemory) == 0)
    throw DriverError("cuDeviceGetAttribute", kNotSupported, name + " does not support virtual memory management");
  return device;
}

std::string uuid_of(const Platform& platform, Device device) {
  const Api& api = platform.api;
  Uuid id{};
  check(api, "cuDeviceGetUuid", api.cuDeviceGetUuid(&id, device));
  std::string text(platform.uuid_prefix);
  for (int i = 0; i < 16; ++i) {
    char byte[3];
    std::snprintf(byte, sizeof byte, "%02x", id.bytes[i]);
    text += byte;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
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

bool any_is_numa_node(const Api& api) {
  int count = 0;
  check(api, "cuDeviceGetCount", api.cuDeviceGetCount(&count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device = 0;
    check(api, "cuDeviceGet", api.cuDeviceGet(&device, ordinal));
    int is_node = 0;  // drivers before 12.2 lack the attribute and do not support such machines
    if (api.cuDeviceGetAttribute(&is_node, kAttributeNumaConfig, device) == kSuccess && is_node == 1) return true;
  }
  return false;
}

bool refuses_handle_type(Result code) {
  constexpr Result kUnknownType = 1, kNotPermitted = 800;
  return code == kUnknownType || code == kNotPermitted || code == kNotSupported;
}

AllocationHandle import_posix(const Api& api, int file) {
  AllocationHandle handle = 0;
  void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(file));
  check(api, "cuMemImportFromShareableHandle", api.cuMemImportFromShareableHandle(&handle, as_pointer, kHandlePosixFd));
  return handle;
}

AllocationProp chunk_properties(const Api& api, Device device, const std::string& name, bool exportable) {
  AllocationProp properties{};
  properties.type = kAllocationPinned;
  properties.handle_types = exportable ? kHandlePosixFd : 0;
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
