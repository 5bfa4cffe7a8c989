#include "driver/driver.h"

#include <unistd.h>

#include <exception>

namespace memsaver {

using namespace cuda;

namespace {

// The primary context of a device, and a stream. They are released with their pointers.
std::shared_ptr<void> retained_context(const Api& api, Device device) {
  Context context = nullptr;
  check(api, "cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(&context, device));
  return {context, [&api, device](Context) { api.cuDevicePrimaryCtxRelease(device); }};
}

std::shared_ptr<void> new_stream(const Api& api, Context context) {
  const Scope scope(api, context);
  Stream stream = nullptr;
  check(api, "cuStreamCreate", api.cuStreamCreate(&stream, kStreamNonBlocking));
  return {stream, [&api](Stream made) { api.cuStreamDestroy(made); }};
}

}  // namespace

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

Handle Driver::create(std::size_t size, bool whole) {
  const int posix = exports() ? kHandlePosixFd : 0;
  const int fabric = whole && posix != 0 && makes(kHandleFabric, has_fabric_) ? kHandleFabric : 0;
  const AllocationProp properties = with(posix | fabric);
  AllocationHandle handle = 0;
  make("cuMemCreate", api_.cuMemCreate, &handle, size, &properties, 0);
  return handle;
}

int Driver::export_fd(Handle handle) {
  if (!exports())
    throw DriverError("cuMemExportToShareableHandle", kNotSupported,
                      name + " has no POSIX descriptors for its memory, so no other process can share it");
  int file = -1;
  make("cuMemExportToShareableHandle", api_.cuMemExportToShareableHandle, &file, handle, kHandlePosixFd, 0);
  return file;
}

bool Driver::is_mapped(Address address) noexcept {
  try {
    const Scope scope(api_, context_);
    AllocationHandle handle = 0;
    if (api_.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
    api_.cuMemRelease(handle);  // its error may be that of other work; without the release the memory stays longer
  } catch (const std::exception&) {
    // No call can be made in the context, so a mapping that there was is still there.
  }
  return true;
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

Driver::Ticket Driver::mark(Direction direction) {
  const Scope scope(api_, context_);
  const auto marks = new_marks();
  marks->push_back(events_.take(context_));
  const Stream stream = (direction == Direction::out ? out_ : in_).get();
  check("cuEventRecord", api_.cuEventRecord(marks->back().event, stream));
  return marks;
}

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
