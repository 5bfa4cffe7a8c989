// A CUDA driver and an NVML without a GPU, for tests: the entry points of csrc/driver/cuda_api.h over unnamed files.
//
// Device memory is a range of a sparse file, so contents survive unmapping and cost host memory where they are
// touched. Addresses are real: reserved without access, and within the process's 47 bits. The environment chooses how
// the devices behave (__init__.py); the functions fake_*, at the end, let a test stand within a call, fail it, queue
// work and end contexts.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../../csrc/driver/cuda_api.h"

using namespace memsaver::cuda;

namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr off_t kFileSize = off_t{1} << 60;  // of a device's memory: ranges of it are never used again
constexpr int kMostDevices = 64;
constexpr int kLocationHostNode = 3;

namespace codes {

constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kIllegalAddress = 700;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr Result kNotSupported = 801;

}  // namespace codes

const char* text_of(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : otherwise;
}

long number_of(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtol(text, nullptr, 10) : otherwise;
}

std::size_t bytes_of(const char* name, const char* otherwise) {
  char* unit = nullptr;
  const auto number = std::strtoull(text_of(name, otherwise), &unit, 10);
  const std::string units[] = {"", "KiB", "MiB", "GiB", "TiB"};
  for (int i = 0; i < 5; ++i)
    if (unit == units[i]) return number << (10 * i);
  return number;
}

// "a,b;c" and the like, cut at each of the separators.
std::vector<std::string> split(std::string text, const char* separators) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

struct Primary {  // a device's primary context
  int device = 0;
  int retained = 0;
  bool held_by_others = false;
  Result dead = kSuccess;  // else the code that every call returns
  std::set<std::uint64_t> running;
  int waiting = 0;  // threads within cuCtxSynchronize
};

struct FakeStream {
  Primary* context;
};

struct FakeEvent {
  Primary* context;
  std::vector<std::uint64_t> waits_for;
};

struct Kernel {
  Primary* context;
  DevicePointer address;
  std::size_t size;  // 0: it touches nothing
  unsigned char byte;
};

struct Memory {  // one allocation handle, or several of one file
  int device;
  std::size_t size;
  int file;  // its own file, if it was exported or imported. -1: a range of the device's file
  off_t offset;
  bool exportable;
  ino_t inode = 0;
  std::size_t handles = 0;
  std::size_t mappings = 0;
  AllocationHandle maker = 0;  // the handle of cuMemCreate, until its last release
  std::size_t retained = 0;    // references of that handle beside the first one
  bool counted = true;         // in the used bytes of the device: chunks of another process are counted there
};

struct Mapping {
  std::size_t size;
  std::shared_ptr<Memory> memory;
  std::uint64_t access = 0;  // a bit for each device
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;

  // How it behaves.
  const int devices = static_cast<int>(std::clamp(number_of("FAKE_CUDA_DEVICES", 1), 0L, long{kMostDevices}));
  const std::size_t total = bytes_of("FAKE_CUDA_MEMORY", "80GiB") / kGranularity * kGranularity;
  const std::size_t address_space = bytes_of("FAKE_CUDA_ADDRESS_SPACE", "128TiB");
  const bool contents = number_of("FAKE_CUDA_CONTENTS", 1) != 0;
  const bool record_event = number_of("FAKE_CUDA_NO_RECORD_EVENT", 0) == 0;
  const bool export_attribute = number_of("FAKE_CUDA_NO_EXPORT", 0) == 0;
  const bool fabric = number_of("FAKE_CUDA_FABRIC", 0) != 0;
  const Result export_refusal =
      static_cast<Result>(number_of("FAKE_CUDA_EXPORT_REFUSAL", export_attribute ? kSuccess : codes::kNotSupported));
  const bool virtual_memory = number_of("FAKE_CUDA_NO_VIRTUAL_MEMORY", 0) == 0;
  const bool mig = number_of("FAKE_CUDA_MIG", 0) != 0;
  const bool mps = number_of("FAKE_CUDA_MPS", 0) != 0;
  const bool nvml = number_of("FAKE_CUDA_NO_NVML", 0) == 0;
  const std::size_t occupied = bytes_of("FAKE_CUDA_OCCUPIED", "0");  // on each device, by others
  const std::size_t context_bytes = bytes_of("FAKE_CUDA_CONTEXT", "0");
  const long numa = number_of("FAKE_CUDA_NUMA", -1);  // the node of device 0's memory; the next ones follow
  const long numa_first = number_of("FAKE_CUDA_NUMA_FIRST", 0);
  const long host_node = number_of("FAKE_CUDA_HOST_NODE", -1);
  const std::string peers = text_of("FAKE_CUDA_PEERS", "all");
  const std::string processes = text_of("FAKE_CUDA_PROCESSES", "");
  std::map<std::string, long> delays;  // microseconds

  Primary contexts[kMostDevices];
  std::size_t used[kMostDevices] = {};   // of handles
  std::size_t stack_limit[kMostDevices];  // bytes of a thread
  std::size_t taken[kMostDevices] = {};  // of this process without handles, as of cudaMalloc and of modules
  int files[kMostDevices];
  off_t next_offset[kMostDevices] = {};
  bool makers_ended = false;  // of all memory of other processes

  std::size_t reserved_bytes = 0;
  std::map<DevicePointer, std::size_t> reserved;
  std::map<DevicePointer, Mapping> mapped;
  std::size_t mapped_bytes = 0;
  std::unordered_map<AllocationHandle, std::shared_ptr<Memory>> handles;
  AllocationHandle last_handle = 0;
  std::map<const std::byte*, std::size_t> registered;
  std::size_t registered_bytes = 0;
  std::set<FakeStream*> streams;
  std::set<FakeEvent*> events;
  std::map<std::uint64_t, Kernel> kernels;
  std::uint64_t last_kernel = 0;

  struct Failure {
    Result code;
    int times;
    int after;     // calls that succeed first
    bool happens;  // the call takes effect and reports a failure
  };
  std::map<std::string, Failure> failures;
  std::map<std::string, std::uint64_t> calls;
  std::set<std::string> held;
  std::map<std::string, int> waiting;

  Fake() {
    for (int i = 0; i < kMostDevices; ++i) {
      contexts[i].device = i;
      files[i] = -1;
      stack_limit[i] = 1024;
    }
    for (const std::string& device : split(text_of("FAKE_CUDA_ACTIVE", ""), ","))
      contexts[std::strtol(device.c_str(), nullptr, 10) % kMostDevices].held_by_others = true;
    for (const std::string& each : split(text_of("FAKE_CUDA_DELAYS", ""), ",")) {
      const auto parts = split(each, "=");
      if (parts.size() == 2) delays[parts[0]] = std::strtol(parts[1].c_str(), nullptr, 10);
    }
  }

  std::size_t context_of(int device) const { return contexts[device].retained > 0 ? context_bytes : 0; }

  std::size_t all_used(int device) const { return used[device] + taken[device] + context_of(device) + occupied; }

  // The bytes that NVML lists for this process.
  std::size_t listed(int device) const {
    std::set<const Memory*> seen;
    for (const auto& [handle, memory] : handles) seen.insert(memory.get());
    for (const auto& [address, mapping] : mapped) seen.insert(mapping.memory.get());
    std::size_t bytes = taken[device] + context_of(device);
    for (const Memory* memory : seen) {
      if (memory->device == device && is_listed(*memory)) bytes += memory->size;
    }
    return bytes;
  }

  // NVML lists memory for its maker alone, also if that imports it too, and for an importer after the maker's end.
  bool is_listed(const Memory& memory) const { return memory.counted || makers_ended; }

  bool exists(int device) const { return device >= 0 && device < devices; }

  bool can_access(int device, int other) const {
    if (device == other || peers == "all") return true;
    if (peers == "none") return false;
    for (const std::string& pair : split(peers, ",")) {  // "0-1,2-3"
      const auto ends = split(pair, "-");
      if (ends.size() != 2) continue;
      const int a = std::atoi(ends[0].c_str()), b = std::atoi(ends[1].c_str());
      if ((a == device && b == other) || (a == other && b == device)) return true;
    }
    return false;
  }

  int file_of(int device) {
    if (files[device] < 0) {
      files[device] = ::memfd_create("fake-cuda", MFD_CLOEXEC);
      if (files[device] < 0 || ::ftruncate(files[device], kFileSize) != 0) std::abort();
    }
    return files[device];
  }

  void drop_if_unused(const std::shared_ptr<Memory>& memory) {
    if (memory->handles > 0 || memory->mappings > 0) return;
    if (memory->counted) used[memory->device] -= memory->size;
    if (memory->file >= 0)
      ::close(memory->file);
    else if (contents)
      ::fallocate(file_of(memory->device), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset,
                  static_cast<off_t>(memory->size));
  }

  // The mappings that make up a range exactly; empty where they do not.
  std::vector<std::map<DevicePointer, Mapping>::iterator> whole(DevicePointer address, std::size_t size) {
    std::vector<std::map<DevicePointer, Mapping>::iterator> found;
    DevicePointer at = address;
    for (auto entry = mapped.find(address); entry != mapped.end() && entry->first == at && at < address + size;
         ++entry) {
      found.push_back(entry);
      at += entry->second.size;
    }
    if (at != address + size) found.clear();
    return found;
  }

  bool accessible(int device, DevicePointer address, std::size_t size) {
    auto entry = mapped.upper_bound(address);
    if (entry == mapped.begin()) return false;
    DevicePointer at = address;
    for (--entry; entry != mapped.end() && at < address + size; ++entry) {
      const DevicePointer end = entry->first + entry->second.size;
      if (entry->first > at || end <= at || (entry->second.access >> device & 1) == 0) return false;
      at = end;
    }
    return at >= address + size;
  }

  // A copy may touch one registration of pinned memory, or none.
  bool one_registration(const void* host, std::size_t size) {
    const auto* begin = static_cast<const std::byte*>(host);
    auto next = registered.upper_bound(begin);
    if (next != registered.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second > begin) return begin + size <= before->first + before->second;
    }
    return next == registered.end() || next->first >= begin + size;
  }

  void kill(Primary& context, Result code) {
    if (context.dead == kSuccess) context.dead = code;
    context.running.clear();
    changed.notify_all();
  }

  bool done(const FakeEvent& event) const {
    for (const std::uint64_t kernel : event.waits_for)
      if (event.context->running.contains(kernel)) return false;
    return true;
  }
};

Fake& fake() {
  static auto* only = new Fake;  // outlives every thread
  return *only;
}

using Lock = std::unique_lock<std::mutex>;

thread_local std::vector<Primary*> stack;  // of current contexts
thread_local int capture_mode = 0;

// Each call passes here first: tests stop it, delay it or make it fail.
class Call {
 public:
  explicit Call(const char* name) : name_(name), lock(fake().mutex) {
    Fake& all = fake();
    ++all.calls[name];
    if (const auto delay = all.delays.find(name); delay != all.delays.end()) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delay->second));
      lock.lock();
    }
    if (all.held.contains(name)) {
      ++all.waiting[name];
      all.changed.notify_all();
      all.changed.wait(lock, [&] { return !all.held.contains(name); });
      --all.waiting[name];
      all.changed.notify_all();
    }
    const auto failure = all.failures.find(name);
    if (failure == all.failures.end()) return;
    if (failure->second.after-- > 0) return;
    failure->second.after = 0;
    (failure->second.happens ? late_ : early_) = failure->second.code;
    if (--failure->second.times == 0) all.failures.erase(failure);
  }

  // Nothing, or the code with which the call ends before it did anything.
  Result refusal() const { return early_; }
  // The same, also for a current context that is dead, and where there is none.
  Result refusal_in_context(bool required = true) const {
    if (early_ != kSuccess) return early_;
    if (stack.empty()) return required ? codes::kInvalidContext : kSuccess;
    return stack.back()->dead;
  }
  Result end(Result code = kSuccess) const { return code == kSuccess ? late_ : code; }

 private:
  const char* name_;
  Result early_ = kSuccess;
  Result late_ = kSuccess;

 public:
  Lock lock;
};

#define FAKE_ENTER(name) \
  Fake& all = fake();    \
  Call call(name);       \
  if (const Result code = call.refusal(); code != kSuccess) return code

#define FAKE_ENTER_CONTEXT(name) \
  Fake& all = fake();            \
  Call call(name);               \
  if (const Result code = call.refusal_in_context(); code != kSuccess) return code

// Calls that need no context, and fail if it is dead.
#define FAKE_ENTER_ANY(name) \
  Fake& all = fake();        \
  Call call(name);           \
  if (const Result code = call.refusal_in_context(false); code != kSuccess) return code

void* at(DevicePointer address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

Result cuInit(unsigned) {
  Call call("cuInit");
  return call.end(call.refusal());
}

Result cuGetErrorString(Result code, const char** text) {
  thread_local std::string kept;
  kept = "fake error " + std::to_string(code);
  *text = kept.c_str();
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  FAKE_ENTER("cuDeviceGetCount");
  *count = all.devices;
  return call.end();
}

Result cuDeviceGet(Device* device, int ordinal) {
  FAKE_ENTER("cuDeviceGet");
  if (!all.exists(ordinal)) return codes::kInvalidDevice;
  *device = ordinal;
  return call.end();
}

Result cuDeviceGetUuid(Uuid* uuid, Device device) {
  FAKE_ENTER("cuDeviceGetUuid");
  if (!all.exists(device)) return codes::kInvalidDevice;
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(0xf0 + i);
  uuid->bytes[15] = static_cast<unsigned char>(device);
  return call.end();
}

Result cuDeviceGetAttribute(int* value, int which, Device device) {
  FAKE_ENTER("cuDeviceGetAttribute");
  if (!all.exists(device)) return codes::kInvalidDevice;
  switch (which) {
    case 16: *value = 132; break;
    case 39: *value = 2048; break;
    case 102: *value = all.virtual_memory; break;
    case 103: *value = all.export_attribute; break;
    case 110: *value = 1; break;
    case 130: *value = all.numa >= 0 && device >= all.numa_first; break;
    case 131: *value = all.numa >= 0 && device >= all.numa_first ? static_cast<int>(all.numa) + device : -1; break;
    case 133: *value = all.mps; break;
    case 134: *value = static_cast<int>(all.host_node); break;
    default: return codes::kInvalidValue;
  }
  return call.end();
}

Result cuDeviceTotalMem(std::size_t* bytes, Device device) {
  FAKE_ENTER("cuDeviceTotalMem");
  if (!all.exists(device)) return codes::kInvalidDevice;
  *bytes = all.total;
  return call.end();
}

Result cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  FAKE_ENTER("cuDeviceCanAccessPeer");
  if (!all.exists(device) || !all.exists(peer)) return codes::kInvalidDevice;
  *can = device != peer && all.can_access(device, peer);
  return call.end();
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  FAKE_ENTER("cuDevicePrimaryCtxRetain");
  if (!all.exists(device)) return codes::kInvalidDevice;
  ++all.contexts[device].retained;
  *context = &all.contexts[device];
  return call.end();
}

Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  FAKE_ENTER("cuDevicePrimaryCtxGetState");
  if (!all.exists(device)) return codes::kInvalidDevice;
  *flags = 0;
  *active = all.contexts[device].retained > 0 || all.contexts[device].held_by_others;
  return call.end();
}

Result cuCtxPushCurrent(Context context) {
  FAKE_ENTER("cuCtxPushCurrent");
  auto* primary = static_cast<Primary*>(context);
  if (primary < all.contexts || primary >= all.contexts + all.devices) return codes::kInvalidContext;
  stack.push_back(primary);
  return call.end();
}

Result cuCtxPopCurrent(Context* context) {
  FAKE_ENTER("cuCtxPopCurrent");
  static_cast<void>(all);
  if (stack.empty()) return codes::kInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return call.end();
}

Result cuCtxGetLimit(std::size_t* bytes, int which) {
  FAKE_ENTER_CONTEXT("cuCtxGetLimit");
  if (which != kLimitStackSize) return codes::kInvalidValue;
  *bytes = all.stack_limit[stack.back()->device];
  return call.end();
}

Result cuCtxSetLimit(int which, std::size_t bytes) {
  FAKE_ENTER_CONTEXT("cuCtxSetLimit");
  if (which != kLimitStackSize) return codes::kInvalidValue;
  all.stack_limit[stack.back()->device] = bytes;
  return call.end();
}

Result cuCtxSynchronize() {
  FAKE_ENTER_CONTEXT("cuCtxSynchronize");
  Primary& context = *stack.back();
  const std::set<std::uint64_t> queued = context.running;
  ++context.waiting;
  all.changed.wait(call.lock, [&] {
    return context.dead != kSuccess || std::none_of(queued.begin(), queued.end(), [&](std::uint64_t kernel) {
             return context.running.contains(kernel);
           });
  });
  --context.waiting;
  return call.end(context.dead);
}

Result cuCtxRecordEvent(Context context, Event event) {
  FAKE_ENTER("cuCtxRecordEvent");
  auto* primary = static_cast<Primary*>(context);
  auto* recorded = static_cast<FakeEvent*>(event);
  if (!all.events.contains(recorded)) return codes::kInvalidHandle;
  if (recorded->context != primary) return codes::kInvalidValue;
  if (primary->dead != kSuccess) return primary->dead;
  recorded->waits_for.assign(primary->running.begin(), primary->running.end());
  return call.end();
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
  FAKE_ENTER_CONTEXT("cuMemGetInfo");
  *total = all.total;
  *free = all.total - all.all_used(stack.back()->device);
  return call.end();
}

Result cuMemAddressReserve(DevicePointer* address, std::size_t size, std::size_t alignment, DevicePointer,
                           unsigned long long) {
  FAKE_ENTER_ANY("cuMemAddressReserve");
  if (size == 0 || size % kGranularity != 0) return codes::kInvalidValue;
  alignment = std::max(alignment, kGranularity);
  if (all.reserved_bytes + size > all.address_space) return codes::kOutOfMemory;
  void* memory = ::mmap(nullptr, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return codes::kOutOfMemory;
  const auto start = reinterpret_cast<DevicePointer>(memory);
  const DevicePointer aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) ::munmap(memory, aligned - start);
  if (start + alignment > aligned) ::munmap(at(aligned + size), start + alignment - aligned);
  all.reserved[aligned] = size;
  all.reserved_bytes += size;
  *address = aligned;
  return call.end();
}

Result cuMemAddressFree(DevicePointer address, std::size_t size) {
  FAKE_ENTER_ANY("cuMemAddressFree");
  const auto found = all.reserved.find(address);
  if (found == all.reserved.end() || found->second != size) return codes::kInvalidValue;
  const auto mapping = all.mapped.lower_bound(address);
  if (mapping != all.mapped.end() && mapping->first < address + size) return codes::kInvalidValue;
  all.reserved.erase(found);
  all.reserved_bytes -= size;
  ::munmap(at(address), size);
  return call.end();
}

Result cuMemCreate(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, unsigned long long) {
  FAKE_ENTER_ANY("cuMemCreate");
  if (size == 0 || size % kGranularity != 0 || properties->type != kAllocationPinned) return codes::kInvalidValue;
  if (properties->location.type == kLocationHostNode) {  // counts on no device
    all.handles[*handle = ++all.last_handle] = std::make_shared<Memory>(Memory{0, 0, -1, 0, false, 0, 1});
    return call.end();
  }
  if (properties->location.type != kLocationDevice || !all.exists(properties->location.id))
    return codes::kInvalidDevice;
  constexpr int kFabric = 8;
  if ((properties->handle_types & ~(kHandlePosixFd | (all.fabric ? kFabric : 0))) != 0) return codes::kNotSupported;
  const bool exportable = properties->handle_types == kHandlePosixFd;
  if (exportable && all.export_refusal != kSuccess) return all.export_refusal;
  const int device = properties->location.id;
  if (size > all.total - all.all_used(device)) return codes::kOutOfMemory;
  all.used[device] += size;
  auto memory = std::make_shared<Memory>(Memory{device, size, -1, all.next_offset[device], exportable});
  all.next_offset[device] += static_cast<off_t>(size);
  memory->handles = 1;
  *handle = memory->maker = ++all.last_handle;
  all.handles[*handle] = std::move(memory);
  return call.end();
}

Result cuMemRelease(AllocationHandle handle) {
  FAKE_ENTER_ANY("cuMemRelease");
  const auto found = all.handles.find(handle);
  if (found == all.handles.end()) return codes::kInvalidValue;
  const auto memory = found->second;
  if (memory->maker == handle && memory->retained > 0) {
    --memory->retained;
    return call.end();
  }
  all.handles.erase(found);
  --memory->handles;
  if (memory->maker == handle) memory->maker = 0;
  all.drop_if_unused(memory);
  return call.end();
}

// A chunk's contents move to a file of its own, under the mappings that there are.
Result cuMemExportToShareableHandle(void* file, AllocationHandle handle, int type, unsigned long long) {
  FAKE_ENTER_ANY("cuMemExportToShareableHandle");
  const auto found = all.handles.find(handle);
  if (found == all.handles.end() || type != kHandlePosixFd) return codes::kInvalidValue;
  Memory& memory = *found->second;
  if (!memory.exportable) return codes::kInvalidValue;
  if (memory.file < 0) {
    const int own = ::memfd_create(("fake-cuda-" + std::to_string(memory.device)).c_str(), MFD_CLOEXEC);
    if (own < 0 || ::ftruncate(own, static_cast<off_t>(memory.size)) != 0) return codes::kOutOfMemory;
    if (all.contents) {
      const int shared = all.file_of(memory.device);
      void* from = ::mmap(nullptr, memory.size, PROT_READ, MAP_SHARED, shared, memory.offset);
      void* to = ::mmap(nullptr, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
      std::memcpy(to, from, memory.size);
      ::munmap(from, memory.size);
      ::munmap(to, memory.size);
      ::fallocate(shared, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.offset, static_cast<off_t>(memory.size));
    }
    struct stat status{};
    ::fstat(own, &status);
    memory.file = own;
    memory.offset = 0;
    memory.inode = status.st_ino;
    for (const auto& [address, mapping] : all.mapped)
      if (mapping.memory.get() == &memory && all.contents)
        ::mmap(at(address), mapping.size, mapping.access != 0 ? PROT_READ | PROT_WRITE : PROT_NONE,
               MAP_SHARED | MAP_FIXED, own, 0);
  }
  const int copy = ::fcntl(memory.file, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return 304;
  *static_cast<int*>(file) = copy;
  return call.end();
}

Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* file, int type) {
  FAKE_ENTER_ANY("cuMemImportFromShareableHandle");
  const int given = static_cast<int>(reinterpret_cast<std::intptr_t>(file));
  char link[64] = {};
  const std::string self = "/proc/self/fd/" + std::to_string(given);
  const std::string prefix = "/memfd:fake-cuda-";
  if (type != kHandlePosixFd || ::readlink(self.c_str(), link, sizeof link - 1) < 0 ||
      std::strncmp(link, prefix.c_str(), prefix.size()) != 0)
    return codes::kInvalidValue;
  struct stat status{};
  ::fstat(given, &status);
  std::shared_ptr<Memory> memory;
  for (const auto& [number, known] : all.handles)
    if (known->inode == status.st_ino) memory = known;
  for (const auto& [address, mapping] : all.mapped)
    if (mapping.memory->inode == status.st_ino) memory = mapping.memory;
  if (memory == nullptr) {
    const int own = ::fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return 304;
    const int device = std::atoi(link + prefix.size());
    memory = std::make_shared<Memory>(Memory{device, static_cast<std::size_t>(status.st_size), own, 0, true});
    memory->inode = status.st_ino;
    memory->counted = false;
  }
  ++memory->handles;
  *handle = ++all.last_handle;
  all.handles[*handle] = std::move(memory);
  return call.end();
}

Result cuMemMap(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle,
                unsigned long long) {
  FAKE_ENTER_ANY("cuMemMap");
  const auto found = all.handles.find(handle);
  if (found == all.handles.end() || offset != 0 || size != found->second->size || address % kGranularity != 0)
    return codes::kInvalidValue;
  auto range = all.reserved.upper_bound(address);
  if (range == all.reserved.begin()) return codes::kInvalidValue;
  --range;
  if (address + size > range->first + range->second) return codes::kInvalidValue;
  const auto next = all.mapped.lower_bound(address);
  if (next != all.mapped.end() && next->first < address + size) return codes::kInvalidValue;
  if (next != all.mapped.begin() && std::prev(next)->first + std::prev(next)->second.size > address)
    return codes::kInvalidValue;
  const auto& memory = found->second;
  if (all.contents) {
    const int file = memory->file >= 0 ? memory->file : all.file_of(memory->device);
    if (::mmap(at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, memory->offset) == MAP_FAILED)
      return codes::kOutOfMemory;
  }
  ++memory->mappings;
  all.mapped[address] = {size, memory};
  all.mapped_bytes += size;
  return call.end();
}

Result cuMemSetAccess(DevicePointer address, std::size_t size, const AccessDesc* access, std::size_t count) {
  FAKE_ENTER_ANY("cuMemSetAccess");
  const auto chunks = all.whole(address, size);
  if (chunks.empty()) return codes::kInvalidValue;
  for (std::size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if (access[i].location.type != kLocationDevice || !all.exists(device)) return codes::kInvalidDevice;
    for (const auto& chunk : chunks)
      if (!all.can_access(device, chunk->second.memory->device)) return codes::kInvalidDevice;
  }
  for (const auto& chunk : chunks) {
    std::uint64_t& bits = chunk->second.access;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bit = std::uint64_t{1} << access[i].location.id;
      bits = access[i].flags == kAccessReadWrite ? bits | bit : bits & ~bit;
    }
  }
  if (!all.contents) return call.end();
  const auto allowed = [](const auto& chunk) { return chunk->second.access != 0; };
  const bool alike = std::all_of(chunks.begin(), chunks.end(),
                                 [&](const auto& chunk) { return allowed(chunk) == allowed(chunks.front()); });
  for (const auto& chunk : chunks) {
    const int protection = allowed(chunk) ? PROT_READ | PROT_WRITE : PROT_NONE;
    const std::size_t bytes = alike ? size : chunk->second.size;  // one call serves all where it can
    if (::mprotect(at(chunk->first), bytes, protection) != 0) return codes::kOutOfMemory;
    if (alike) break;
  }
  return call.end();
}

Result cuMemRetainAllocationHandle(AllocationHandle* handle, void* address) {
  FAKE_ENTER_ANY("cuMemRetainAllocationHandle");
  const auto found = all.mapped.find(reinterpret_cast<DevicePointer>(address));
  if (found == all.mapped.end()) return codes::kInvalidValue;
  const auto& memory = found->second.memory;
  if (memory->maker != 0) {
    ++memory->retained;
    *handle = memory->maker;
    return call.end();
  }
  all.handles[++all.last_handle] = memory;
  ++memory->handles;
  *handle = all.last_handle;
  return call.end();
}

Result cuMemUnmap(DevicePointer address, std::size_t size) {
  FAKE_ENTER_ANY("cuMemUnmap");
  const auto chunks = all.whole(address, size);
  if (chunks.empty()) return codes::kInvalidValue;
  if (all.contents)
    ::mmap(at(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (const auto& chunk : chunks) {
    const auto memory = chunk->second.memory;
    all.mapped.erase(chunk);
    all.mapped_bytes -= memory->size;
    --memory->mappings;
    all.drop_if_unused(memory);
  }
  return call.end();
}

Result cuMemHostRegister(void* host, std::size_t size, unsigned) {
  FAKE_ENTER_CONTEXT("cuMemHostRegister");
  const auto* begin = static_cast<const std::byte*>(host);
  const auto next = all.registered.lower_bound(begin);
  if (next != all.registered.end() && next->first < begin + size) return codes::kAlreadyRegistered;
  if (next != all.registered.begin() && std::prev(next)->first + std::prev(next)->second > begin)
    return codes::kAlreadyRegistered;
  all.registered[begin] = size;
  all.registered_bytes += size;
  return call.end();
}

Result cuMemHostUnregister(void* host) {
  FAKE_ENTER_CONTEXT("cuMemHostUnregister");
  const auto found = all.registered.find(static_cast<const std::byte*>(host));
  if (found == all.registered.end()) return codes::kNotRegistered;
  all.registered_bytes -= found->second;
  all.registered.erase(found);
  return call.end();
}

// Copies are done as they are queued. One that the stream's device may not make ends its context.
static Result copy(Call& call, Stream stream, void* to, const void* from, DevicePointer device_range,
                   const void* host_range, std::size_t size) {
  Fake& all = fake();
  const auto* queue = static_cast<const FakeStream*>(stream);
  if (queue != nullptr && !all.streams.contains(const_cast<FakeStream*>(queue))) return codes::kInvalidHandle;
  Primary& context = queue != nullptr ? *queue->context : *stack.back();
  if (context.dead != kSuccess) return context.dead;
  if (!all.one_registration(host_range, size)) return codes::kInvalidValue;
  if (!all.accessible(context.device, device_range, size)) {
    all.kill(context, codes::kIllegalAddress);
    return codes::kIllegalAddress;
  }
  call.lock.unlock();
  if (all.contents) std::memcpy(to, from, size);
  return call.end();
}

Result cuMemcpyDtoHAsync(void* host, DevicePointer device, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoHAsync");
  static_cast<void>(all);
  return copy(call, stream, host, at(device), device, host, size);
}

Result cuMemcpyHtoDAsync(DevicePointer device, const void* host, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyHtoDAsync");
  static_cast<void>(all);
  return copy(call, stream, at(device), host, device, host, size);
}

Result cuMemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoDAsync");
  const auto* queue = static_cast<FakeStream*>(stream);
  Primary& context = queue != nullptr ? *queue->context : *stack.back();
  if (context.dead == kSuccess && !all.accessible(context.device, to, size)) all.kill(context, codes::kIllegalAddress);
  return copy(call, stream, at(to), at(from), from, nullptr, size);
}

Result cuMemsetD8Async(DevicePointer device, unsigned char byte, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemsetD8Async");
  const auto* queue = static_cast<FakeStream*>(stream);
  Primary& context = queue != nullptr ? *queue->context : *stack.back();
  if (context.dead != kSuccess) return context.dead;
  if (!all.accessible(context.device, device, size)) {
    all.kill(context, codes::kIllegalAddress);
    return codes::kIllegalAddress;
  }
  call.lock.unlock();
  if (all.contents) std::memset(at(device), byte, size);
  return call.end();
}

Result cuStreamCreate(Stream* stream, unsigned) {
  FAKE_ENTER_CONTEXT("cuStreamCreate");
  auto* made = new FakeStream{stack.back()};
  all.streams.insert(made);
  *stream = made;
  return call.end();
}

Result cuStreamSynchronize(Stream stream) {
  FAKE_ENTER_CONTEXT("cuStreamSynchronize");
  const auto found = all.streams.find(static_cast<FakeStream*>(stream));
  if (found == all.streams.end()) return codes::kInvalidHandle;
  return call.end((*found)->context->dead);
}

Result cuEventCreate(Event* event, unsigned) {
  FAKE_ENTER_CONTEXT("cuEventCreate");
  auto* made = new FakeEvent{stack.back(), {}};
  all.events.insert(made);
  *event = made;
  return call.end();
}

// Streams of the caller's own hold copies alone, which are done; the default stream is behind all that runs.
Result cuEventRecord(Event event, Stream stream) {
  FAKE_ENTER_CONTEXT("cuEventRecord");
  auto* recorded = static_cast<FakeEvent*>(event);
  if (!all.events.contains(recorded)) return codes::kInvalidHandle;
  const auto* queue = static_cast<FakeStream*>(stream);
  if (queue != nullptr && queue->context != recorded->context) return codes::kInvalidHandle;
  recorded->waits_for.clear();
  if (queue == nullptr)
    recorded->waits_for.assign(recorded->context->running.begin(), recorded->context->running.end());
  return call.end(recorded->context->dead);
}

Result cuEventSynchronize(Event event) {
  FAKE_ENTER_CONTEXT("cuEventSynchronize");
  auto* waited = static_cast<FakeEvent*>(event);
  if (!all.events.contains(waited)) return codes::kInvalidHandle;
  all.changed.wait(call.lock, [&] { return waited->context->dead != kSuccess || all.done(*waited); });
  return call.end(waited->context->dead);
}

Result cuEventQuery(Event event) {
  FAKE_ENTER_CONTEXT("cuEventQuery");
  auto* asked = static_cast<FakeEvent*>(event);
  if (!all.events.contains(asked)) return codes::kInvalidHandle;
  if (asked->context->dead != kSuccess) return asked->context->dead;
  return all.done(*asked) ? call.end() : kNotReady;
}

Result cuEventDestroy(Event event) {
  FAKE_ENTER("cuEventDestroy");
  auto* gone = static_cast<FakeEvent*>(event);
  if (all.events.erase(gone) == 0) return codes::kInvalidHandle;
  delete gone;
  return call.end();
}

Result cuGetProcAddress_v2(const char* name, void** entry, int version, unsigned long long, int* found) {
  *entry = nullptr;
  *found = 1;  // not there
#define FAKE_ENTRY(call, least, ...)                                                                          \
  static_assert(std::is_same_v<decltype(&call), Result (*)(__VA_ARGS__)>, "the signature that is asked for"); \
  if (std::strcmp(name, #call) == 0 && version >= least) *entry = reinterpret_cast<void*>(&call);
  MEMSAVER_CUDA_CALLS(FAKE_ENTRY, FAKE_ENTRY)
#undef FAKE_ENTRY
  if (!fake().record_event && std::strcmp(name, "cuCtxRecordEvent") == 0) *entry = nullptr;
  if (*entry == nullptr) return codes::kNotFound;
  *found = 0;
  return kSuccess;
}

// NVML. Handles of devices are pointers into `contexts`.

struct NvmlProcess {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance;
  unsigned compute_instance;
};

struct NvmlMemory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() { return fake().nvml ? 0 : 9; }  // 9: the driver is not loaded

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  Fake& all = fake();
  Call call("nvmlDeviceGetHandleByUUID");
  if (call.refusal() != kSuccess) return call.refusal();
  const std::string prefix = all.mig ? "MIG-" : "GPU-";
  for (int i = 0; i < all.devices; ++i) {
    char text[64];
    std::snprintf(text, sizeof text, "%sf0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe%02x", prefix.c_str(), i);
    if (std::strcmp(text, uuid) != 0) continue;
    *device = &all.contexts[i];
    return 0;
  }
  return 6;  // not found
}

int nvmlDeviceGetMemoryInfo(void* device, NvmlMemory* memory) {
  Fake& all = fake();
  Call call("nvmlDeviceGetMemoryInfo");
  if (call.refusal() != kSuccess) return call.refusal();
  const std::size_t used = all.all_used(static_cast<Primary*>(device)->device);
  *memory = {all.total, all.total - used, used};
  return 0;
}

// This process, where it has a context or memory there, and those that the environment names: "device:pid:bytes,...".
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, NvmlProcess* rows) {
  Fake& all = fake();
  Call call("nvmlDeviceGetComputeRunningProcesses_v3");
  if (call.refusal() != kSuccess) return call.refusal();
  const auto* context = static_cast<Primary*>(device);
  std::vector<NvmlProcess> found;
  if (context->retained > 0 || all.listed(context->device) > 0)
    found.push_back({static_cast<unsigned>(::getpid()), all.listed(context->device), 0, 0});
  for (const std::string& each : split(all.processes, ",")) {
    const auto parts = split(each, ":");
    if (parts.size() == 3 && std::atoi(parts[0].c_str()) == context->device)
      found.push_back({static_cast<unsigned>(std::atoi(parts[1].c_str())), std::stoull(parts[2]), 0, 0});
  }
  const bool fits = found.size() <= *count;
  if (fits) std::copy(found.begin(), found.end(), rows);
  *count = static_cast<unsigned>(found.size());
  return fits ? 0 : 7;  // 7: more rows are needed
}

// For tests.

// Ends the context of a device: each of its calls returns `code` from now on, and its kernels are removed.
void fake_kill(int device, Result code) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.kill(all.contexts[device], code);
}

// Queues work on a device, which ends with fake_finish() and then writes `byte` to a range, where there is one. Returns
// its number.
std::uint64_t fake_launch(int device, DevicePointer address, std::size_t size, int byte) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  Primary& context = all.contexts[device];
  all.kernels[++all.last_kernel] = {&context, address, size, static_cast<unsigned char>(byte)};
  context.running.insert(all.last_kernel);
  return all.last_kernel;
}

// Returns the state of its context: an access that is not allowed ends that.
Result fake_finish(std::uint64_t number) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  const auto found = all.kernels.find(number);
  if (found == all.kernels.end()) return codes::kInvalidHandle;
  const Kernel kernel = found->second;
  all.kernels.erase(found);
  if (kernel.size > 0 && kernel.context->dead == kSuccess) {
    if (!all.accessible(kernel.context->device, kernel.address, kernel.size))
      all.kill(*kernel.context, codes::kIllegalAddress);
    else if (all.contents)
      std::memset(at(kernel.address), kernel.byte, kernel.size);
  }
  kernel.context->running.erase(number);
  all.changed.notify_all();
  return kernel.context->dead;
}

// A kernel that runs at once.
Result fake_run(int device, DevicePointer address, std::size_t size, int byte) {
  return fake_finish(fake_launch(device, address, size, byte));
}

// Calls of this name stop before they do anything, until fake_release().
void fake_hold(const char* name) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.held.insert(name);
}

void fake_release(const char* name) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.held.erase(name);
  all.changed.notify_all();
}

// How many calls stand there.
int fake_held(const char* name) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.waiting[name];
}

// How many threads wait for the device.
int fake_waiting(int device) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.contexts[device].waiting;
}

// After so many calls of this name, the next `times` return `code` (0: none do any more). happens: they do what they
// should, and say otherwise.
void fake_fail(const char* name, Result code, int times, int after, int happens) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  if (times == 0)
    all.failures.erase(name);
  else
    all.failures[name] = {code, times, after, happens != 0};
}

std::uint64_t fake_calls(const char* name) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.calls[name];
}

// Another library in the process takes or gives up the device's primary context.
void fake_activate(int device, int on) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.contexts[device].held_by_others = on != 0;
}

int fake_retained(int device) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.contexts[device].retained;
}

// The devices that may access all of a range, a bit for each.
std::uint64_t fake_access(DevicePointer address, std::size_t size) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  std::uint64_t bits = 0;
  for (int device = 0; device < all.devices; ++device)
    if (all.accessible(device, address, size)) bits |= std::uint64_t{1} << device;
  return bits;
}

std::uint64_t fake_used_bytes(int device) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.used[device];
}

// Takes memory of a device for this process without a handle, as cudaMalloc does; negative: gives it back.
void fake_take(int device, std::int64_t bytes) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.taken[device] += static_cast<std::size_t>(bytes);
}

// The limit of a thread's stack, in bytes. The memory of the stacks is taken by fake_take().
void fake_set_stack_limit(int device, std::size_t bytes) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.stack_limit[device] = bytes;
}

// The makers of all imported memory end, and close their descriptors.
void fake_end_makers() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.makers_ended = true;
}

std::uint64_t fake_reserved_bytes() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.reserved_bytes;
}

std::uint64_t fake_mapped_bytes() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.mapped_bytes;
}

std::uint64_t fake_registered_bytes() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.registered_bytes;
}

std::uint64_t fake_events() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  return all.events.size();
}

}  // extern "C"
