// A CUDA runtime over the driver's API, for torch's CUDA wheels on a machine without a GPU. Kernels do nothing: a
// launch is an operation of its stream, and a node of a capture. tests/torch_cuda builds it, with functions that refuse
// in place of the rest of NVIDIA's libraries.
//
// FAKE_RUNTIME_VERSION: 12080 or 13000, as cudaRuntimeGetVersion() tells. It decides on the layout of two structures.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using Error = int;
using Stream = void*;
using Event = void*;
using Pointer = unsigned long long;

constexpr Error kInvalidValue = 1;
constexpr Error kNoDevice = 100;
constexpr Error kInvalidDevice = 101;
constexpr Error kNotSupported = 801;

struct Dim3 {
  unsigned x, y, z;
};

// The fields of cudaDeviceProp that torch reads, by their places.
struct Place {
  std::size_t at;
  long long value;
  std::size_t bytes;
};
#if FAKE_RUNTIME_VERSION >= 13000
constexpr std::size_t kMultiprocessors = 384, kBus = 568, kUnified = 588, kL2 = 596, kThreads = 604,
                      kSharedOfMulti = 624, kRegistersOfMulti = 632, kSharedOptIn = 672, kProperties = 1008;
constexpr std::size_t kPointerAttributes = 88;
#else
constexpr std::size_t kMultiprocessors = 388, kBus = 584, kUnified = 604, kL2 = 616, kThreads = 624,
                      kSharedOfMulti = 640, kRegistersOfMulti = 648, kSharedOptIn = 696, kProperties = 1032;
constexpr std::size_t kPointerAttributes = 24;
#endif

thread_local Error last = 0;

Error note(Error code) {
  if (code != 0) last = code;
  return code;
}

void* entry(const char* name) {
  using LookUp = int (*)(const char*, void**, int, unsigned long long, int*);
  static std::mutex mutex;
  static std::map<std::string, void*> known;
  const std::lock_guard lock(mutex);
  void*& found = known[name];
  if (found != nullptr) return found;
  static void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  static const auto look_up =
      library != nullptr ? reinterpret_cast<LookUp>(::dlsym(library, "cuGetProcAddress_v2")) : nullptr;
  int status = 0;
  if (look_up == nullptr || look_up(name, &found, 13000, 0, &status) != 0) {
    std::fprintf(stderr, "fake runtime: the driver has no %s\n", name);
    std::abort();
  }
  return found;
}

template <typename... Arguments>
Error cu(const char* name, Arguments... arguments) {
  return reinterpret_cast<Error (*)(Arguments...)>(entry(name))(arguments...);
}

Error use_device(int device) {
  static std::mutex mutex;
  static std::map<int, void*> contexts;
  const std::lock_guard lock(mutex);
  void*& context = contexts[device];
  if (context == nullptr)
    if (const Error code = cu("cuDevicePrimaryCtxRetain", &context, device); code != 0) return code;
  return cu("cuCtxSetCurrent", context);
}

// A call of the driver in the current context. The first one of a thread makes that of device 0 current.
template <typename... Arguments>
Error in_context(const char* name, Arguments... arguments) {
  void* current = nullptr;
  cu("cuCtxGetCurrent", &current);
  if (current == nullptr)
    if (const Error code = use_device(0); code != 0) return note(code);
  return note(cu(name, arguments...));
}

Pointer of(const void* address) { return reinterpret_cast<Pointer>(address); }

struct Configuration {
  Dim3 grid, block;
  std::size_t shared;
  Stream stream;
};
thread_local std::vector<Configuration> configurations;

Error launch(Stream stream) {
  return in_context("cuLaunchKernel", static_cast<void*>(nullptr), 1U, 1U, 1U, 1U, 1U, 1U, 0U, stream,
                    static_cast<void**>(nullptr), static_cast<void**>(nullptr));
}

Error properties(char* found, int device) {
  std::size_t total = 0;
  if (const Error code = cu("cuDeviceTotalMem", &total, device); code != 0) return note(code);
  std::memset(found, 0, kProperties);
  cu("cuDeviceGetName", found, 256, device);
  cu("cuDeviceGetUuid", found + 256, device);
  const Place places[] = {
      {288, static_cast<long long>(total), 8},
      {296, 49152, 8},
      {304, 65536, 4},
      {308, 32, 4},
      {320, 1024, 4},
      {324, 1024, 4},
      {328, 1024, 4},
      {332, 64, 4},
      {336, 2147483647, 4},
      {340, 65535, 4},
      {344, 65535, 4},
      {360, 9, 4},
      {364, 0, 4},
      {368, 512, 8},
      {kMultiprocessors, 132, 4},
      {kBus, device + 1, 4},
      {kUnified, 1, 4},
      {kL2, 50 << 20, 4},
      {kThreads, 2048, 4},
      {kSharedOfMulti, 233472, 8},
      {kRegistersOfMulti, 65536, 4},
      {kSharedOptIn, 232448, 8},
  };
  for (const Place& each : places) std::memcpy(found + each.at, &each.value, each.bytes);
  return 0;
}

}  // namespace

extern "C" {

// Errors, versions, devices

Error cudaGetLastError() { return std::exchange(last, 0); }
Error cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(Error code) {
  const char* text = nullptr;
  cu("cuGetErrorName", code, &text);
  return text;
}
const char* cudaGetErrorString(Error code) {
  switch (code) {
    case 0: return "no error";
    case 2: return "out of memory";
    case 700: return "an illegal memory access was encountered";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    default: break;
  }
  const char* text = nullptr;
  cu("cuGetErrorString", code, &text);
  return text;
}
Error cudaDriverGetVersion(int* version) { return note(cu("cuDriverGetVersion", version)); }
Error cudaRuntimeGetVersion(int* version) {
  *version = FAKE_RUNTIME_VERSION;
  return 0;
}
Error cudaGetDeviceCount(int* count) {
  if (const Error code = cu("cuInit", 0U); code != 0) return note(code);
  const Error code = cu("cuDeviceGetCount", count);
  return note(code == 0 && *count == 0 ? kNoDevice : code);
}
Error cudaGetDevice(int* device) {
  void* current = nullptr;
  cu("cuCtxGetCurrent", &current);
  *device = 0;
  return current == nullptr ? 0 : note(cu("cuCtxGetDevice", device));
}
Error cudaSetDevice(int device) {
  int count = 0;
  cu("cuDeviceGetCount", &count);
  return note(device < 0 || device >= count ? kInvalidDevice : use_device(device));
}
Error cudaGetDeviceProperties(char* found, int device) { return properties(found, device); }
Error cudaGetDeviceProperties_v2(char* found, int device) { return properties(found, device); }
Error cudaDeviceGetAttribute(int* value, int which, int device) {
  return note(cu("cuDeviceGetAttribute", value, which, device));
}
Error cudaDeviceGetPCIBusId(char* text, int size, int device) {
  return note(cu("cuDeviceGetPCIBusId", text, size, device));
}
Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return in_context("cuCtxGetStreamPriorityRange", least, greatest);
}
Error cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return note(cu("cuDeviceCanAccessPeer", can, device, peer));
}
Error cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  void* context = nullptr;
  if (const Error code = cu("cuDevicePrimaryCtxRetain", &context, peer); code != 0) return note(code);
  return in_context("cuCtxEnablePeerAccess", context, flags);
}
Error cudaDeviceSynchronize() { return in_context("cuCtxSynchronize"); }
Error cudaProfilerStart() { return 0; }
Error cudaProfilerStop() { return 0; }

Error cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                       int* result) {
  int status = 0;
  const Error code = cu("cuGetProcAddress_v2", name, function, static_cast<int>(version), flags, &status);
  if (result != nullptr) *result = status;  // 1: not there
  return code == 0 || status == 1 ? 0 : note(code);
}
Error cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, function, FAKE_RUNTIME_VERSION, flags, result);
}

// Memory

Error cudaMemGetInfo(std::size_t* free, std::size_t* total) { return in_context("cuMemGetInfo", free, total); }
Error cudaMalloc(void** address, std::size_t size) {
  *address = nullptr;
  return size == 0 ? 0 : in_context("cuMemAlloc", reinterpret_cast<Pointer*>(address), size);
}
Error cudaFree(void* address) {
  return address == nullptr ? in_context("cuInit", 0U) : in_context("cuMemFree", of(address));
}
Error cudaHostAlloc(void** address, std::size_t size, unsigned flags) {
  return in_context("cuMemHostAlloc", address, size, flags);
}
Error cudaMallocHost(void** address, std::size_t size) { return cudaHostAlloc(address, size, 0); }
Error cudaFreeHost(void* address) { return address == nullptr ? 0 : in_context("cuMemFreeHost", address); }
Error cudaHostRegister(void* address, std::size_t size, unsigned flags) {
  return in_context("cuMemHostRegister", address, size, flags);
}
Error cudaHostUnregister(void* address) { return in_context("cuMemHostUnregister", address); }
Error cudaMemcpy(void* to, const void* from, std::size_t size, int) {
  return in_context("cuMemcpy", of(to), of(from), size);
}
Error cudaMemcpyAsync(void* to, const void* from, std::size_t size, int, Stream stream) {
  return in_context("cuMemcpyAsync", of(to), of(from), size, stream);
}
Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t size, Stream stream) {
  return in_context("cuMemcpyAsync", of(to), of(from), size, stream);
}
Error cudaMemsetAsync(void* address, int byte, std::size_t size, Stream stream) {
  return in_context("cuMemsetD8Async", of(address), static_cast<unsigned char>(byte), size, stream);
}
Error cudaMemset(void* address, int byte, std::size_t size) { return cudaMemsetAsync(address, byte, size, nullptr); }
Error cudaPointerGetAttributes(char* found, const void* address) {
  std::memset(found, 0, kPointerAttributes);
  unsigned kind = 0;
  int device = 0;
  if (cu("cuPointerGetAttribute", static_cast<void*>(&kind), 2, of(address)) == 0) {
    cu("cuPointerGetAttribute", static_cast<void*>(&device), 9, of(address));
    const int type = kind == 2 ? 2 : 1;
    std::memcpy(found, &type, sizeof type);
    std::memcpy(found + 4, &device, sizeof device);
    std::memcpy(found + 8, &address, sizeof address);
  }
  return 0;
}

// Streams and events

Error cudaStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  return in_context("cuStreamCreateWithPriority", stream, flags, priority);
}
Error cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
Error cudaStreamCreate(Stream* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
Error cudaStreamDestroy(Stream stream) { return in_context("cuStreamDestroy", stream); }
Error cudaStreamGetPriority(Stream stream, int* priority) {
  return in_context("cuStreamGetPriority", stream, priority);
}
Error cudaStreamQuery(Stream stream) { return in_context("cuStreamQuery", stream); }
Error cudaStreamSynchronize(Stream stream) { return in_context("cuStreamSynchronize", stream); }
Error cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  return in_context("cuStreamWaitEvent", stream, event, flags);
}
Error cudaLaunchHostFunc(Stream stream, void (*function)(void*), void* data) {
  return in_context("cuLaunchHostFunc", stream, function, data);
}
Error cudaEventCreateWithFlags(Event* event, unsigned flags) { return in_context("cuEventCreate", event, flags); }
Error cudaEventCreate(Event* event) { return cudaEventCreateWithFlags(event, 0); }
Error cudaEventDestroy(Event event) { return note(cu("cuEventDestroy", event)); }
Error cudaEventRecord(Event event, Stream stream) { return in_context("cuEventRecord", event, stream); }
Error cudaEventRecordWithFlags(Event event, Stream stream, unsigned) { return cudaEventRecord(event, stream); }
Error cudaEventQuery(Event event) { return in_context("cuEventQuery", event); }
Error cudaEventSynchronize(Event event) { return in_context("cuEventSynchronize", event); }
Error cudaEventElapsedTime(float* milliseconds, Event begin, Event end) {
  return note(cu("cuEventElapsedTime", milliseconds, begin, end));
}

// Captures and graphs

Error cudaThreadExchangeStreamCaptureMode(int* mode) { return note(cu("cuThreadExchangeStreamCaptureMode", mode)); }
Error cudaStreamBeginCapture(Stream stream, int mode) { return in_context("cuStreamBeginCapture", stream, mode); }
Error cudaStreamEndCapture(Stream stream, void** graph) { return in_context("cuStreamEndCapture", stream, graph); }
Error cudaStreamIsCapturing(Stream stream, int* status) { return in_context("cuStreamIsCapturing", stream, status); }
Error capture_info(Stream stream, int* status, unsigned long long* id, void** graph, const void** dependencies,
                   const void** edges, std::size_t* count) {
  return in_context("cuStreamGetCaptureInfo", stream, status, id, graph, dependencies, edges, count);
}
Error cudaStreamGetCaptureInfo_v2(Stream stream, int* status, unsigned long long* id, void** graph,
                                  const void** dependencies, std::size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, nullptr, count);
}
#if FAKE_RUNTIME_VERSION >= 13000
Error cudaStreamGetCaptureInfo(Stream stream, int* status, unsigned long long* id, void** graph,
                               const void** dependencies, const void** edges, std::size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#endif
Error cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  return in_context("cuGraphInstantiate", executable, graph, flags);
}
Error cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
Error cudaGraphLaunch(void* executable, Stream stream) { return in_context("cuGraphLaunch", executable, stream); }
Error cudaGraphDestroy(void* graph) { return note(cu("cuGraphDestroy", graph)); }
Error cudaGraphExecDestroy(void* executable) { return note(cu("cuGraphExecDestroy", executable)); }
Error cudaGraphGetNodes(void* graph, void** nodes, std::size_t* count) {
  return note(cu("cuGraphGetNodes", graph, nodes, count));
}

// Kernels

Error cudaLaunchKernel(const void*, Dim3, Dim3, void**, std::size_t, Stream stream) { return launch(stream); }
Error __cudaLaunchKernel(const void*, Dim3, Dim3, void**, std::size_t, Stream stream) { return launch(stream); }
Error cudaLaunchKernelExC(const Configuration* configuration, const void*, void**) {
  return launch(configuration->stream);
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared, Stream stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared, Stream* stream) {
  if (configurations.empty()) return note(kInvalidValue);
  const Configuration found = configurations.back();
  configurations.pop_back();
  *grid = found.grid, *block = found.block, *shared = found.shared, *stream = found.stream;
  return 0;
}
Error __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return 0;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
char __cudaInitModule(void**) { return 0; }
Error cudaFuncGetAttributes(char* found, const void*) {
  const int threads = 1024;
  std::memset(found, 0, 64);
  std::memcpy(found + 24, &threads, sizeof threads);
  return 0;
}
Error cudaFuncSetAttribute(const void*, int, int) { return 0; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t, unsigned) {
  *blocks = 1;
  return 0;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 1;
  return 0;
}

// cuBLAS launches kernels alone, so its other calls succeed and do nothing.
int cublasCreate_v2(void** handle) {
  static int any = 0;
  *handle = &any;
  return 0;
}
}
