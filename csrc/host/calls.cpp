#include "host/calls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
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
  std::vector<std::unique_ptr<Stream>> streams;  // never removed: a stream has a thread
  std::vector<Stream*> unused;                   // destroyed streams

  std::vector<Stream*> all_streams() {
    const std::lock_guard lock(mutex);
    std::vector<Stream*> found;
    for (const auto& each : streams) found.push_back(each.get());
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
  std::map<const std::byte*, std::size_t> pinned;

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

// Runs the body of a call. Returns its code.
template <typename Act>
Result answer(Act act) noexcept {
  try {
    act();
    return kSuccess;
  } catch (const Refused& refused) {
    last = {refused.code, refused.what()};
  } catch (const std::bad_alloc&) {
    last = {kOutOfMemory, "no host memory"};
  } catch (const std::exception& error) {  // a thread that cannot be started
    last = {kOperatingSystem, error.what()};
  }
  return last.code;
}

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
template <typename Act>
void queue(cuda::Stream stream, std::vector<std::pair<DevicePointer, std::size_t>> ranges, Act act) {
  Device& device = current();
  static_cast<Stream*>(stream)->submit([&device, ranges = std::move(ranges), act] {
    std::vector<Addresses::Access> accesses;
    for (const auto& [address, size] : ranges) {
      accesses.push_back(host().addresses.access(address, size));
      if (device.lost) return;  // looked at after the access began, which a call in a dead context waits for
      if (accesses.back() == nullptr) return end_context(device);
    }
    act();
  });
}

Result cuInit(unsigned) { return kSuccess; }

Result cuGetErrorString(Result code, const char** text) {
  *text = last.code == code ? last.why.c_str() : "unknown error";
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  const std::lock_guard lock(host().mutex);
  *count = static_cast<int>(host().devices.size());
  return kSuccess;
}

Result cuDeviceGet(Number* device, int ordinal) {
  return answer([&] {
    host().device(ordinal);
    *device = ordinal;
  });
}

// Ten bytes of a hash of the name, and the capacity, by which a new broker opens the device
// (memsaver/broker/daemon.py).
Result cuDeviceGetUuid(Uuid* uuid, Number device) {
  return answer([&] {
    const Ledger& ledger = host().device(device).ledger;
    std::uint64_t hash[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4};  // FNV-1a, from two beginnings
    for (const char byte : ledger.name())
      for (std::uint64_t& each : hash) each = (each ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
    std::memcpy(uuid->bytes, hash, sizeof hash);
    for (int i = 0; i < 6; ++i) uuid->bytes[15 - i] = static_cast<unsigned char>(ledger.capacity() >> (8 * i));
  });
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

Result cuDeviceTotalMem(std::size_t* bytes, Number device) {
  return answer([&] { *bytes = host().device(device).ledger.capacity(); });
}

Result cuDeviceCanAccessPeer(int* can, Number, Number) {
  *can = 0;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(cuda::Context* context, Number device) {
  return answer([&] { *context = &host().device(device); });
}

Result cuDevicePrimaryCtxRelease(Number) { return kSuccess; }

Result cuDevicePrimaryCtxGetState(Number, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}

Result cuDevicePrimaryCtxReset(Number number) {
  return answer([&] {
    Device& device = host().device(number);
    for (Stream* each : device.all_streams()) each->abandon();
    for (Stream* each : device.all_streams()) each->wait(each->submitted());
    device.lost = false;
  });
}

Result cuCtxPushCurrent(cuda::Context context) {
  return answer([&] { contexts.push_back(static_cast<Device*>(context)); });
}

Result cuCtxPopCurrent(cuda::Context* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

Result cuCtxSynchronize() {
  return answer([&] {
    for (Stream* each : current().all_streams()) each->wait(each->submitted());
    current();
  });
}

Result cuCtxRecordEvent(cuda::Context context, cuda::Event event) {
  return answer([&] {
    current();
    auto& work = static_cast<Event*>(event)->work;
    work.clear();
    for (Stream* each : static_cast<Device*>(context)->all_streams()) work.emplace_back(each, each->submitted());
  });
}

Result cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return answer([&] {
    Ledger& ledger = current().ledger;
    *total = ledger.capacity();
    *free = *total - std::min(ledger.used(), *total);
  });
}

// No caller of the host devices allocates memory with its address.
Result cuMemAlloc(DevicePointer*, std::size_t) { return kNotSupported; }
Result cuMemFree(DevicePointer) { return kNotSupported; }

Result cuMemAddressReserve(DevicePointer* address, std::size_t size, std::size_t alignment, DevicePointer, Flags) {
  return answer([&] {
    check_context();
    check_size(size);
    *address = host().addresses.reserve(size, std::max(alignment, kGranularity));
  });
}

Result cuMemAddressFree(DevicePointer address, std::size_t size) {
  return answer([&] {
    check_context();
    host().addresses.unreserve(address, size);
  });
}

Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp*, int) {
  *bytes = kGranularity;
  return kSuccess;
}

Result cuMemCreate(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, Flags) {
  return answer([&] {
    check_context();
    check_size(size);
    if ((properties->handle_types & ~cuda::kHandlePosixFd) != 0)
      throw Refused(kNotSupported, "host devices have no handles of this type");
    *handle = host().addresses.create(host().device(properties->location.id).ledger, size);
  });
}

Result cuMemRelease(AllocationHandle handle) {
  return answer([&] {
    check_context();
    host().addresses.release(handle);
  });
}

Result cuMemExportToShareableHandle(void* file, AllocationHandle handle, int, Flags) {
  return answer([&] {
    check_context();
    *static_cast<int*>(file) = host().addresses.export_fd(handle);
  });
}

Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* as_pointer, int) {
  return answer([&] {
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
  });
}

Result cuMemMap(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle, Flags) {
  return answer([&] {
    check_context();
    if (offset != 0) throw Refused(kInvalidValue, "a chunk is mapped whole");
    host().addresses.map(address, size, handle);
  });
}

Result cuMemSetAccess(DevicePointer address, std::size_t size, const AccessDesc*, std::size_t) {
  return answer([&] {
    check_context();
    host().addresses.allow(address, size);
  });
}

Result cuMemRetainAllocationHandle(AllocationHandle* handle, void* address) {
  return answer([&] { *handle = host().addresses.retain(reinterpret_cast<DevicePointer>(address)); });
}

Result cuMemUnmap(DevicePointer address, std::size_t size) {
  return answer([&] {
    Device& device = current();
    if (!host().addresses.unmap(address, size)) end_context(device);
  });
}

Result cuMemHostRegister(void* memory, std::size_t size, unsigned) {
  return answer([&] {
    current();
    const auto* begin = static_cast<const std::byte*>(memory);
    const std::lock_guard lock(host().mutex);
    auto& pinned = host().pinned;
    const auto next = pinned.lower_bound(begin);
    const bool meets_next = next != pinned.end() && next->first < begin + size;
    const bool meets_last = next != pinned.begin() && std::prev(next)->first + std::prev(next)->second > begin;
    if (meets_next || meets_last) throw Refused(kAlreadyRegistered, "part or all of the range is registered already");
    pinned[begin] = size;
  });
}

Result cuMemHostUnregister(void* memory) {
  return answer([&] {
    current();
    const std::lock_guard lock(host().mutex);
    if (host().pinned.erase(static_cast<const std::byte*>(memory)) == 0)
      throw Refused(kNotRegistered, "the range was not registered");
  });
}

Result cuMemcpyDtoHAsync(void* to, DevicePointer from, std::size_t size, cuda::Stream stream) {
  return answer([&] { queue(stream, {{from, size}}, [=] { std::memcpy(to, bytes_at(from), size); }); });
}

Result cuMemcpyHtoDAsync(DevicePointer to, const void* from, std::size_t size, cuda::Stream stream) {
  return answer([&] { queue(stream, {{to, size}}, [=] { std::memcpy(bytes_at(to), from, size); }); });
}

Result cuMemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t size, cuda::Stream stream) {
  return answer(
      [&] { queue(stream, {{to, size}, {from, size}}, [=] { std::memcpy(bytes_at(to), bytes_at(from), size); }); });
}

Result cuMemsetD8Async(DevicePointer to, unsigned char byte, std::size_t size, cuda::Stream stream) {
  return answer([&] { queue(stream, {{to, size}}, [=] { std::memset(bytes_at(to), byte, size); }); });
}

Result cuLaunchHostFunc(cuda::Stream stream, void (*function)(void*), void* data) {
  return answer([&] { queue(stream, {}, [=] { function(data); }); });
}

Result cuStreamCreate(cuda::Stream* stream, unsigned) {
  return answer([&] {
    Device& device = current();
    const std::lock_guard lock(device.mutex);
    if (device.unused.empty()) {
      device.streams.push_back(std::make_unique<Stream>());
      device.unused.push_back(device.streams.back().get());
    }
    *stream = device.unused.back();
    device.unused.pop_back();
  });
}

Result cuStreamDestroy(cuda::Stream stream) {
  return answer([&] {
    auto* gone = static_cast<Stream*>(stream);
    gone->wait(gone->submitted());
    const std::lock_guard held(host().mutex);
    for (const auto& device : host().devices) {
      const std::lock_guard lock(device->mutex);
      for (const auto& each : device->streams)
        if (each.get() == gone) device->unused.push_back(gone);
    }
  });
}

Result cuStreamSynchronize(cuda::Stream stream) {
  return answer([&] {
    current();
    auto* waited = static_cast<Stream*>(stream);
    waited->wait(waited->submitted());
    current();
  });
}

Result cuEventCreate(cuda::Event* event, unsigned) {
  return answer([&] {
    current();
    *event = new Event;
  });
}

Result cuEventRecord(cuda::Event event, cuda::Stream stream) {
  return answer([&] {
    current();
    auto* recorded = static_cast<Stream*>(stream);
    static_cast<Event*>(event)->work = {{recorded, recorded->submitted()}};
  });
}

Result cuEventSynchronize(cuda::Event event) {
  return answer([&] {
    current();
    for (const auto& [stream, number] : static_cast<Event*>(event)->work) stream->wait(number);
    current();
  });
}

Result cuEventQuery(cuda::Event event) {
  bool done = true;
  const Result code = answer([&] {
    current();
    for (const auto& [stream, number] : static_cast<Event*>(event)->work) done = done && stream->done(number);
  });
  return code != kSuccess || done ? code : kNotReady;
}

Calls& calls() {
  static auto* only = [] {
    auto* made = new Calls;
#define MEMSAVER_FILL(name, version, ...) made->name = &name;
    MEMSAVER_CUDA_CALLS(MEMSAVER_FILL, MEMSAVER_FILL)
#undef MEMSAVER_FILL
    made->cuLaunchHostFunc = &cuLaunchHostFunc;
    made->cuDevicePrimaryCtxReset = &cuDevicePrimaryCtxReset;
    return made;
  }();
  return *only;
}

// A figure of the ledger. Its failures are those of the driver's calls.
template <typename Read>
auto figure(Number device, Read read) {
  try {
    return read(host().device(device).ledger);
  } catch (const Refused& refused) {
    throw DriverError("ledger", refused.code, refused.what());
  }
}

std::size_t free_memory(Ledger& ledger) { return ledger.capacity() - std::min(ledger.used(), ledger.capacity()); }

}  // namespace

Number open(std::size_t capacity) {
  try {
    const std::lock_guard lock(host().mutex);
    auto& devices = host().devices;
    for (std::size_t i = 0; i < devices.size(); ++i)
      if (devices[i]->ledger.capacity() == capacity && devices[i]->pid == ::getpid()) return static_cast<Number>(i);
    devices.push_back(std::make_unique<Device>(capacity));
    return static_cast<Number>(devices.size() - 1);
  } catch (const Refused& refused) {
    throw DriverError("open", refused.code, refused.what());
  }
}

const cuda::Platform& platform() {
  static const cuda::Platform only = {
      .api = calls(),
      .uuid_prefix = "HOST-",
      .is_gpu = false,
      .lists_all = true,
      .free_memory = [](Number device) { return std::optional(figure(device, &free_memory)); },
      .processes = [](Number device) { return figure(device, [](Ledger& ledger) { return ledger.processes(); }); },
      .computing = [](Number) { return std::vector<int>(); },  // no work outlives its process
      .holdings = [](Number device) { return figure(device, [](Ledger& ledger) { return ledger.holdings(); }); },
      .adopt = [](AllocationHandle handle) { host().addresses.adopt(handle); },
  };
  return only;
}

}  // namespace memsaver::host

void* memsaver_table(const char* name) {
  using namespace memsaver;
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("host")) return &host::calls();
  if (is("files")) return &file_calls();
  if (is("clock")) return &clock_calls();
  try {
    return is("cuda") ? &cuda::api() : nullptr;
  } catch (const DriverError&) {
    return nullptr;
  }
}
