#include "host/calls.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/files.h"
#include "host/addresses.h"
#include "host/ledger.h"
#include "host/stream.h"

namespace memsaver::host {
namespace {

using cuda::AccessDesc;
using cuda::AllocationHandle;
using cuda::AllocationProp;
using cuda::DevicePointer;
using cuda::kNotReady;
using cuda::kNotSupported;
using cuda::kSuccess;
using cuda::Result;
using cuda::Uuid;
using Number = cuda::Device;
using Flags = unsigned long long;

// One device, which is also its context.
struct Device {
  explicit Device(std::size_t capacity) : ledger(capacity) {}

  Ledger ledger;
  const int pid = ::getpid();  // a forked child opens the device anew: entries of the ledger name their process
  std::atomic<bool> lost = false;
  std::mutex mutex;
  std::deque<Stream> streams;  // never removed: a stream has a thread

  std::vector<Stream*> all_streams() {
    const std::lock_guard lock(mutex);
    std::vector<Stream*> found;
    for (Stream& each : streams) found.push_back(&each);
    return found;
  }
};

// A recorded event: the work that it waits for.
struct Event {
  std::vector<std::pair<Stream*, std::uint64_t>> work;
};

// All host devices of the process. Never destroyed: threads may be within calls when the process ends.
struct Host {
  std::mutex mutex;
  std::vector<std::unique_ptr<Device>> devices;  // by number; never removed
  Addresses addresses;

  Device& device(Number number) {
    const std::lock_guard lock(mutex);
    if (number < 0 || static_cast<std::size_t>(number) >= devices.size())
      throw Refused(kInvalidDevice, "there is no such device");
    return *devices[static_cast<std::size_t>(number)];
  }
};

Host& host() {
  static auto* only = new Host;
  return *only;
}

thread_local std::vector<Device*> contexts;  // the current one last

struct Failure {
  Result code = kSuccess;
  std::string why;
};
thread_local Failure last;  // of this thread, for cuGetErrorString()

// The current context, if it lives.
Device& current() {
  if (contexts.empty()) throw Refused(kInvalidContext, "no context is current");
  Device& device = *contexts.back();
  if (!device.lost) return device;
  // The caller may free host memory after this error, so no copy may still access it.
  host().addresses.wait_for_accesses();
  throw Refused(kIllegalAddress, "an illegal memory access was encountered");
}

// For calls that need no context. They fail in a dead one.
void check_context() {
  if (!contexts.empty()) current();
}

void check_size(std::size_t size) {
  if (size == 0 || size % kGranularity != 0)
    throw Refused(kInvalidValue, std::to_string(size) + " bytes is not a multiple of 2 MiB");
}

void end_context(Device& device) {
  device.lost = true;
  for (Stream* each : device.all_streams()) each->abandon();
}

// Queues work that accesses ranges of device memory.
void queue(cuda::Stream stream, std::vector<Range> ranges, std::function<void()> act) {
  Device& device = current();
  static_cast<Stream*>(stream)->submit([&device, ranges = std::move(ranges), act = std::move(act)] {
    std::deque<Addresses::Access> accesses;
    for (const Range& each : ranges) accesses.emplace_back(host().addresses, each.offset, each.size);
    if (device.lost) return;  // looked at after the accesses began, which a call in a dead context waits for
    const auto are_legal = [&] {
      return std::all_of(accesses.begin(), accesses.end(), [](const auto& each) { return each.is_legal(); });
    };
    if (are_legal()) act();
    if (!are_legal()) end_context(device);
  });
}

// The calls. Each throws Refused, or returns a code or nothing.

void cuInit(unsigned) {}

void cuGetErrorString(Result code, const char** text) {
  *text = last.code == code ? last.why.c_str() : "unknown error";
}

void cuDeviceGetCount(int* count) {
  const std::lock_guard lock(host().mutex);
  *count = static_cast<int>(host().devices.size());
}

void cuDeviceGet(Number* device, int ordinal) {
  host().device(ordinal);
  *device = ordinal;
}

// A hash of the machine and the user, and the capacity, by which a new broker opens the device
// (memsaver/broker/daemon.py).
void cuDeviceGetUuid(Uuid* uuid, Number device) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char byte : read_text("/proc/sys/kernel/random/boot_id").value_or("") + std::to_string(::getuid()))
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  *uuid = {};
  std::memcpy(uuid->bytes, &hash, sizeof hash);
  const std::size_t capacity = host().device(device).ledger.capacity();
  for (int i = 0; i < 6; ++i) uuid->bytes[15 - i] = static_cast<unsigned char>(capacity >> (8 * i));
}

Result cuDeviceGetAttribute(int* value, int which, Number) {
  switch (which) {
    case cuda::kAttributeVirtualMemory:
    case cuda::kAttributePosixFd: *value = 1; return kSuccess;
    case cuda::kAttributeRdma:
    case cuda::kAttributeNumaConfig:
    case cuda::kAttributeMps: *value = 0; return kSuccess;
    case cuda::kAttributeHostNode: *value = -1; return kSuccess;
    default: return kInvalidValue;
  }
}

void cuDriverGetVersion(int* version) { *version = 0; }

void cuDeviceGetName(char* name, int size, Number) {
  if (size > 0) *name = '\0';
}

void cuDeviceTotalMem(std::size_t* bytes, Number device) { *bytes = host().device(device).ledger.capacity(); }

void cuDeviceCanAccessPeer(int* can, Number, Number) { *can = 0; }

void cuDevicePrimaryCtxRetain(cuda::Context* context, Number device) { *context = &host().device(device); }

void cuDevicePrimaryCtxRelease(Number) {}

void cuDevicePrimaryCtxGetState(Number, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
}

void cuDevicePrimaryCtxReset(Number number) {
  Device& device = host().device(number);
  for (Stream* each : device.all_streams()) each->abandon();
  for (Stream* each : device.all_streams()) each->wait(each->submitted());
  device.lost = false;
}

void cuCtxPushCurrent(cuda::Context context) { contexts.push_back(static_cast<Device*>(context)); }

void cuCtxPopCurrent(cuda::Context* context) {
  if (contexts.empty()) throw Refused(kInvalidContext, "no context is current");
  *context = contexts.back();
  contexts.pop_back();
}

void cuCtxSynchronize() {
  for (Stream* each : current().all_streams()) each->wait(each->submitted());
  current();
}

void cuCtxRecordEvent(cuda::Context context, cuda::Event event) {
  current();
  auto& work = static_cast<Event*>(event)->work;
  work.clear();
  for (Stream* each : static_cast<Device*>(context)->all_streams()) work.emplace_back(each, each->submitted());
}

void cuThreadExchangeStreamCaptureMode(int*) {}

void cuMemGetInfo(std::size_t* free, std::size_t* total) {
  Ledger& ledger = current().ledger;
  *total = ledger.capacity();
  *free = ledger.free_bytes();
}

// No caller of the host devices allocates memory with its address.
Result cuMemAlloc(DevicePointer*, std::size_t) { return kNotSupported; }
Result cuMemFree(DevicePointer) { return kNotSupported; }

void cuMemAddressReserve(DevicePointer* address, std::size_t size, std::size_t alignment, DevicePointer at, Flags) {
  check_context();
  check_size(size);
  *address = host().addresses.reserve(size, std::max(alignment, kGranularity), at);
}

void cuMemAddressFree(DevicePointer address, std::size_t size) {
  check_context();
  host().addresses.unreserve(address, size);
}

void cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp*, int) { *bytes = kGranularity; }

void cuMemCreate(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags) {
  check_context();
  check_size(size);
  if ((properties->handle_types & ~cuda::kHandlePosixFd) != 0)
    throw Refused(kNotSupported, "host devices have no handles of this type");
  *handle = host().addresses.create(host().device(properties->location.id).ledger, size);
}

void cuMemRelease(AllocationHandle handle) {
  check_context();
  host().addresses.release(handle);
}

void cuMemExportToShareableHandle(void* file, AllocationHandle handle, int, Flags) {
  check_context();
  *static_cast<int*>(file) = host().addresses.export_fd(handle);
}

void cuMemImportFromShareableHandle(AllocationHandle* handle, void* as_pointer, int) {
  check_context();
  const int file = static_cast<int>(reinterpret_cast<std::intptr_t>(as_pointer));
  const std::size_t capacity = capacity_of(file);
  Ledger* ledger = nullptr;
  {
    const std::lock_guard lock(host().mutex);
    for (const auto& device : host().devices)
      if (device->ledger.capacity() == capacity) ledger = &device->ledger;  // the newest one
  }
  if (ledger == nullptr) throw Refused(kInvalidDevice, "the memory is of a host device of another size");
  *handle = host().addresses.import(*ledger, file);
}

void cuMemMap(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags) {
  check_context();
  if (offset != 0) throw Refused(kInvalidValue, "a chunk is mapped whole");
  host().addresses.map(address, size, handle);
}

void cuMemSetAccess(DevicePointer address, std::size_t size, const AccessDesc*, std::size_t) {
  check_context();
  host().addresses.allow(address, size);
}

void cuMemRetainAllocationHandle(AllocationHandle* handle, void* address) {
  *handle = host().addresses.retain(reinterpret_cast<DevicePointer>(address));
}

void cuMemUnmap(DevicePointer address, std::size_t size) {
  check_context();
  host().addresses.unmap(address, size);
}

// All memory of the host is in its reach.
void cuMemHostRegister(void*, std::size_t, unsigned) { current(); }
void cuMemHostUnregister(void*) { current(); }

void cuMemcpyDtoHAsync(void* to, DevicePointer from, std::size_t size, cuda::Stream stream) {
  queue(stream, {{from, size}}, [=] { std::memcpy(to, bytes_at(from), size); });
}

void cuMemcpyHtoDAsync(DevicePointer to, const void* from, std::size_t size, cuda::Stream stream) {
  queue(stream, {{to, size}}, [=] { std::memcpy(bytes_at(to), from, size); });
}

void cuMemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t size, cuda::Stream stream) {
  queue(stream, {{to, size}, {from, size}}, [=] { std::memcpy(bytes_at(to), bytes_at(from), size); });
}

void cuMemsetD8Async(DevicePointer to, unsigned char byte, std::size_t size, cuda::Stream stream) {
  queue(stream, {{to, size}}, [=] { std::memset(bytes_at(to), byte, size); });
}

void cuLaunchHostFunc(cuda::Stream stream, void (*function)(void*), void* data) {
  queue(stream, {}, [=] { function(data); });
}

void cuStreamCreate(cuda::Stream* stream, unsigned) {
  Device& device = current();
  const std::lock_guard lock(device.mutex);
  for (Stream& each : device.streams)
    if (each.is_unused.exchange(false)) {
      *stream = &each;
      return;
    }
  *stream = &device.streams.emplace_back();
}

void cuStreamDestroy(cuda::Stream stream) {
  auto* gone = static_cast<Stream*>(stream);
  gone->wait(gone->submitted());
  gone->is_unused = true;
}

void cuStreamSynchronize(cuda::Stream stream) {
  current();
  auto* waited = static_cast<Stream*>(stream);
  waited->wait(waited->submitted());
  current();
}

void cuEventCreate(cuda::Event* event, unsigned) {
  current();
  *event = new Event;
}

void cuEventRecord(cuda::Event event, cuda::Stream stream) {
  current();
  auto* recorded = static_cast<Stream*>(stream);
  static_cast<Event*>(event)->work = {{recorded, recorded->submitted()}};
}

void cuEventSynchronize(cuda::Event event) {
  current();
  for (const auto& [stream, number] : static_cast<Event*>(event)->work) stream->wait(number);
  current();
}

Result cuEventQuery(cuda::Event event) {
  current();
  for (const auto& [stream, number] : static_cast<Event*>(event)->work)
    if (!stream->done(number)) return kNotReady;
  return kSuccess;
}

// Makes an entry of a call: it returns a code.
template <auto call, typename... Arguments>
void fill(Result (*&entry)(Arguments...)) {
  entry = [](Arguments... arguments) noexcept -> Result {
    try {
      if constexpr (std::is_void_v<decltype(call(arguments...))>)
        return call(arguments...), kSuccess;
      else
        return call(arguments...);
    } catch (const Refused& refused) {
      last = {refused.code, refused.message};
    } catch (const std::bad_alloc&) {
      last = {kOutOfMemory, "no host memory"};
    } catch (const std::exception& error) {  // a thread that cannot be started
      last = {kOperatingSystem, error.what()};
    }
    return last.code;
  };
}

Calls& calls() {
  static auto* only = [] {
    auto* made = new Calls;
#define MEMSAVER_FILL(name, version, ...) fill<&name>(made->name);
    MEMSAVER_CUDA_CALLS(MEMSAVER_FILL, MEMSAVER_FILL)
#undef MEMSAVER_FILL
    fill<&cuLaunchHostFunc>(made->cuLaunchHostFunc);
    fill<&cuDevicePrimaryCtxReset>(made->cuDevicePrimaryCtxReset);
    made->open = &open;
    return made;
  }();
  return *only;
}

}  // namespace

Number open(std::size_t capacity) {
  const std::lock_guard lock(host().mutex);
  auto& devices = host().devices;
  for (std::size_t i = 0; i < devices.size(); ++i)
    if (devices[i]->ledger.capacity() == capacity && devices[i]->pid == ::getpid()) return static_cast<Number>(i);
  devices.push_back(std::make_unique<Device>(capacity));
  return static_cast<Number>(devices.size() - 1);
}

const cuda::Platform& platform() {
  static const cuda::Platform only = {
      .api = calls(),
      .uuid_prefix = "HOST-",
      .is_gpu = false,
      .free_memory = [](Number device) { return std::optional(host().device(device).ledger.free_bytes()); },
      .holdings = [](Number device) { return host().device(device).ledger.holdings(); },
  };
  return only;
}

}  // namespace memsaver::host

void* memsaver_table(const char* name) {
  using namespace memsaver;
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("host")) return &host::calls();
  if (is("platform")) return const_cast<cuda::Platform*>(&host::platform());
  if (is("files")) return &file_calls();
  if (is("clock")) return &clock_calls();
  try {
    return is("cuda") ? &cuda::api() : nullptr;
  } catch (const DriverError&) {
    return nullptr;
  }
}
