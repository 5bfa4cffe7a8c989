// The part of CUDA's driver API that memsaver calls. It is declared here, so that the build needs no CUDA toolkit.
//
// libcuda.so.1 is opened at first use. Each entry point is looked up by the API version of the signature below, so that
// one build works with every driver from CUDA 12 on.
#pragma once

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace memsaver::cuda {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr Result kNotSupported = 801;
constexpr Result kStreamIsCapturing = 900;

struct Location {
  int type;
  int id;
};
struct AllocationProp {
  int type;
  int handle_types;
  Location location;
  void* win32_meta;
  struct {
    unsigned char compression;
    unsigned char gpu_direct_rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDesc {
  Location location;
  int flags;
};
struct Uuid {
  unsigned char bytes[16];
};
static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12 && sizeof(Uuid) == 16, "the driver's layout");

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

inline std::string text_of(const Uuid& id) {
  std::string text;
  for (int i = 0; i < 16; ++i) {
    char byte[3];
    std::snprintf(byte, sizeof byte, "%02x", id.bytes[i]);
    text += byte;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

constexpr int kLocationDevice = 1;
constexpr int kAllocationPinned = 1;
constexpr int kHandlePosixFd = 1, kHandleFabric = 8;
constexpr int kAccessReadWrite = 3;
constexpr int kAttributePosixFd = 103;
constexpr int kAttributeFabric = 128;
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributeRdma = 110;
constexpr int kAttributeNumaConfig = 130;
constexpr int kAttributeMps = 133;
constexpr int kAttributeHostNode = 134;
constexpr int kStreamNonBlocking = 1;
constexpr int kEventBlockingSync = 1;
constexpr int kEventDisableTiming = 2;
constexpr int kHostRegisterPortable = 1;
constexpr int kCaptureRelaxed = 2;
constexpr int kGranularityMinimum = 0;

// name, API version of the signature, arguments. Optional ones are null on drivers older than their version.
// clang-format off
#define MEMSAVER_CUDA_CALLS(required, optional)                                                                    \
  required(cuInit, 2000, unsigned)                                                                                 \
  required(cuGetErrorString, 6000, Result, const char**)                                                           \
  required(cuDriverGetVersion, 2020, int*)                                                                         \
  required(cuDeviceGetCount, 2000, int*)                                                                           \
  required(cuDeviceGetName, 2000, char*, int, Device)                                                              \
  required(cuDeviceGet, 2000, Device*, int)                                                                        \
  required(cuDeviceGetUuid, 11040, Uuid*, Device)                                                                  \
  required(cuDeviceGetAttribute, 2000, int*, int, Device)                                                          \
  required(cuDeviceTotalMem, 3020, std::size_t*, Device)                                                           \
  required(cuDeviceCanAccessPeer, 4000, int*, Device, Device)                                                      \
  required(cuDevicePrimaryCtxRetain, 7000, Context*, Device)                                                       \
  required(cuDevicePrimaryCtxRelease, 11000, Device)                                                               \
  required(cuDevicePrimaryCtxGetState, 7000, Device, unsigned*, int*)                                              \
  required(cuCtxPushCurrent, 4000, Context)                                                                        \
  required(cuCtxPopCurrent, 4000, Context*)                                                                        \
  required(cuCtxSynchronize, 2000)                                                                                 \
  optional(cuCtxRecordEvent, 12050, Context, Event)                                                                \
  required(cuThreadExchangeStreamCaptureMode, 10010, int*)                                                         \
  required(cuMemGetInfo, 3020, std::size_t*, std::size_t*)                                                         \
  required(cuMemAlloc, 3020, DevicePointer*, std::size_t)                                                          \
  required(cuMemFree, 3020, DevicePointer)                                                                         \
  required(cuMemAddressReserve, 10020, DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long) \
  required(cuMemAddressFree, 10020, DevicePointer, std::size_t)                                                    \
  required(cuMemGetAllocationGranularity, 10020, std::size_t*, const AllocationProp*, int)                         \
  required(cuMemCreate, 10020, AllocationHandle*, std::size_t, const AllocationProp*, unsigned long long)          \
  required(cuMemRelease, 10020, AllocationHandle)                                                                  \
  required(cuMemExportToShareableHandle, 10020, void*, AllocationHandle, int, unsigned long long)                  \
  required(cuMemImportFromShareableHandle, 10020, AllocationHandle*, void*, int)                                   \
  required(cuMemMap, 10020, DevicePointer, std::size_t, std::size_t, AllocationHandle, unsigned long long)         \
  required(cuMemSetAccess, 10020, DevicePointer, std::size_t, const AccessDesc*, std::size_t)                      \
  required(cuMemRetainAllocationHandle, 11000, AllocationHandle*, void*)                                           \
  required(cuMemUnmap, 10020, DevicePointer, std::size_t)                                                          \
  required(cuMemHostRegister, 6050, void*, std::size_t, unsigned)                                                  \
  required(cuMemHostUnregister, 4000, void*)                                                                       \
  required(cuMemcpyDtoHAsync, 3020, void*, DevicePointer, std::size_t, Stream)                                     \
  required(cuMemcpyHtoDAsync, 3020, DevicePointer, const void*, std::size_t, Stream)                               \
  required(cuMemcpyDtoDAsync, 3020, DevicePointer, DevicePointer, std::size_t, Stream)                             \
  required(cuMemsetD8Async, 3020, DevicePointer, unsigned char, std::size_t, Stream)                               \
  required(cuStreamCreate, 2000, Stream*, unsigned)                                                                \
  required(cuStreamDestroy, 4000, Stream)                                                                          \
  required(cuStreamSynchronize, 2000, Stream)                                                                      \
  required(cuEventCreate, 2000, Event*, unsigned)                                                                  \
  required(cuEventRecord, 2000, Event, Stream)                                                                     \
  required(cuEventSynchronize, 2000, Event)                                                                        \
  required(cuEventQuery, 2000, Event)
// clang-format on

struct Api {
#define MEMSAVER_DECLARE(name, version, ...) Result (*name)(__VA_ARGS__) = nullptr;
  MEMSAVER_CUDA_CALLS(MEMSAVER_DECLARE, MEMSAVER_DECLARE)
#undef MEMSAVER_DECLARE
};

// Loads libcuda and initialises it, once. Throws DriverError if this fails.
Api& api();

// Throws DriverError for any code but success, and ChunkUnavailable where cuMemCreate finds the device full.
void check(const Api& api, const char* call, Result code);

// The memory of a process on a device. `imported`: the part of it that belongs to another process; nullopt: unknown.
struct Holding {
  int pid;
  std::size_t bytes;  // 0: unknown
  std::optional<std::size_t> imported = std::nullopt;
};

// A kind of device: the driver's calls, and the facts that no call returns.
struct Platform {
  const Api& api;
  const char* uuid_prefix;
  bool is_gpu;  // false: the list of holdings has all processes that hold memory, and no work outlives its process
  std::optional<std::size_t> (*free_memory)(Device);  // in bytes, by the system's figure
  // The processes on the device, also a dead one as long as its kernels may run. Empty if the system provides no list.
  std::vector<Holding> (*holdings)(Device);
};
const Platform& platform();                                                    // of GPUs: NVML has the figures
std::vector<Holding> known_holdings(const Platform& platform, Device device);  // those with a number of bytes

// The GPU of this ordinal among the visible ones. Throws BadArgument if there is none.
Device device_at(int ordinal);
std::string uuid_of(const Platform& platform, Device device);  // the same in every process
int attribute_of(const Api& api, Device device, int which);
std::vector<Device> all_devices(const Api& api);
std::size_t total_memory(const Api& api, Device device);  // in bytes; needs no context
bool any_is_numa_node(const Api& api);  // whether the memory of a visible device is a NUMA node of the system
bool refuses_handle_type(Result code);  // whether cuMemCreate refused the type of the handle by this code
// The properties of new chunks with these types of handles, which cannot be added later. Throws DriverError if the
// device has no virtual memory management, or maps memory in other units than kPage.
AllocationProp chunk_properties(const Api& api, Device device, const std::string& name, int handle_types);

}  // namespace memsaver::cuda
