// The CUDA driver. It uses the device's primary context, as torch does.
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "driver/cuda_api.h"
#include "driver/cuda_peers.h"
#include "driver/driver.h"

namespace memsaver {
namespace {

using namespace cuda;

// Both are released by their destructors, so that a driver whose constructor fails later leaks nothing.
struct PrimaryContext {
  explicit PrimaryContext(Device of) : device(of) {
    check("cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&context, device));
  }
  ~PrimaryContext() { api().cuDevicePrimaryCtxRelease(device); }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  const Device device;
  Context context = nullptr;
};

struct OwnedStream {
  explicit OwnedStream(Context context) {
    Scope scope(context);
    check("cuStreamCreate", api().cuStreamCreate(&stream, kStreamNonBlocking));
  }
  ~OwnedStream() { api().cuStreamDestroy(stream); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream stream = nullptr;
};

// Events that no mark uses now. They are used again and never destroyed: marks end under locks over which no call of
// the driver is made, and in threads without a context.
class Events {
 public:
  // For the current context. A blocking event: the wait sleeps, so a long transition does not occupy a core.
  Event take(Context context) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<Event>& idle = idle_[context];
      if (!idle.empty()) {
        const Event event = idle.back();
        idle.pop_back();
        return event;
      }
    }
    Event event = nullptr;
    check("cuEventCreate", api().cuEventCreate(&event, kEventDisableTiming | kEventBlockingSync));
    return event;
  }

  void give(Context context, Event event) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      idle_[context].push_back(event);
    } catch (const std::exception&) {
      // No host memory for the note: the event is not used again.
    }
  }

 private:
  std::mutex mutex_;  // no other lock is taken under it, and no call of the driver is made
  std::map<Context, std::vector<Event>> idle_;
};

// A mark in the contexts of a device and its peers.
class Marks {
 public:
  struct Mark {
    Context context;
    Event event;
  };

  explicit Marks(std::shared_ptr<Events> events) : events_(std::move(events)) {}
  ~Marks() {
    for (const Mark& mark : marks_) events_->give(mark.context, mark.event);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  // An event to be recorded in a context, which is the current one.
  Event add(Context context) {
    marks_.push_back({context, events_->take(context)});
    return marks_.back().event;
  }
  const std::vector<Mark>& all() const { return marks_; }

 private:
  const std::shared_ptr<Events> events_;
  std::vector<Mark> marks_;
};

AllocationProp with_fabric(AllocationProp properties) {
  properties.handle_types |= kHandleFabric;
  return properties;
}

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int ordinal)
      : Driver("cuda:" + std::to_string(ordinal)),
        device_(device_at(ordinal)),
        exportable_(chunk_properties(device_, true)),
        plain_(chunk_properties(device_, false)),
        fabric_(with_fabric(exportable_)),
        exports_(has_posix_handles(device_) ? Exports::unknown : Exports::no),
        primary_(device_),
        context_(primary_.context),
        peers_(device_, context_),
        out_(context_),
        in_(context_) {}

  int ordinal() const override { return device_; }

  std::string uuid() override { return uuid_of(device_); }

  Memory memory() override {
    try {
      Scope scope(context_);
      Memory memory{};
      check("cuMemGetInfo", api().cuMemGetInfo(&memory.free, &memory.total));
      return memory;
    } catch (const DriverError& error) {
      if (!error.context_lost) throw;
      // The device still has figures. Without NVML: free is 0, since this process can no longer allocate there.
      return {free_memory(uuid()).value_or(0), total_memory(device_)};
    }
  }

  std::vector<Process> processes() override {
    std::vector<Process> found;
    for (const ProcessUse& use : compute_processes(uuid())) found.push_back({use.pid, use.bytes});
    return found;
  }

  std::vector<Holding> holdings() override {
    std::vector<Holding> found;
    for (const ProcessUse& use : compute_processes(uuid())) {
      if (use.bytes == 0) continue;  // NVML does not tell
      // The driver lists memory for its maker, or for a descriptor of the maker, as long as either lives. So imported
      // memory is not listed for this process: see "The ledger of a device" in docs/design.md.
      const bool own = use.pid == ::getpid();
      found.push_back({use.pid, use.bytes, own ? std::optional<std::size_t>(0) : std::nullopt});
    }
    return found;
  }

  int host_node() override {
    int node = -1;
    const Result code = api().cuDeviceGetAttribute(&node, kAttributeHostNode, device_);
    return code == kSuccess ? node : -1;  // drivers before 12.2 lack the attribute
  }

  bool gpu_memory_is_host_memory() override { return any_is_numa_node(); }

  Address reserve(std::size_t size) override {
    faults().check("cuMemAddressReserve");
    Scope scope(context_);
    DevicePointer address = 0;
    check("cuMemAddressReserve", api().cuMemAddressReserve(&address, size, kPage, 0, 0));
    return static_cast<Address>(address);
  }

  void unreserve(Address address, std::size_t size) override {
    Scope scope(context_);
    check("cuMemAddressFree", api().cuMemAddressFree(address, size));
  }

  Handle create(std::size_t size) override {
    faults().check("create");
    return make_chunk(size);
  }

  Handle create_whole(std::size_t size) override {
    faults().check("create");
    if (!has_fabric()) return make_chunk(size);
    const Scope scope(context_);
    AllocationHandle handle = 0;
    check("cuMemCreate", api().cuMemCreate(&handle, size, &fabric_, 0));
    return handle;
  }

  void release(Handle handle) override {
    faults().check("cuMemRelease");
    Scope scope(context_);
    check("cuMemRelease", api().cuMemRelease(handle));
  }

  int export_fd(Handle handle) override {
    faults().check("cuMemExportToShareableHandle");
    if (exports_ == Exports::no)
      throw DriverError("cuMemExportToShareableHandle", kNotSupported,
                        name + " has no POSIX descriptors for its memory, so no other process can share it");
    Scope scope(context_);
    int file = -1;
    check("cuMemExportToShareableHandle", api().cuMemExportToShareableHandle(&file, handle, kHandlePosixFd, 0));
    return file;
  }

  bool exports() const override {
    if (exports_ == Exports::unknown) {
      try {
        const Handle probe = make_chunk(kPage);
        check("cuMemRelease", api().cuMemRelease(probe));
      } catch (const ChunkUnavailable&) {
        // A full device cannot create the probe; the attribute of the device counts.
      }
    }
    return exports_ != Exports::no;
  }

  Handle import_fd(int fd, std::size_t) override {
    faults().check("cuMemImportFromShareableHandle");
    Scope scope(context_);
    return import_posix(fd);
  }

  void map(Address address, std::size_t size, Handle handle) override {
    faults().check("cuMemMap");
    Scope scope(context_);
    check("cuMemMap", api().cuMemMap(address, size, 0, handle, 0));
  }

  void allow(Address address, std::size_t size) override {
    faults().check("cuMemSetAccess");
    Scope scope(context_);
    const std::vector<AccessDesc> access = peers_.access();
    check("cuMemSetAccess", api().cuMemSetAccess(address, size, access.data(), access.size()));
  }

  void unmap(Address address, std::size_t size) override {
    faults().check("cuMemUnmap");
    Scope scope(context_);
    check("cuMemUnmap", api().cuMemUnmap(address, size));
  }

  bool is_mapped(Address address) override {
    Scope scope(context_);
    AllocationHandle handle = 0;
    if (api().cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
    check("cuMemRelease", api().cuMemRelease(handle));
    return true;
  }

  std::vector<int> peer_candidates() override { return peers_.candidates(); }

  void use_peers(const std::vector<int>& ordinals) override { peers_.use(ordinals); }

  void synchronize() override {
    faults().check("cuCtxSynchronize");
    for (Context context : peers_.contexts())
      within(context, [] { check("cuCtxSynchronize", api().cuCtxSynchronize()); });
  }

  Ticket record() override {
    if (api().cuCtxRecordEvent == nullptr) return nullptr;
    faults().check("cuCtxRecordEvent");
    auto marks = std::make_shared<Marks>(events_);
    for (Context context : peers_.contexts())
      within(context, [&] { check("cuCtxRecordEvent", api().cuCtxRecordEvent(context, marks->add(context))); });
    return marks;
  }

  bool done(const Ticket& ticket) override {
    bool all = true;
    for (const Marks::Mark& mark : marks_of(ticket))
      within(mark.context, [&] {
        const Result code = api().cuEventQuery(mark.event);
        if (code == kNotReady)
          all = false;
        else
          check("cuEventQuery", code);
      });
    return all;
  }

  void copy_out(void* host, Address address, std::size_t size) override {
    faults().check("cuMemcpyDtoHAsync");
    Scope scope(context_);
    check("cuMemcpyDtoHAsync", api().cuMemcpyDtoHAsync(host, address, size, out_.stream));
  }

  void copy_in(Address address, const void* host, std::size_t size) override {
    faults().check("cuMemcpyHtoDAsync");
    Scope scope(context_);
    check("cuMemcpyHtoDAsync", api().cuMemcpyHtoDAsync(address, host, size, in_.stream));
  }

  void fill(Address address, std::size_t size, unsigned char byte) override {
    faults().check("cuMemsetD8Async");
    Scope scope(context_);
    check("cuMemsetD8Async", api().cuMemsetD8Async(address, byte, size, in_.stream));
  }

  void copy_within(Address to, Address from, std::size_t size) override {
    faults().check("cuMemcpyDtoDAsync");
    Scope scope(context_);
    check("cuMemcpyDtoDAsync", api().cuMemcpyDtoDAsync(to, from, size, in_.stream));
  }

  Ticket mark(Direction direction) override {
    faults().check("cuEventRecord");
    Scope scope(context_);
    auto marks = std::make_shared<Marks>(events_);
    const Stream stream = direction == Direction::out ? out_.stream : in_.stream;
    check("cuEventRecord", api().cuEventRecord(marks->add(context_), stream));
    return marks;
  }

  void wait(const Ticket& ticket) override {
    faults().check("cuEventSynchronize");
    for (const Marks::Mark& mark : marks_of(ticket))
      within(mark.context, [&] { check("cuEventSynchronize", api().cuEventSynchronize(mark.event)); });
  }

  void finish_copies() override {
    faults().check("cuStreamSynchronize");
    Scope scope(context_);
    check("cuStreamSynchronize", api().cuStreamSynchronize(out_.stream));
    check("cuStreamSynchronize", api().cuStreamSynchronize(in_.stream));
  }

  void pin(void* host, std::size_t size) override {
    faults().check("cuMemHostRegister");
    Scope scope(context_);
    check("cuMemHostRegister", api().cuMemHostRegister(host, size, kHostRegisterPortable));
  }

  void unpin(void* host) override {
    Scope scope(context_);
    check("cuMemHostUnregister", api().cuMemHostUnregister(host));
  }

 private:
  static const std::vector<Marks::Mark>& marks_of(const Ticket& ticket) {
    return static_cast<const Marks*>(ticket.get())->all();
  }

  // Acts in the context of the device or of a peer. Errors of a peer with a dead context are ignored: it has no work
  // left to wait for.
  template <typename Act>
  void within(Context context, Act act) const {
    try {
      const Scope scope(context);
      act();
    } catch (const DriverError& error) {
      if (context == context_ || !error.context_lost) throw;
    }
  }

  // Some platforms report support for descriptors in the attribute and refuse to create such chunks.
  Handle make_chunk(std::size_t size) const {
    Scope scope(context_);
    AllocationHandle handle = 0;
    const Exports known = exports_;
    Result code = api().cuMemCreate(&handle, size, known == Exports::no ? &plain_ : &exportable_, 0);
    if (known == Exports::unknown) {
      const bool refused = refuses_handle_type(code);
      if (refused) code = api().cuMemCreate(&handle, size, &plain_, 0);
      if (code == kSuccess) exports_ = refused ? Exports::no : Exports::yes;
    }
    check("cuMemCreate", code);
    return handle;
  }

  // Whether the driver creates memory with a fabric handle, which needs more than the attribute of the device says: a
  // channel of IMEX. So a page is created once.
  bool has_fabric() {
    const std::lock_guard one_at_a_time(probing_);
    if (!has_fabric_) {
      if (!exports()) return false;
      const Scope scope(context_);
      AllocationHandle probe = 0;
      const Result code = api().cuMemCreate(&probe, kPage, &fabric_, 0);
      if (code == kSuccess)
        check("cuMemRelease", api().cuMemRelease(probe));
      else if (!refuses_handle_type(code))
        check("cuMemCreate", code);
      has_fabric_ = code == kSuccess;
    }
    return *has_fabric_;
  }

  const Device device_;
  const AllocationProp exportable_, plain_, fabric_;
  std::mutex probing_;
  std::optional<bool> has_fabric_;  // not known before the first use
  enum class Exports { unknown, yes, no };
  mutable std::atomic<Exports> exports_;
  const PrimaryContext primary_;
  const Context context_;
  Peers peers_;
  const OwnedStream out_, in_;
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
};

}  // namespace

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
    check("cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&made, device_at(ordinal)));
    context = made;
  }
  return context;
}

}  // namespace

Address allocate_whole(int ordinal, std::size_t size) {
  const Scope scope(primary_context(ordinal));
  DevicePointer address = 0;
  check("cuMemAlloc", api().cuMemAlloc(&address, size));
  return static_cast<Address>(address);
}

void free_whole(int ordinal, Address address) {
  const Scope scope(primary_context(ordinal));
  check("cuMemFree", api().cuMemFree(address));
}

std::unique_ptr<Driver> open_cuda_driver(int ordinal) { return std::make_unique<CudaDriver>(ordinal); }

}  // namespace memsaver
