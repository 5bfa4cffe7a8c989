#include "cuda_api.h"

#include <dlfcn.h>

#include "driver.h"

namespace memsaver::cuda {
namespace {

using GetProcAddress = Result (*)(const char*, void**, int, unsigned long long, int*);

Api load() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
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

struct Nvml {
  int (*init)() = nullptr;
  int (*device_by_uuid)(const char*, void**) = nullptr;
  int (*running)(void*, unsigned*, NvmlProcess*) = nullptr;
  bool usable = false;

  Nvml() {
    void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return;
    init = reinterpret_cast<decltype(init)>(::dlsym(library, "nvmlInit_v2"));
    device_by_uuid = reinterpret_cast<decltype(device_by_uuid)>(::dlsym(library, "nvmlDeviceGetHandleByUUID"));
    running = reinterpret_cast<decltype(running)>(::dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"));
    usable = init != nullptr && device_by_uuid != nullptr && running != nullptr && init() == 0;
  }
};

}  // namespace

const Api& api() {
  static const Api loaded = load();
  return loaded;
}

bool loses_context(Result code) {
  switch (code) {
    case kDeinitialized:
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
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
      return true;
    default: return false;
  }
}

std::vector<ProcessUse> compute_processes(const std::string& uuid) {
  static const Nvml nvml;
  void* device = nullptr;
  if (!nvml.usable || nvml.device_by_uuid(uuid.c_str(), &device) != 0) return {};
  std::vector<NvmlProcess> rows(256);
  auto count = static_cast<unsigned>(rows.size());
  if (nvml.running(device, &count, rows.data()) != 0) return {};
  std::vector<ProcessUse> found;
  constexpr auto kUnknown = static_cast<unsigned long long>(-1);
  for (unsigned i = 0; i < count; ++i)
    found.push_back({static_cast<int>(rows[i].pid), rows[i].used_bytes == kUnknown ? 0 : rows[i].used_bytes});
  return found;
}

}  // namespace memsaver::cuda
