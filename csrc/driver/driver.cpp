#include "driver/driver.h"

#include <unistd.h>

namespace memsaver {

using namespace cuda;

Driver::Driver(const Platform& platform, Device device, std::string device_name)
    : name(std::move(device_name)),
      platform_(platform),
      api_(platform.api),
      device_(device),
      plain_(chunk_properties(api_, device_, name, 0)),
      primary_(retained_context(api_, device_)),
      context_(primary_.get()),
      peers_(api_, device_, context_),
      out_(new_stream(api_, context_)),
      in_(new_stream(api_, context_)),
      events_(api_) {
  exports();  // makes it known, unless the device is full
}

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

Driver::Memory Driver::memory() {
  try {
    Memory memory{};
    make("cuMemGetInfo", api_.cuMemGetInfo, &memory.free, &memory.total);
    return memory;
  } catch (const DriverError& error) {
    if (!error.context_lost) throw;
    // The device still has figures. Without NVML: free is 0, since this process can no longer allocate there.
    return {platform_.free_memory(device_).value_or(0), total_memory(api_, device_)};
  }
}

std::vector<Driver::Holding> Driver::holdings() const {
  std::vector<Holding> found = known_holdings(platform_, device_);
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
  DevicePointer address = 0;
  make("cuMemAddressReserve", api_.cuMemAddressReserve, &address, size, kPage, 0, 0);
  return static_cast<Address>(address);
}

void Driver::unreserve(Address address, std::size_t size) {
  make("cuMemAddressFree", api_.cuMemAddressFree, address, size);
}

AllocationProp Driver::with(int handle_types) const {
  AllocationProp properties = plain_;
  properties.handle_types = handle_types;
  return properties;
}

// Whether the driver creates memory with a type of handle, which needs more than the attribute of the device says: some
// platforms refuse descriptors nevertheless, and fabric handles need a channel of IMEX. So a page is created once. A
// full device creates none; the attribute counts then.
bool Driver::makes(int handle_type, std::optional<bool>& known) const {
  const std::lock_guard one_at_a_time(probing_);
  if (known) return *known;
  const AllocationProp wanted = with(kHandlePosixFd | handle_type);
  const Scope scope(api_, context_);
  AllocationHandle probe = 0;
  const Result code = api_.cuMemCreate(&probe, kPage, &wanted, 0);
  if (code == ChunkUnavailable::kCode) return true;
  if (code == kSuccess)
    check("cuMemRelease", api_.cuMemRelease(probe));
  else if (!refuses_handle_type(code))
    check("cuMemCreate", code);
  known = code == kSuccess;
  return *known;
}

bool Driver::exports() const {
  return attribute_of(api_, device_, kAttributePosixFd) != 0 && makes(kHandlePosixFd, has_posix_);
}

Handle Driver::create(std::size_t size, bool whole) {
  const int posix = exports() ? kHandlePosixFd : 0;
  const int fabric = whole && posix != 0 && makes(kHandleFabric, has_fabric_) ? kHandleFabric : 0;
  const AllocationProp properties = with(posix | fabric);
  AllocationHandle handle = 0;
  make("cuMemCreate", api_.cuMemCreate, &handle, size, &properties, 0);
  return handle;
}

void Driver::release(Handle handle) { make("cuMemRelease", api_.cuMemRelease, handle); }

int Driver::export_fd(Handle handle) {
  if (!exports())
    throw DriverError("cuMemExportToShareableHandle", kNotSupported,
                      name + " has no POSIX descriptors for its memory, so no other process can share it");
  int file = -1;
  make("cuMemExportToShareableHandle", api_.cuMemExportToShareableHandle, &file, handle, kHandlePosixFd, 0);
  return file;
}

Handle Driver::import_fd(int fd) {
  AllocationHandle handle = 0;
  void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  make("cuMemImportFromShareableHandle", api_.cuMemImportFromShareableHandle, &handle, as_pointer, kHandlePosixFd);
  return handle;
}

Address Driver::allocate(std::size_t size) {
  DevicePointer address = 0;
  make("cuMemAlloc", api_.cuMemAlloc, &address, size);
  return static_cast<Address>(address);
}

void Driver::free(Address address) { make("cuMemFree", api_.cuMemFree, address); }

void Driver::map(Address address, std::size_t size, Handle handle) {
  make("cuMemMap", api_.cuMemMap, address, size, 0, handle, 0);
}

void Driver::allow(Address address, std::size_t size) {
  const std::vector<AccessDesc> access = peers_.access();
  make("cuMemSetAccess", api_.cuMemSetAccess, address, size, access.data(), access.size());
}

void Driver::unmap(Address address, std::size_t size) { make("cuMemUnmap", api_.cuMemUnmap, address, size); }

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

// Their events are used again after the last reference.
std::shared_ptr<std::vector<Mark>> Driver::new_marks() const {
  return {new std::vector<Mark>, [this](std::vector<Mark>* marks) {
            for (const Mark& each : *marks) events_.give(each);
            delete marks;
          }};
}

Driver::Ticket Driver::record() {
  if (api_.cuCtxRecordEvent == nullptr) return nullptr;
  const auto marks = new_marks();
  for (Context context : peers_.contexts())
    within(context, [&] {
      marks->push_back(events_.take(context));
      check("cuCtxRecordEvent", api_.cuCtxRecordEvent(context, marks->back().event));
    });
  return marks;
}

bool Driver::done(const Ticket& ticket) {
  bool all = true;
  for (const Mark& mark : *ticket)
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
  make("cuMemcpyDtoHAsync", api_.cuMemcpyDtoHAsync, host, address, size, out_.get());
}

void Driver::copy_in(Address address, const void* host, std::size_t size) {
  make("cuMemcpyHtoDAsync", api_.cuMemcpyHtoDAsync, address, host, size, in_.get());
}

void Driver::fill(Address address, std::size_t size, unsigned char byte) {
  make("cuMemsetD8Async", api_.cuMemsetD8Async, address, byte, size, in_.get());
}

void Driver::copy_within(Address to, Address from, std::size_t size) {
  make("cuMemcpyDtoDAsync", api_.cuMemcpyDtoDAsync, to, from, size, in_.get());
}

Driver::Ticket Driver::mark(Direction direction) {
  const Scope scope(api_, context_);
  const auto marks = new_marks();
  marks->push_back(events_.take(context_));
  const Stream stream = (direction == Direction::out ? out_ : in_).get();
  check("cuEventRecord", api_.cuEventRecord(marks->back().event, stream));
  return marks;
}

void Driver::wait(const Ticket& ticket) {
  for (const Mark& mark : *ticket)
    within(mark.context, [&] { check("cuEventSynchronize", api_.cuEventSynchronize(mark.event)); });
}

void Driver::finish_copies() {
  make("cuStreamSynchronize", api_.cuStreamSynchronize, out_.get());
  make("cuStreamSynchronize", api_.cuStreamSynchronize, in_.get());
}

void Driver::pin(void* host, std::size_t size) {
  make("cuMemHostRegister", api_.cuMemHostRegister, host, size, kHostRegisterPortable);
}

void Driver::unpin(void* host) { make("cuMemHostUnregister", api_.cuMemHostUnregister, host); }

int cuda_device_count() {
  try {
    int count = 0;
    return api().cuDeviceGetCount(&count) == kSuccess ? count : 0;
  } catch (const DriverError&) {
    return 0;
  }
}

std::unique_ptr<Driver> open_cuda_driver(int ordinal) {
  return std::make_unique<Driver>(platform(), device_at(ordinal), "cuda:" + std::to_string(ordinal));
}

}  // namespace memsaver
