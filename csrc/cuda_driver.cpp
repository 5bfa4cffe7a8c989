// A CUDA device behind the seam, in the primary context that torch uses too.
#include <unistd.h>

#include "cuda_api.h"
#include "driver.h"

namespace memsaver {
namespace {

using namespace cuda;

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int ordinal)
      : Driver("cuda:" + std::to_string(ordinal)), device_(device_at(ordinal)), properties_(chunk_properties(device_)) {
    check("cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&context_, device_));
    Scope scope(*this);
    check("cuStreamCreate", api().cuStreamCreate(&out_, kStreamNonBlocking));
    check("cuStreamCreate", api().cuStreamCreate(&in_, kStreamNonBlocking));
  }

  int ordinal() const override { return device_; }

  std::string uuid() override { return uuid_of(device_); }

  Memory memory() override {
    Scope scope(*this);
    Memory memory{};
    check("cuMemGetInfo", api().cuMemGetInfo(&memory.free, &memory.total));
    return memory;
  }

  std::vector<Process> processes() override {
    std::vector<Process> found;
    for (const ProcessUse& use : compute_processes(uuid())) found.push_back({use.pid, use.bytes});
    return found;
  }

  int host_node() override {
    int node = -1;
    const Result code = api().cuDeviceGetAttribute(&node, kAttributeHostNode, device_);
    return code == kSuccess ? node : -1;  // drivers before 12.2 do not know the question
  }

  Address reserve(std::size_t size) override {
    faults().check("cuMemAddressReserve");
    Scope scope(*this);
    DevicePointer address = 0;
    check("cuMemAddressReserve", api().cuMemAddressReserve(&address, size, kPage, 0, 0));
    return static_cast<Address>(address);
  }

  void unreserve(Address address, std::size_t size) override {
    Scope scope(*this);
    check("cuMemAddressFree", api().cuMemAddressFree(address, size));
  }

  Handle create(std::size_t size) override {
    faults().check("create");
    Scope scope(*this);
    AllocationHandle handle = 0;
    check("cuMemCreate", api().cuMemCreate(&handle, size, &properties_, 0));
    return handle;
  }

  void release(Handle handle) override {
    faults().check("cuMemRelease");
    Scope scope(*this);
    check("cuMemRelease", api().cuMemRelease(handle));
  }

  int export_fd(Handle handle) override {
    faults().check("cuMemExportToShareableHandle");
    Scope scope(*this);
    int file = -1;
    check("cuMemExportToShareableHandle", api().cuMemExportToShareableHandle(&file, handle, kHandlePosixFd, 0));
    return file;
  }

  Handle import_fd(int fd, std::size_t) override {
    faults().check("cuMemImportFromShareableHandle");
    Scope scope(*this);
    AllocationHandle handle = 0;
    void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
    check("cuMemImportFromShareableHandle", api().cuMemImportFromShareableHandle(&handle, as_pointer, kHandlePosixFd));
    return handle;
  }

  void map(Address address, std::size_t size, Handle handle) override {
    faults().check("cuMemMap");
    Scope scope(*this);
    check("cuMemMap", api().cuMemMap(address, size, 0, handle, 0));
  }

  void allow(Address address, std::size_t size) override {
    faults().check("cuMemSetAccess");
    Scope scope(*this);
    const AccessDesc access{properties_.location, kAccessReadWrite};
    check("cuMemSetAccess", api().cuMemSetAccess(address, size, &access, 1));
  }

  void unmap(Address address, std::size_t size) override {
    faults().check("cuMemUnmap");
    Scope scope(*this);
    check("cuMemUnmap", api().cuMemUnmap(address, size));
  }

  void synchronize() override {
    faults().check("cuCtxSynchronize");
    Scope scope(*this);
    check("cuCtxSynchronize", api().cuCtxSynchronize());
  }

  Ticket record() override {
    if (api().cuCtxRecordEvent == nullptr) return nullptr;
    Scope scope(*this);
    const Ticket ticket = new_event();
    check("cuCtxRecordEvent", api().cuCtxRecordEvent(context_, ticket.get()));
    return ticket;
  }

  bool done(const Ticket& ticket) override {
    Scope scope(*this);
    const Result code = api().cuEventQuery(ticket.get());
    if (code == kNotReady) return false;
    check("cuEventQuery", code);
    return true;
  }

  void copy_out(void* host, Address address, std::size_t size) override {
    faults().check("cuMemcpyDtoHAsync");
    Scope scope(*this);
    check("cuMemcpyDtoHAsync", api().cuMemcpyDtoHAsync(host, address, size, out_));
  }

  void copy_in(Address address, const void* host, std::size_t size) override {
    faults().check("cuMemcpyHtoDAsync");
    Scope scope(*this);
    check("cuMemcpyHtoDAsync", api().cuMemcpyHtoDAsync(address, host, size, in_));
  }

  void fill(Address address, std::size_t size, unsigned char byte) override {
    faults().check("cuMemsetD8Async");
    Scope scope(*this);
    check("cuMemsetD8Async", api().cuMemsetD8Async(address, byte, size, in_));
  }

  Ticket mark(Direction direction) override {
    faults().check("cuEventRecord");
    Scope scope(*this);
    const Ticket ticket = new_event();
    check("cuEventRecord", api().cuEventRecord(ticket.get(), direction == Direction::out ? out_ : in_));
    return ticket;
  }

  void wait(const Ticket& ticket) override {
    faults().check("cuEventSynchronize");
    Scope scope(*this);
    check("cuEventSynchronize", api().cuEventSynchronize(ticket.get()));
  }

  void finish_copies() override {
    faults().check("cuStreamSynchronize");
    Scope scope(*this);
    check("cuStreamSynchronize", api().cuStreamSynchronize(out_));
    check("cuStreamSynchronize", api().cuStreamSynchronize(in_));
  }

  void pin(void* host, std::size_t size) override {
    faults().check("cuMemHostRegister");
    Scope scope(*this);
    check("cuMemHostRegister", api().cuMemHostRegister(host, size, kHostRegisterPortable));
  }

  void unpin(void* host) override {
    Scope scope(*this);
    check("cuMemHostUnregister", api().cuMemHostUnregister(host));
  }

 private:
  // The device's context for the length of one call, whatever the thread had; and leave to make calls that another
  // thread's capture would otherwise forbid (none of ours joins a capture).
  class Scope {
   public:
    explicit Scope(const CudaDriver& driver) {
      check("cuCtxPushCurrent", api().cuCtxPushCurrent(driver.context_));
      api().cuThreadExchangeStreamCaptureMode(&mode_);
    }
    ~Scope() {
      api().cuThreadExchangeStreamCaptureMode(&mode_);
      Context popped = nullptr;
      api().cuCtxPopCurrent(&popped);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    int mode_ = kCaptureRelaxed;
  };

  // Waiting for it sleeps: a transition of a second should not burn a core that the application could use.
  static Ticket new_event() {
    Event event = nullptr;
    check("cuEventCreate", api().cuEventCreate(&event, kEventDisableTiming | kEventBlockingSync));
    return Ticket(event, [](void* created) { api().cuEventDestroy(created); });
  }

  const Device device_;
  const AllocationProp properties_;
  Context context_ = nullptr;
  Stream out_ = nullptr;
  Stream in_ = nullptr;
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

std::unique_ptr<Driver> open_cuda_driver(int ordinal) { return std::make_unique<CudaDriver>(ordinal); }

}  // namespace memsaver
