// A CUDA device behind the seam, in the primary context that torch uses too.
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "cuda_api.h"
#include "driver.h"

namespace memsaver {
namespace {

using namespace cuda;

[[noreturn]] void fail(const char* call, Result code) {
  const char* text = nullptr;
  if (api().cuGetErrorString(code, &text) != kSuccess || text == nullptr) text = "unknown error";
  if (code == kOutOfMemory) throw ChunkUnavailable(call, code, text);
  throw DriverError(call, code, text, loses_context(code));
}

void check(const char* call, Result code) {
  if (code != kSuccess) fail(call, code);
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(int ordinal) : Driver("cuda:" + std::to_string(ordinal)) {
    int count = 0;
    check("cuDeviceGetCount", api().cuDeviceGetCount(&count));
    if (ordinal < 0 || ordinal >= count)
      throw BadArgument("device is '" + name + "', expected one of the " + std::to_string(count) +
                        " visible CUDA devices");
    check("cuDeviceGet", api().cuDeviceGet(&device_, ordinal));
    if (attribute(kAttributeVirtualMemory) == 0 || attribute(kAttributePosixFd) == 0)
      throw DriverError("cuDeviceGetAttribute", 801, name + " does not support virtual memory with POSIX descriptors");
    check("cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&context_, device_));
    properties_.type = kAllocationPinned;
    properties_.handle_types = kHandlePosixFd;  // exportable from the start: this cannot be added to a chunk later
    properties_.location = {kLocationDevice, ordinal_of_device()};
    properties_.flags.gpu_direct_rdma = attribute(kAttributeRdma) != 0 ? 1 : 0;
    Scope scope(*this);
    check("cuStreamCreate", api().cuStreamCreate(&out_, kStreamNonBlocking));
    check("cuStreamCreate", api().cuStreamCreate(&in_, kStreamNonBlocking));
  }

  std::string uuid() override {
    Uuid id{};
    check("cuDeviceGetUuid", api().cuDeviceGetUuid(&id, device_));
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char byte[3];
      std::snprintf(byte, sizeof byte, "%02x", id.bytes[i]);
      text += byte;
      if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
    }
    return text;
  }

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

  int attribute(int which) const {
    int value = 0;
    check("cuDeviceGetAttribute", api().cuDeviceGetAttribute(&value, which, device_));
    return value;
  }

  int ordinal_of_device() const { return device_; }  // a CUdevice is the ordinal among the visible devices

  Device device_ = 0;
  Context context_ = nullptr;
  AllocationProp properties_{};
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
