// A CUDA driver and an NVML without a GPU, for tests: the entry points of csrc/driver/cuda_api.h over unnamed files,
// and those that a CUDA runtime needs (fake_runtime.cpp).
//
// Device memory is a range of a sparse file, so contents survive unmapping and cost host memory where they are
// touched. Addresses are real: reserved without access, and within the process's 47 bits. The environment chooses how
// the devices behave (__init__.py); the functions fake_*, at the end, let a test stand within a call, fail it, queue
// work and end contexts. Streams, events and captures are in fake_streams.cpp.
#include "fake_cuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace fake_cuda {

constexpr off_t kFileSize = off_t{1} << 60;  // of a device's memory: ranges of it are never used again

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

Fake::Fake() {
  for (int i = 0; i < kMostDevices; ++i) {
    contexts[i].device = i;
    contexts[i].legacy = std::make_shared<FakeStream>();
    contexts[i].legacy->context = &contexts[i];
    files[i] = -1;
  }
  for (const std::string& device : split(text_of("FAKE_CUDA_ACTIVE", ""), ","))
    contexts[std::strtol(device.c_str(), nullptr, 10) % kMostDevices].held_by_others = true;
  for (const std::string& each : split(text_of("FAKE_CUDA_DELAYS", ""), ",")) {
    const auto parts = split(each, "=");
    if (parts.size() == 2) delays[parts[0]] = std::strtol(parts[1].c_str(), nullptr, 10);
  }
}

std::size_t Fake::all_used(int device) const {
  std::size_t bytes = used[device] + taken[device] + context_of(device) + occupied;
  for (const auto& [place, mappings] : page_tables) bytes += place.first == device ? page_table : 0;
  for (const Scrubbed& each : scrubbed) bytes += each.device == device ? each.bytes : 0;
  return bytes;
}

std::size_t Fake::listed(int device) const {
  std::set<const Memory*> seen;
  for (const auto& [handle, memory] : handles) seen.insert(memory.get());
  for (const auto& [address, mapping] : mapped) seen.insert(mapping.memory.get());
  std::size_t bytes = taken[device] + context_of(device);
  for (const Memory* memory : seen) {
    if (memory->device == device && is_listed(*memory)) bytes += memory->size;
  }
  return bytes;
}

bool Fake::is_listed(const Memory& memory) const { return memory.counted || makers_ended; }

bool Fake::can_access(int device, int other) const {
  if (device == other || peers == "all") return true;
  if (peers == "none") return false;
  for (const std::string& pair : split(peers, ",")) {  // "0-1,2>3"
    const auto ends = split(pair, "->");
    if (ends.size() != 2) continue;
    const int a = std::atoi(ends[0].c_str()), b = std::atoi(ends[1].c_str());
    const bool both = pair.find('>') == std::string::npos;
    if ((a == device && b == other) || (both && a == other && b == device)) return true;
  }
  return false;
}

int Fake::file_of(int device) {
  if (files[device] < 0) {
    files[device] = ::memfd_create("fake-cuda", MFD_CLOEXEC);
    if (files[device] < 0 || ::ftruncate(files[device], kFileSize) != 0) std::abort();
  }
  return files[device];
}

void Fake::drop_if_unused(const std::shared_ptr<Memory>& memory) {
  if (memory->handles > 0 || memory->mappings > 0) return;
  if (memory->counted) {
    used[memory->device] -= memory->size;
    if (freed_late > 0) scrubbed.push_back({memory->device, memory->size, freed_late});
  }
  if (memory->file >= 0)
    ::close(memory->file);
  else
    ::fallocate(file_of(memory->device), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset,
                static_cast<off_t>(memory->size));
}

void Fake::look_at_free_memory() {
  std::erase_if(scrubbed, [](Scrubbed& each) { return each.looks-- == 0; });
}

std::vector<std::map<DevicePointer, Mapping>::iterator> Fake::whole(DevicePointer address, std::size_t size) {
  std::vector<std::map<DevicePointer, Mapping>::iterator> found;
  auto range = reserved.upper_bound(address);
  if (range == reserved.begin()) return found;
  --range;
  if (address + size > range->first + range->second) return found;  // over two reservations
  DevicePointer at = address;
  for (auto entry = mapped.find(address); entry != mapped.end() && entry->first == at && at < address + size; ++entry) {
    found.push_back(entry);
    at += entry->second.size;
  }
  if (at != address + size) found.clear();
  return found;
}

bool Fake::accessible(int device, DevicePointer address, std::size_t size) {
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

bool Fake::is_device_memory(DevicePointer address) {
  auto range = reserved.upper_bound(address);
  return range != reserved.begin() && address < (--range)->first + range->second;
}

bool Fake::one_registration(const void* host, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(host);
  auto next = registered.upper_bound(begin);
  if (next != registered.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > begin) return begin + size <= before->first + before->second;
  }
  return next == registered.end() || next->first >= begin + size;
}

bool Fake::is_registered(const void* host) {
  const auto* begin = static_cast<const std::byte*>(host);
  auto next = registered.upper_bound(begin);
  return next != registered.begin() && std::prev(next)->first + std::prev(next)->second > begin;
}

void Fake::kill(Primary& context, Result code) {
  for (Primary& each : contexts) {
    if (&each != &context && !dies_whole) continue;
    if (each.dead == kSuccess) each.dead = code;
    each.running.clear();
  }
  changed.notify_all();
}

Fake& fake() {
  static auto* only = new Fake;  // outlives every thread
  return *only;
}

Call::Call(const char* name) : name_(name), lock(fake().mutex) {
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

}  // namespace fake_cuda

using namespace fake_cuda;

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
    case 133: *value = 0; break;
    case 134: *value = -1; break;
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
  Primary& primary = all.contexts[device];
  if (all.dies_whole && primary.dead != kSuccess) return primary.dead;
  if (primary.retained == 0 && all.context_bytes > all.total - std::min(all.total, all.all_used(device)))
    return codes::kOutOfMemory;
  ++primary.retained;
  *context = &primary;
  return call.end();
}

Result cuDevicePrimaryCtxRelease(Device device) {
  FAKE_ENTER("cuDevicePrimaryCtxRelease");
  if (!all.exists(device) || all.contexts[device].retained == 0) return codes::kInvalidContext;
  --all.contexts[device].retained;
  return call.end();
}

Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  FAKE_ENTER("cuDevicePrimaryCtxGetState");
  if (!all.exists(device)) return codes::kInvalidDevice;
  if (all.dies_whole && all.contexts[device].dead != kSuccess) return all.contexts[device].dead;
  *flags = 0;
  *active = all.contexts[device].retained > 0 || all.contexts[device].held_by_others;
  return call.end();
}

Result cuCtxPushCurrent(Context context) {
  FAKE_ENTER("cuCtxPushCurrent");
  auto* primary = static_cast<Primary*>(context);
  if (primary < all.contexts || primary >= all.contexts + all.devices) return codes::kInvalidContext;
  if (all.dies_whole && primary->dead != kSuccess) return primary->dead;
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

Result cuCtxGetCurrent(Context* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return kSuccess;
}

Result cuCtxSetCurrent(Context context) {
  if (!stack.empty()) stack.pop_back();
  return context == nullptr ? kSuccess : cuCtxPushCurrent(context);
}

Result cuCtxGetDevice(Device* device) {
  if (stack.empty()) return codes::kInvalidContext;
  *device = stack.back()->device;
  return kSuccess;
}

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

Result cuCtxSynchronize() {
  FAKE_ENTER_CONTEXT("cuCtxSynchronize");
  Primary& context = *stack.back();
  if (break_captures_of(context, "cuCtxSynchronize")) return codes::kCaptureUnsupported;
  ++context.waiting;
  run_to(everything_on(context), call.lock);
  --context.waiting;
  all.changed.notify_all();
  return call.end(context.dead);
}

Result cuCtxRecordEvent(Context context, Event event) {
  FAKE_ENTER("cuCtxRecordEvent");
  auto* primary = static_cast<Primary*>(context);
  auto* recorded = static_cast<FakeEvent*>(event);
  if (!all.events.contains(recorded)) return codes::kInvalidHandle;
  if (recorded->context != primary) return codes::kInvalidValue;
  if (primary->dead != kSuccess) return primary->dead;
  if (break_captures_of(*primary, "cuCtxRecordEvent")) return codes::kCaptureUnsupported;
  recorded->point = everything_on(*primary);
  recorded->captured = false;
  return call.end();
}

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
  FAKE_ENTER_CONTEXT("cuMemGetInfo");
  all.look_at_free_memory();
  const std::size_t used = all.all_used(stack.back()->device);
  *total = all.total;
  *free = all.total - std::min(all.total, used);
  return call.end();
}

Result cuMemAddressReserve(DevicePointer* address, std::size_t size, std::size_t alignment, DevicePointer,
                           unsigned long long) {
  FAKE_ENTER_ANY("cuMemAddressReserve");
  if (size == 0 || size % kGranularity != 0) return codes::kInvalidValue;
  alignment = std::max(alignment, kGranularity);
  if (all.adjacent) {  // one reservation begins where the one before ends
    if (all.next_adjacent == 0) {
      constexpr std::size_t kMost = std::size_t{8} << 40;
      void* taken = ::mmap(nullptr, kMost, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (taken == MAP_FAILED) return codes::kOutOfMemory;
      all.next_adjacent = (reinterpret_cast<DevicePointer>(taken) + alignment - 1) / alignment * alignment;
    }
    *address = (all.next_adjacent + alignment - 1) / alignment * alignment;
    all.next_adjacent = *address + size;
    all.reserved[*address] = size;
    all.reserved_bytes += size;
    return call.end();
  }
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
  if (!all.adjacent) ::munmap(at(address), size);
  return call.end();
}

Result cuMemCreate(AllocationHandle* handle, std::size_t size, const AllocationProp* properties, unsigned long long) {
  FAKE_ENTER_ANY("cuMemCreate");
  if (size == 0 || size % kGranularity != 0 || properties->type != kAllocationPinned) return codes::kInvalidValue;
  if (properties->location.type == kLocationHostNode) {  // counts on no device
    all.handles[*handle = ++all.last_handle] = std::make_shared<Memory>(Memory{0, 0, -1, 0, 0, 0, 1});
    return call.end();
  }
  if (properties->location.type != kLocationDevice || !all.exists(properties->location.id))
    return codes::kInvalidDevice;
  constexpr int kFabric = 8;
  if ((properties->handle_types & ~(kHandlePosixFd | kFabric)) != 0) return kNotSupported;
  if ((properties->handle_types & kFabric) != 0 && !all.fabric) return all.fabric_refusal;
  const int types = properties->handle_types;
  if (types == kHandlePosixFd && all.export_refusal != kSuccess) return all.export_refusal;
  const int device = properties->location.id;
  all.look_at_free_memory();
  if (size > all.total - std::min(all.total, all.all_used(device))) return codes::kOutOfMemory;
  all.used[device] += size;
  auto memory = std::make_shared<Memory>(Memory{device, size, -1, all.next_offset[device], types});
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
  if ((memory.handle_types & kHandlePosixFd) == 0) return codes::kInvalidValue;
  if (memory.file < 0) {
    const int own = ::memfd_create(("fake-cuda-" + std::to_string(memory.device)).c_str(), MFD_CLOEXEC);
    if (own < 0 || ::ftruncate(own, static_cast<off_t>(memory.size)) != 0) return codes::kOutOfMemory;
    const int shared = all.file_of(memory.device);
    void* from = ::mmap(nullptr, memory.size, PROT_READ, MAP_SHARED, shared, memory.offset);
    void* to = ::mmap(nullptr, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
    std::memcpy(to, from, memory.size);
    ::munmap(from, memory.size);
    ::munmap(to, memory.size);
    ::fallocate(shared, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.offset, static_cast<off_t>(memory.size));
    struct stat status{};
    ::fstat(own, &status);
    memory.file = own;
    memory.offset = 0;
    memory.inode = status.st_ino;
    for (const auto& [address, mapping] : all.mapped)
      if (mapping.memory.get() == &memory)
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
    memory = std::make_shared<Memory>(Memory{device, static_cast<std::size_t>(status.st_size), own, 0, kHandlePosixFd});
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
  const std::pair<int, DevicePointer> table{memory->device, address >> 30};
  if (all.page_table > 0) {
    if (!all.page_tables.contains(table) &&
        all.page_table > all.total - std::min(all.total, all.all_used(memory->device)))
      return codes::kOutOfMemory;
    ++all.page_tables[table];
  }
  const int file = memory->file >= 0 ? memory->file : all.file_of(memory->device);
  if (::mmap(at(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, memory->offset) == MAP_FAILED)
    return codes::kOutOfMemory;
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
  auto found = all.mapped.upper_bound(reinterpret_cast<DevicePointer>(address));
  if (found == all.mapped.begin()) return codes::kInvalidValue;
  --found;
  if (found->first + found->second.size <= reinterpret_cast<DevicePointer>(address)) return codes::kInvalidValue;
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
  auto chunks = all.whole(address, size);
  if (chunks.empty()) return codes::kInvalidValue;
  Result code = kSuccess;
  if (all.most_unmapped > 0 && chunks.size() > all.most_unmapped) {  // stops in the middle
    chunks.resize(all.most_unmapped);
    all.most_unmapped = 0;
    size = chunks.back()->first + chunks.back()->second.size - address;
    code = 999;
  }
  ::mmap(at(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  for (const auto& chunk : chunks) {
    const auto memory = chunk->second.memory;
    const auto table = all.page_tables.find({memory->device, chunk->first >> 30});
    if (table != all.page_tables.end() && --table->second == 0) all.page_tables.erase(table);
    all.mapped.erase(chunk);
    all.mapped_bytes -= memory->size;
    --memory->mappings;
    all.drop_if_unused(memory);
  }
  return call.end(code);
}

Result cuMemHostRegister(void* host, std::size_t size, unsigned) {
  FAKE_ENTER_UNSAFE("cuMemHostRegister");
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
  FAKE_ENTER_UNSAFE("cuMemHostUnregister");
  const auto found = all.registered.find(static_cast<const std::byte*>(host));
  if (found == all.registered.end()) return codes::kNotRegistered;
  all.registered_bytes -= found->second;
  all.registered.erase(found);
  return call.end();
}

// Calls that a CUDA runtime makes, and memsaver does not.

Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

Result cuGetErrorName(Result code, const char** text) {
  thread_local std::string kept;
  kept = "CUDA_ERROR_" + std::to_string(code);
  *text = kept.c_str();
  return kSuccess;
}

Result cuDeviceGetName(char* text, int size, Device device) {
  std::snprintf(text, static_cast<std::size_t>(size), "Fake GPU %d", device);
  return kSuccess;
}

Result cuDeviceGetPCIBusId(char* text, int size, Device device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return kSuccess;
}

Result cuCtxEnablePeerAccess(Context, unsigned) { return kSuccess; }

Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProp* properties, int) {
  FAKE_ENTER("cuMemGetAllocationGranularity");
  if (!all.exists(properties->location.id)) return codes::kInvalidDevice;
  *bytes = all.granularity;
  return call.end();
}

Result cuMemGetAllocationPropertiesFromHandle(AllocationProp* properties, AllocationHandle handle) {
  FAKE_ENTER_ANY("cuMemGetAllocationPropertiesFromHandle");
  const auto found = all.handles.find(handle);
  if (found == all.handles.end()) return codes::kInvalidValue;
  *properties = {kAllocationPinned, found->second->handle_types, {kLocationDevice, found->second->device}, nullptr, {}};
  return call.end();
}

Result cuMemGetAddressRange(DevicePointer* base, std::size_t* size, DevicePointer address) {
  FAKE_ENTER_ANY("cuMemGetAddressRange");
  auto found = all.mapped.upper_bound(address);
  if (found == all.mapped.begin() || (--found)->first + found->second.size <= address) return codes::kNotFound;
  if (base != nullptr) *base = found->first;
  if (size != nullptr) *size = found->second.size;
  return call.end();
}

Result cuMemAlloc(DevicePointer* address, std::size_t size) {
  Device device = 0;
  {
    FAKE_ENTER_UNSAFE("cuMemAlloc");
    static_cast<void>(all);
    device = stack.back()->device;
  }
  const AllocationProp properties{kAllocationPinned, 0, {kLocationDevice, device}, nullptr, {}};
  const AccessDesc access{{kLocationDevice, device}, kAccessReadWrite};
  const std::size_t rounded = (size + kGranularity - 1) / kGranularity * kGranularity;
  AllocationHandle handle = 0;
  if (const Result code = cuMemCreate(&handle, rounded, &properties, 0); code != kSuccess) return code;
  Result code = cuMemAddressReserve(address, rounded, 0, 0, 0);
  if (code == kSuccess) code = cuMemMap(*address, rounded, 0, handle, 0);
  if (code == kSuccess) code = cuMemSetAccess(*address, rounded, &access, 1);
  cuMemRelease(handle);  // the mapping keeps the memory
  if (code != kSuccess) return code;
  const Lock lock(fake().mutex);
  fake().allocated[*address] = rounded;
  return kSuccess;
}

Result cuMemFree(DevicePointer address) {
  std::size_t size = 0;
  {
    FAKE_ENTER_UNSAFE("cuMemFree");
    const auto found = all.allocated.find(address);
    if (found == all.allocated.end()) return codes::kInvalidValue;
    run_to(everything_on(*stack.back()), call.lock);
    size = found->second;
    all.allocated.erase(found);
  }
  if (const Result code = cuMemUnmap(address, size); code != kSuccess) return code;
  return cuMemAddressFree(address, size);
}

Result cuMemHostAlloc(void** host, std::size_t size, unsigned) {
  FAKE_ENTER_UNSAFE("cuMemHostAlloc");
  if (::posix_memalign(host, 4096, std::max(size, std::size_t{1})) != 0) return codes::kOutOfMemory;
  all.registered[static_cast<const std::byte*>(*host)] = size;
  all.registered_bytes += size;
  all.host_allocated.insert(*host);
  return call.end();
}

Result cuMemFreeHost(void* host) {
  FAKE_ENTER_UNSAFE("cuMemFreeHost");
  const auto found = all.registered.find(static_cast<const std::byte*>(host));
  if (all.host_allocated.erase(host) == 0 || found == all.registered.end()) return codes::kInvalidValue;
  run_to(everything_on(*stack.back()), call.lock);
  all.registered_bytes -= found->second;
  all.registered.erase(found);
  std::free(host);
  return call.end();
}

Result cuPointerGetAttribute(void* data, int which, DevicePointer address) {
  constexpr int kMemoryType = 2, kDeviceOrdinal = 9;
  FAKE_ENTER_ANY("cuPointerGetAttribute");
  auto found = all.mapped.upper_bound(address);
  const bool on_device = found != all.mapped.begin() && (--found)->first + found->second.size > address;
  if (!on_device && !all.is_registered(at(address))) return codes::kInvalidValue;
  switch (which) {
    case kMemoryType: *static_cast<unsigned*>(data) = on_device ? 2 : 1; break;
    case kDeviceOrdinal: *static_cast<int*>(data) = on_device ? found->second.memory->device : 0; break;
    default: return codes::kInvalidValue;
  }
  return call.end();
}

// For calls that a library looks up and a device may lack.
Result fake_not_supported() { return kNotSupported; }

}  // extern "C"

namespace {

template <typename Function>
void* function_pointer(Function* call) {
  return reinterpret_cast<void*>(call);
}

// Another pointer for another version of a call, as a driver may give it.
template <auto call, typename... Arguments>
Result of_another_version(Arguments... arguments) {
  return call(arguments...);
}

#define FAKE_RUNTIME_CALLS(each)                                                                                       \
  each(cuCtxGetCurrent) each(cuCtxSetCurrent) each(cuCtxGetDevice) each(cuCtxGetStreamPriorityRange)                   \
      each(cuDriverGetVersion) each(cuGetErrorName) each(cuDeviceGetName) each(cuDeviceGetPCIBusId)                    \
          each(cuCtxEnablePeerAccess) each(cuMemGetAllocationGranularity) each(cuMemGetAllocationPropertiesFromHandle) \
              each(cuMemGetAddressRange) each(cuMemHostAlloc) each(cuMemFreeHost) each(cuPointerGetAttribute)

// They exist, and the device does not support them.
constexpr const char* kRefused[] = {
    "cuMemsetD32Async",          "cuStreamWriteValue32",   "cuMulticastAddDevice",        "cuMulticastBindMem",
    "cuMulticastCreate",         "cuMulticastUnbind",      "cuCtxFromGreenCtx",           "cuGreenCtxCreate",
    "cuGreenCtxDestroy",         "cuGreenCtxStreamCreate", "cuDevSmResourceSplitByCount", "cuDeviceGetDevResource",
    "cuDevResourceGenerateDesc", "cuLogsRegisterCallback", "cuLogsUnregisterCallback",
};

}  // namespace

extern "C" {

Result cuGetProcAddress_v2(const char* name, void** entry, int version, unsigned long long, int* found) {
  *entry = nullptr;
  *found = 1;  // not there
  const bool other = fake().pointers_by_version;
#define FAKE_ENTRY(call, least, ...)                                                                             \
  static_assert(std::is_same_v<decltype(&call), Result (*)(__VA_ARGS__)>, "the signature that is asked for");    \
  if (std::strcmp(name, #call) == 0 && version >= least)                                                         \
    *entry = other && version != least ? function_pointer(&of_another_version<&call __VA_OPT__(, ) __VA_ARGS__>) \
                                       : function_pointer(&call);
  MEMSAVER_CUDA_CALLS(FAKE_ENTRY, FAKE_ENTRY)
#undef FAKE_ENTRY
#define FAKE_ENTRY(call) \
  if (std::strcmp(name, #call) == 0) *entry = function_pointer(&call);
  FAKE_RUNTIME_CALLS(FAKE_ENTRY)
#undef FAKE_ENTRY
  if (*entry == nullptr) *entry = find_stream_call(name);
  if (std::strncmp(name, "cuGetProcAddress", 16) == 0) *entry = function_pointer(&cuGetProcAddress_v2);
  for (const char* each : kRefused)
    if (std::strcmp(name, each) == 0) *entry = function_pointer(&fake_not_supported);
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

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  Fake& all = fake();
  const char* number = std::strchr(bus, ':');  // "0000:01:00.0", or with a domain of eight digits
  const int ordinal = number == nullptr ? -1 : static_cast<int>(std::strtol(number + 1, nullptr, 16)) - 1;
  if (!all.exists(ordinal)) return 6;
  *device = &all.contexts[ordinal];
  return 0;
}

// Not supported.
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  std::memset(static_cast<char*>(info) + sizeof(unsigned), 0, 28);  // behind the version: no fabric
  return 0;
}

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
  *memory = {all.total, all.total - std::min(all.total, used), used};
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
    found.push_back(
        {static_cast<unsigned>(all.own_pid != 0 ? all.own_pid : ::getpid()), all.listed(context->device), 0, 0});
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
    else
      std::memset(at(kernel.address), kernel.byte, kernel.size);
  }
  kernel.context->running.erase(number);
  all.changed.notify_all();
  return kernel.context->dead;
}

// The names of the calls that broke captures, in order.
const char* fake_broken() {
  thread_local std::string text;
  const Lock lock(fake().mutex);
  text.clear();
  for (const std::string& each : fake().broken) text += each + " ";
  return text.c_str();
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

// The makers of all imported memory end, and close their descriptors.
void fake_end_makers() {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.makers_ended = true;
}

// The next cuMemUnmap() of more chunks unmaps so many of them and fails.
void fake_stop_unmap(std::uint64_t chunks) {
  Fake& all = fake();
  const Lock lock(all.mutex);
  all.most_unmapped = chunks;
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
