#include "driver/driver.h"

#include <unistd.h>

#include <array>
#include <utility>

namespace memsaver {

using namespace cuda;

namespace {

AllocationProp with_fabric(AllocationProp properties) {
  properties.handle_types |= kHandleFabric;
  return properties;
}

}  // namespace

Driver::Driver(const Platform& platform, Device device, std::string device_name)
    : name(std::move(device_name)),
      platform_(platform),
      api_(platform.api),
      device_(device),
      exportable_(chunk_properties(api_, device_, name, true)),
      plain_(chunk_properties(api_, device_, name, false)),
      fabric_(with_fabric(exportable_)),
      exports_(attribute_of(api_, device_, kAttributePosixFd) != 0 ? Exports::unknown : Exports::no),
      primary_(api_, device_),
      context_(primary_.context),
      peers_(api_, device_, context_),
      out_(api_, context_),
      in_(api_, context_),
      events_(std::make_shared<Events>(api_)) {}

// Acts in the context of the device or of a peer. Errors of a peer with a dead context are ignored: it has no work
// left to wait for.
template <typename Act>
void Driver::within(Context context, Act act) const {
  try {
    const Scope scope(api_, context);
    act();
  } catch (const DriverError& error) {
    if (context == context_ || !error.context_lost) throw;
  }
}

// Some platforms report support for descriptors in the attribute and refuse to create such chunks.
Handle Driver::make_chunk(std::size_t size) const {
  const Scope scope(api_, context_);
  AllocationHandle handle = 0;
  const Exports known = exports_;
  Result code = api_.cuMemCreate(&handle, size, known == Exports::no ? &plain_ : &exportable_, 0);
  if (known == Exports::unknown) {
    const bool refused = refuses_handle_type(code);
    if (refused) code = api_.cuMemCreate(&handle, size, &plain_, 0);
    if (code == kSuccess) exports_ = refused ? Exports::no : Exports::yes;
  }
  check("cuMemCreate", code);
  return handle;
}

// Whether the driver creates memory with a fabric handle, which needs more than the attribute of the device says: a
// channel of IMEX. So a page is created once.
bool Driver::has_fabric() {
  const std::lock_guard one_at_a_time(probing_);
  if (!has_fabric_) {
    if (!exports()) return false;
    const Scope scope(api_, context_);
    AllocationHandle probe = 0;
    const Result code = api_.cuMemCreate(&probe, kPage, &fabric_, 0);
    if (code == kSuccess)
      check("cuMemRelease", api_.cuMemRelease(probe));
    else if (!refuses_handle_type(code))
      check("cuMemCreate", code);
    has_fabric_ = code == kSuccess;
  }
  return *has_fabric_;
}

Driver::Memory Driver::memory() {
  try {
    const Scope scope(api_, context_);
    Memory memory{};
    check("cuMemGetInfo", api_.cuMemGetInfo(&memory.free, &memory.total));
    return memory;
  } catch (const DriverError& error) {
    if (!error.context_lost) throw;
    // The device still has figures. Without NVML: free is 0, since this process can no longer allocate there.
    return {platform_.free_memory(device_).value_or(0), total_memory(api_, device_)};
  }
}

std::vector<Driver::Holding> Driver::holdings() const {
  std::vector<Holding> found = platform_.holdings(device_);
  // A GPU's driver lists memory for its maker, or for a descriptor of the maker, as long as either lives. So imported
  // memory is not listed for this process: see "The ledger of a device" in docs/design.md.
  for (Holding& each : found)
    if (each.pid == ::getpid() && !each.imported) each.imported = 0;
  return found;
}

int Driver::host_node() const {
  int node = -1;
  const Result code = api_.cuDeviceGetAttribute(&node, kAttributeHostNode, device_);
  return code == kSuccess ? node : -1;  // drivers before 12.2 lack the attribute
}

Address Driver::reserve(std::size_t size) {
  const Scope scope(api_, context_);
  DevicePointer address = 0;
  check("cuMemAddressReserve", api_.cuMemAddressReserve(&address, size, kPage, 0, 0));
  return static_cast<Address>(address);
}

void Driver::unreserve(Address address, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemAddressFree", api_.cuMemAddressFree(address, size));
}

Handle Driver::create(std::size_t size) { return make_chunk(size); }

Handle Driver::create_whole(std::size_t size) {
  if (!has_fabric()) return make_chunk(size);
  const Scope scope(api_, context_);
  AllocationHandle handle = 0;
  check("cuMemCreate", api_.cuMemCreate(&handle, size, &fabric_, 0));
  return handle;
}

void Driver::release(Handle handle) {
  const Scope scope(api_, context_);
  check("cuMemRelease", api_.cuMemRelease(handle));
}

int Driver::export_fd(Handle handle) {
  if (exports_ == Exports::no)
    throw DriverError("cuMemExportToShareableHandle", kNotSupported,
                      name + " has no POSIX descriptors for its memory, so no other process can share it");
  const Scope scope(api_, context_);
  int file = -1;
  check("cuMemExportToShareableHandle", api_.cuMemExportToShareableHandle(&file, handle, kHandlePosixFd, 0));
  return file;
}

bool Driver::exports() const {
  if (exports_ == Exports::unknown) {
    try {
      const Handle probe = make_chunk(kPage);
      check("cuMemRelease", api_.cuMemRelease(probe));
    } catch (const ChunkUnavailable&) {
      // A full device cannot create the probe; the attribute of the device counts.
    }
  }
  return exports_ != Exports::no;
}

Handle Driver::import_fd(int fd) {
  const Scope scope(api_, context_);
  return import_posix(api_, fd);
}

void Driver::map(Address address, std::size_t size, Handle handle) {
  const Scope scope(api_, context_);
  check("cuMemMap", api_.cuMemMap(address, size, 0, handle, 0));
}

void Driver::allow(Address address, std::size_t size) {
  const Scope scope(api_, context_);
  const std::vector<AccessDesc> access = peers_.access();
  check("cuMemSetAccess", api_.cuMemSetAccess(address, size, access.data(), access.size()));
}

void Driver::unmap(Address address, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemUnmap", api_.cuMemUnmap(address, size));
}

bool Driver::is_mapped(Address address) {
  const Scope scope(api_, context_);
  AllocationHandle handle = 0;
  if (api_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
  check("cuMemRelease", api_.cuMemRelease(handle));
  return true;
}

void Driver::synchronize() {
  for (Context context : peers_.contexts())
    within(context, [&] { check("cuCtxSynchronize", api_.cuCtxSynchronize()); });
}

Driver::Ticket Driver::record() {
  if (api_.cuCtxRecordEvent == nullptr) return nullptr;
  auto marks = std::make_shared<Marks>(events_);
  for (Context context : peers_.contexts())
    within(context, [&] { check("cuCtxRecordEvent", api_.cuCtxRecordEvent(context, marks->add(context))); });
  return marks;
}

bool Driver::done(const Ticket& ticket) {
  bool all = true;
  for (const Marks::Mark& mark : ticket->all())
    within(mark.context, [&] {
      const Result code = api_.cuEventQuery(mark.event);
      if (code == kNotReady)
        all = false;
      else
        check("cuEventQuery", code);
    });
  return all;
}

void Driver::copy_out(void* host, Address address, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemcpyDtoHAsync", api_.cuMemcpyDtoHAsync(host, address, size, out_.stream));
}

void Driver::copy_in(Address address, const void* host, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemcpyHtoDAsync", api_.cuMemcpyHtoDAsync(address, host, size, in_.stream));
}

void Driver::fill(Address address, std::size_t size, unsigned char byte) {
  const Scope scope(api_, context_);
  check("cuMemsetD8Async", api_.cuMemsetD8Async(address, byte, size, in_.stream));
}

void Driver::copy_within(Address to, Address from, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemcpyDtoDAsync", api_.cuMemcpyDtoDAsync(to, from, size, in_.stream));
}

Driver::Ticket Driver::mark(Direction direction) {
  const Scope scope(api_, context_);
  auto marks = std::make_shared<Marks>(events_);
  const Stream stream = direction == Direction::out ? out_.stream : in_.stream;
  check("cuEventRecord", api_.cuEventRecord(marks->add(context_), stream));
  return marks;
}

void Driver::wait(const Ticket& ticket) {
  for (const Marks::Mark& mark : ticket->all())
    within(mark.context, [&] { check("cuEventSynchronize", api_.cuEventSynchronize(mark.event)); });
}

void Driver::finish_copies() {
  const Scope scope(api_, context_);
  check("cuStreamSynchronize", api_.cuStreamSynchronize(out_.stream));
  check("cuStreamSynchronize", api_.cuStreamSynchronize(in_.stream));
}

void Driver::pin(void* host, std::size_t size) {
  const Scope scope(api_, context_);
  check("cuMemHostRegister", api_.cuMemHostRegister(host, size, kHostRegisterPortable));
}

void Driver::unpin(void* host) {
  const Scope scope(api_, context_);
  check("cuMemHostUnregister", api_.cuMemHostUnregister(host));
}

int cuda_device_count() {
  try {
    int count = 0;
    return api().cuDeviceGetCount(&count) == kSuccess ? count : 0;
  } catch (const DriverError&) {
    return 0;
  }
}

namespace {

// The context of a device that torch uses, retained once or, by two threads at once, twice.
Context primary_context(int ordinal) {
  static std::array<std::atomic<Context>, 64> kept{};
  auto& context = kept.at(static_cast<std::size_t>(ordinal));
  if (context == nullptr) {
    Context made = nullptr;
    check(api(), "cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&made, device_at(ordinal)));
    context = made;
  }
  return context;
}

}  // namespace

Address allocate_whole(int ordinal, std::size_t size) {
  const Scope scope(api(), primary_context(ordinal));
  DevicePointer address = 0;
  check(api(), "cuMemAlloc", api().cuMemAlloc(&address, size));
  return static_cast<Address>(address);
}

void free_whole(int ordinal, Address address) {
  const Scope scope(api(), primary_context(ordinal));
  check(api(), "cuMemFree", api().cuMemFree(address));
}

std::unique_ptr<Driver> open_cuda_driver(int ordinal) {
  return std::make_unique<Driver>(platform(), device_at(ordinal), "cuda:" + std::to_string(ordinal));
}

}  // namespace memsaver
