// A CUDA runtime over tests/device/gpus.cpp, for torch's CUDA wheels on a machine without a GPU. Kernels do nothing: a
// launch is an operation of its stream, and a node of a capture. tests/torch_cuda builds it, with functions that refuse
// in place of the rest of NVIDIA's libraries.
//
// RUNTIME_VERSION: 12080 or 13000, as cudaRuntimeGetVersion() tells. It decides on the layout of two structures.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

using Error = int;
using Pointer = unsigned long long;

constexpr Error kInvalidValue = 1, kNoDevice = 100, kInvalidDevice = 101, kIllegalState = 401, kNotSupported = 801,
                kCaptureUnsupported = 900, kCaptureInvalidated = 901, kIsolation = 905, kCapturedEvent = 907;
constexpr int kRelaxed = 2, kNonBlocking = 1;

// The driver

void* entry(const char* name) {
  using LookUp = int (*)(const char*, void**, int, unsigned long long, int*);
  static std::mutex mutex;
  static std::map<std::string, void*> known;
  const std::lock_guard lock(mutex);
  void*& found = known[name];
  if (found != nullptr) return found;
  static void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  found = library != nullptr ? ::dlsym(library, name) : nullptr;
  int status = 0;
  if (library != nullptr && found == nullptr)
    reinterpret_cast<LookUp>(::dlsym(library, "cuGetProcAddress_v2"))(name, &found, 13000, 0, &status);
  if (found != nullptr) return found;
  std::fprintf(stderr, "the driver has no %s\n", name);
  std::abort();
}

template <typename Result = Error, typename... Arguments>
Result cu(const char* name, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(entry(name))(arguments...);
}

thread_local Error last = 0;
thread_local int device_here = 0;

Error note(Error code) {
  if (code != 0) last = code;
  return code;
}

void* context_of(int device) {
  static std::mutex mutex;
  static std::map<int, void*> contexts;
  const std::lock_guard lock(mutex);
  void*& context = contexts[device];
  if (context == nullptr) cu("cuDevicePrimaryCtxRetain", &context, device);
  return context;
}

// Makes a device's context current, for the calls of a scope.
struct Current {
  explicit Current(int device) { cu("cuCtxPushCurrent", context_of(device)); }
  ~Current() {
    void* context = nullptr;
    cu("cuCtxPopCurrent", &context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

// The calls of a scope break no capture, and no capture forbids them.
struct Relaxed {
  Relaxed() { cu("cuThreadExchangeStreamCaptureMode", &mode); }
  ~Relaxed() { cu("cuThreadExchangeStreamCaptureMode", &mode); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  int mode = kRelaxed;
};

template <typename... Arguments>
Error in_context(const char* name, Arguments... arguments) {
  const Current current(device_here);
  return note(cu(name, arguments...));
}

Pointer of(const void* address) { return reinterpret_cast<Pointer>(address); }

// Streams, events, captures. A handle of torch is one of these objects, which are never freed.

using Node = std::function<Error(void* stream)>;  // queues an operation on a stream of the driver

struct Capture {
  std::uint64_t id;
  std::vector<Node> nodes;
};

struct Stream {
  int device;
  void* queue;    // the driver's
  bool blocking;  // with the default stream
  int priority;
  std::shared_ptr<Capture> capture;
};

struct Event {
  int device;
  std::shared_ptr<void> recorded;  // the driver's, of the last record; null: none
  std::weak_ptr<Capture> capture;  // it was recorded there
  bool captured = false;
};

struct Graph {
  std::vector<Node> nodes;
};

std::recursive_mutex mutex;
std::vector<Stream*> streams;
std::map<int, Stream*> default_streams;
std::map<const char*, std::size_t> pinned;  // memory of the host
std::uint64_t last_capture = 0;

Stream* new_stream(int device, bool blocking, int priority) {
  auto* made = new Stream{device, nullptr, blocking, priority, nullptr};
  const Current current(device);
  cu("cuStreamCreate", &made->queue, unsigned{kNonBlocking});
  return made;
}

Stream& stream_of(void* handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) > 1) return *static_cast<Stream*>(handle);
  const std::lock_guard lock(mutex);
  Stream*& found = default_streams[device_here];
  if (found == nullptr) found = new_stream(device_here, false, 0);
  return *found;
}

bool is_default(const Stream& stream) {
  const std::lock_guard lock(mutex);
  const auto found = default_streams.find(stream.device);
  return found != default_streams.end() && found->second == &stream;
}

// An event of the driver behind all work of a stream. It is used again after the last reference.
std::shared_ptr<void> end_of(const Stream& stream) {
  static std::map<int, std::vector<void*>> idle;
  const Current current(stream.device);
  void* event = nullptr;
  {
    const std::lock_guard lock(mutex);
    if (auto& free = idle[stream.device]; !free.empty()) {
      event = free.back();
      free.pop_back();
    }
  }
  if (event == nullptr) cu("cuEventCreate", &event, 2U);
  cu("cuEventRecord", event, stream.queue);
  return {event, [device = stream.device](void* gone) {
            const std::lock_guard lock(mutex);
            idle[device].push_back(gone);
          }};
}

struct Wait {
  int device;
  std::shared_ptr<void> event;
};

// The stream waits for an event of a stream of `device`.
void wait_in(const Stream& stream, int device, std::shared_ptr<void> event) {
  const Current current(stream.device);
  const auto wait = [](void* data) {
    const std::unique_ptr<Wait> waited(static_cast<Wait*>(data));
    const Current here(waited->device);
    const Relaxed relaxed;
    cu("cuEventSynchronize", waited->event.get());
  };
  cu("cuLaunchHostFunc", stream.queue, static_cast<void (*)(void*)>(wait),
     static_cast<void*>(new Wait{device, std::move(event)}));
}

Error broken(const char* call) {
  cu("controls_break_capture", call);
  return note(kCaptureUnsupported);
}

// Queues an operation, or adds it to the graph that the stream captures.
Error queue(Stream& stream, const Node& act) {
  const std::lock_guard lock(mutex);
  if (stream.capture != nullptr) {
    if (cu("controls_capture_is_whole") == 0) return note(kCaptureInvalidated);
    stream.capture->nodes.push_back(act);
    return 0;
  }
  if (is_default(stream)) {
    for (const Stream* each : streams)
      if (each->device == stream.device && each->blocking && each->capture == nullptr)
        wait_in(stream, each->device, end_of(*each));
  } else if (const auto found = default_streams.find(stream.device);
             stream.blocking && found != default_streams.end()) {
    wait_in(stream, stream.device, end_of(*found->second));
  }
  const Current current(stream.device);
  return note(act(stream.queue));
}

bool is_pinned(const void* address) {
  const std::lock_guard lock(mutex);
  const auto next = pinned.upper_bound(static_cast<const char*>(address));
  return next != pinned.begin() && std::prev(next)->first + std::prev(next)->second > address;
}

bool on_device(const void* address) { return cu("gpus_device_of", of(address)) >= 0; }

Error copy(void* to, const void* from, std::size_t size, void* handle, bool waits = false) {
  if (size == 0) return 0;
  Stream& stream = stream_of(handle);
  const bool out = on_device(from), in = on_device(to);
  const auto act = [=](void* on) -> Error {
    if (in && out) return cu("cuMemcpyDtoDAsync", of(to), of(from), size, on);
    if (in) return cu("cuMemcpyHtoDAsync", of(to), from, size, on);
    if (out) return cu("cuMemcpyDtoHAsync", to, of(from), size, on);
    return kInvalidValue;
  };
  const Error code = queue(stream, act);
  // Memory of the host that is not pinned is read or written before the call returns.
  const bool host_waits = !(in && out) && !is_pinned(in ? from : to);
  if (code != 0 || stream.capture != nullptr || !(waits || host_waits)) return code;
  const Relaxed relaxed;
  const Current current(stream.device);
  return note(cu("cuStreamSynchronize", stream.queue));
}

Error launch(void* handle) {
  return queue(stream_of(handle), [](void*) { return 0; });
}

struct Dim3 {
  unsigned x, y, z;
};

struct Configuration {
  Dim3 grid, block;
  std::size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

// The fields of cudaDeviceProp that torch reads, by their places.
struct Place {
  std::size_t at;
  long long value;
  std::size_t bytes;
};
#if RUNTIME_VERSION >= 13000
constexpr std::size_t kMultiprocessors = 384, kBus = 568, kUnified = 588, kL2 = 596, kThreads = 604,
                      kSharedOfMulti = 624, kRegistersOfMulti = 632, kSharedOptIn = 672, kProperties = 1008;
constexpr std::size_t kPointerAttributes = 88;
#else
constexpr std::size_t kMultiprocessors = 388, kBus = 584, kUnified = 604, kL2 = 616, kThreads = 624,
                      kSharedOfMulti = 640, kRegistersOfMulti = 648, kSharedOptIn = 696, kProperties = 1032;
constexpr std::size_t kPointerAttributes = 24;
#endif

Error properties(char* found, int device) {
  std::size_t total = 0;
  if (const Error code = cu("cuDeviceTotalMem", &total, device); code != 0) return note(code);
  std::memset(found, 0, kProperties);
  std::snprintf(found, 256, "GPU %d without a GPU", device);
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
const char* cudaGetErrorName(Error) { return "cudaError"; }
const char* cudaGetErrorString(Error code) {
  switch (code) {
    case 0: return "no error";
    case 2: return "out of memory";
    case 700: return "an illegal memory access was encountered";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    case kCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "an error";
  }
}
Error cudaDriverGetVersion(int* version) { return *version = 13000, 0; }
Error cudaRuntimeGetVersion(int* version) { return *version = RUNTIME_VERSION, 0; }
Error cudaGetDeviceCount(int* count) {
  const Error code = cu("cuDeviceGetCount", count);
  return note(code == 0 && *count == 0 ? kNoDevice : code);
}
Error cudaGetDevice(int* device) { return *device = device_here, 0; }
Error cudaSetDevice(int device) {
  int count = 0;
  cu("cuDeviceGetCount", &count);
  if (device < 0 || device >= count) return note(kInvalidDevice);
  device_here = device;
  return context_of(device) == nullptr ? note(kInvalidDevice) : 0;
}
Error cudaGetDeviceProperties(char* found, int device) { return properties(found, device); }
Error cudaGetDeviceProperties_v2(char* found, int device) { return properties(found, device); }
Error cudaDeviceGetAttribute(int* value, int which, int device) {
  return note(cu("cuDeviceGetAttribute", value, which, device));
}
Error cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return 0;
}
Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, 0; }
Error cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return note(cu("cuDeviceCanAccessPeer", can, device, peer));
}
Error cudaDeviceEnablePeerAccess(int peer, unsigned) { return context_of(peer) == nullptr ? note(kInvalidDevice) : 0; }
Error cudaDeviceSynchronize() { return in_context("cuCtxSynchronize"); }
Error cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                       int* result) {
  int status = 0;
  const Error code = cu("cuGetProcAddress_v2", name, function, static_cast<int>(version), flags, &status);
  if (result != nullptr) *result = status;  // 1: not there
  return code == 0 || status == 1 ? 0 : note(code);
}
Error cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, function, RUNTIME_VERSION, flags, result);
}

// Memory

Error cudaMemGetInfo(std::size_t* free, std::size_t* total) { return in_context("cuMemGetInfo", free, total); }
Error cudaMalloc(void** address, std::size_t size) {
  *address = nullptr;
  return size == 0 ? 0 : in_context("cuMemAlloc", reinterpret_cast<Pointer*>(address), size);
}
Error cudaFree(void* address) { return address == nullptr ? 0 : in_context("cuMemFree", of(address)); }
Error cudaHostRegister(void* address, std::size_t size, unsigned flags) {
  const Error code = in_context("cuMemHostRegister", address, size, flags);
  const std::lock_guard lock(mutex);
  if (code == 0) pinned[static_cast<char*>(address)] = size;
  return code;
}
Error cudaHostUnregister(void* address) {
  const Error code = in_context("cuMemHostUnregister", address);
  const std::lock_guard lock(mutex);
  if (code == 0) pinned.erase(static_cast<char*>(address));
  return code;
}
Error cudaHostAlloc(void** address, std::size_t size, unsigned flags) {
  if (::posix_memalign(address, 4096, size + 1) != 0) return note(2);
  return cudaHostRegister(*address, size + 1, flags);
}
Error cudaMallocHost(void** address, std::size_t size) { return cudaHostAlloc(address, size, 0); }
Error cudaFreeHost(void* address) {
  if (address == nullptr) return 0;
  if (const Error code = in_context("cuCtxSynchronize"); code != 0) return code;
  const Error code = cudaHostUnregister(address);
  if (code == 0) std::free(address);
  return code;
}
Error cudaMemcpy(void* to, const void* from, std::size_t size, int) {
  if (cu("controls_forbids", "cuMemcpy") != 0) return note(kCaptureUnsupported);
  return copy(to, from, size, nullptr, true);
}
Error cudaMemcpyAsync(void* to, const void* from, std::size_t size, int, void* stream) {
  return copy(to, from, size, stream);
}
Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t size, void* stream) {
  return copy(to, from, size, stream);
}
Error cudaMemsetAsync(void* address, int byte, std::size_t size, void* stream) {
  return queue(stream_of(stream), [=](void* on) -> Error {
    return cu("cuMemsetD8Async", of(address), static_cast<unsigned char>(byte), size, on);
  });
}
Error cudaMemset(void* address, int byte, std::size_t size) { return cudaMemsetAsync(address, byte, size, nullptr); }
Error cudaPointerGetAttributes(char* found, const void* address) {
  std::memset(found, 0, kPointerAttributes);
  const int device = cu("gpus_device_of", of(address));
  const int type = device >= 0 ? 2 : is_pinned(address) ? 1 : 0;
  if (type == 0) return 0;
  const int ordinal = device >= 0 ? device : 0;
  std::memcpy(found, &type, sizeof type);
  std::memcpy(found + 4, &ordinal, sizeof ordinal);
  std::memcpy(found + 8, &address, sizeof address);
  return 0;
}

// Streams and events

Error cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  Stream* made = new_stream(device_here, (flags & kNonBlocking) == 0, priority);
  const std::lock_guard lock(mutex);
  streams.push_back(made);
  *stream = made;
  return 0;
}
Error cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
Error cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
Error cudaStreamDestroy(void* stream) { return note(cu("cuStreamDestroy", stream_of(stream).queue)); }
Error cudaStreamGetPriority(void* stream, int* priority) { return *priority = stream_of(stream).priority, 0; }
Error cudaStreamSynchronize(void* handle) {
  Stream& stream = stream_of(handle);
  if (stream.capture != nullptr) return broken("cuStreamSynchronize");
  const Current current(stream.device);
  return note(cu("cuStreamSynchronize", stream.queue));
}
Error cudaStreamQuery(void* handle) {
  Stream& stream = stream_of(handle);
  if (stream.capture != nullptr) return broken("cuStreamQuery");
  const Current current(stream.device);
  return cu("cuEventQuery", end_of(stream).get());
}
Error cudaEventCreateWithFlags(void** event, unsigned) { return *event = new Event{device_here, {}, {}}, 0; }
Error cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
Error cudaEventDestroy(void* event) { return delete static_cast<Event*>(event), 0; }
Error cudaEventRecord(void* handle, void* on) {
  auto& event = *static_cast<Event*>(handle);
  Stream& stream = stream_of(on);
  const std::lock_guard lock(mutex);
  event.captured = stream.capture != nullptr;
  event.capture = stream.capture;
  event.recorded = event.captured ? nullptr : end_of(stream);
  event.device = stream.device;
  return 0;
}
Error cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }
Error asked(void* handle, const char* name) {
  auto& event = *static_cast<Event*>(handle);
  std::shared_ptr<void> recorded;
  {
    const std::lock_guard lock(mutex);
    if (event.captured) {
      if (event.capture.lock() != nullptr) broken(name);
      return note(kCapturedEvent);
    }
    recorded = event.recorded;
  }
  if (recorded == nullptr) return 0;
  const Current current(event.device);
  return note(cu(name, recorded.get()));
}
Error cudaEventQuery(void* event) { return asked(event, "cuEventQuery"); }
Error cudaEventSynchronize(void* event) { return asked(event, "cuEventSynchronize"); }
Error cudaEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }
Error cudaStreamWaitEvent(void* handle, void* waited, unsigned) {
  Stream& stream = stream_of(handle);
  auto& event = *static_cast<Event*>(waited);
  const std::lock_guard lock(mutex);
  if (event.captured) {  // the stream joins the capture
    const auto capture = event.capture.lock();
    if (capture == nullptr) return note(kCapturedEvent);
    stream.capture = capture;
    return 0;
  }
  if (event.recorded == nullptr) return 0;
  if (stream.capture != nullptr) return broken("cuStreamWaitEvent"), note(kIsolation);
  wait_in(stream, event.device, event.recorded);
  return 0;
}
Error cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return queue(stream_of(stream), [=](void* on) -> Error { return cu("cuLaunchHostFunc", on, function, data); });
}

// Captures and graphs

Error cudaThreadExchangeStreamCaptureMode(int* mode) { return note(cu("cuThreadExchangeStreamCaptureMode", mode)); }
Error cudaStreamBeginCapture(void* handle, int) {
  Stream& stream = stream_of(handle);
  const std::lock_guard lock(mutex);
  if (is_default(stream)) return note(kCaptureUnsupported);
  if (stream.capture != nullptr) return note(kIllegalState);
  stream.capture = std::make_shared<Capture>(Capture{++last_capture, {}});
  cu<void>("controls_begin_capture");
  return 0;
}
Error cudaStreamEndCapture(void* handle, void** graph) {
  *graph = nullptr;
  const std::lock_guard lock(mutex);
  const auto capture = stream_of(handle).capture;
  if (capture == nullptr) return note(kIllegalState);
  for (Stream* each : streams)
    if (each->capture == capture) each->capture = nullptr;
  if (cu("controls_end_capture") == 0) return note(kCaptureInvalidated);
  *graph = new Graph{capture->nodes};
  return 0;
}
Error capture_info(void* handle, int* status, unsigned long long* id, void** graph, const void** dependencies,
                   const void** edges, std::size_t* count) {
  const std::lock_guard lock(mutex);
  const Capture* capture = stream_of(handle).capture.get();
  *status = capture == nullptr ? 0 : cu("controls_capture_is_whole") == 0 ? 2 : 1;
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return 0;
}
Error cudaStreamIsCapturing(void* stream, int* status) {
  return capture_info(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
Error cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph,
                                  const void** dependencies, std::size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, nullptr, count);
}
#if RUNTIME_VERSION >= 13000
Error cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph,
                               const void** dependencies, const void** edges, std::size_t* count) {
  return capture_info(stream, status, id, graph, dependencies, edges, count);
}
#endif
Error cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  return *executable = new Graph(*static_cast<Graph*>(graph)), 0;
}
Error cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
Error cudaGraphLaunch(void* executable, void* stream) {
  for (const Node& node : static_cast<Graph*>(executable)->nodes)
    if (const Error code = queue(stream_of(stream), node); code != 0) return code;
  return 0;
}
Error cudaGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), 0; }
Error cudaGraphExecDestroy(void* executable) { return cudaGraphDestroy(executable); }
Error cudaGraphGetNodes(void* graph, void**, std::size_t* count) {
  return *count = static_cast<Graph*>(graph)->nodes.size(), 0;
}

// Kernels

Error cudaLaunchKernel(const void*, Dim3, Dim3, void**, std::size_t, void* stream) { return launch(stream); }
Error __cudaLaunchKernel(const void*, Dim3, Dim3, void**, std::size_t, void* stream) { return launch(stream); }
Error cudaLaunchKernelExC(const Configuration* configuration, const void*, void**) {
  return launch(configuration->stream);
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared, void** stream) {
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
Error cudaFuncGetAttributes(char* found, const void*) {
  const int threads = 1024;
  std::memset(found, 0, 64);
  std::memcpy(found + 24, &threads, sizeof threads);
  return 0;
}
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
