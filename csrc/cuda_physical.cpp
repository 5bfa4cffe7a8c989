// A GPU's memory without a context on it.
#include <unistd.h>

#include "cuda_api.h"
#include "driver.h"
#include "physical.h"

namespace memsaver {
namespace {

using namespace cuda;

class CudaMemory final : public PhysicalMemory {
 public:
  explicit CudaMemory(int ordinal) : device_(device_at(ordinal)), properties_(chunk_properties(device_)) {}

  std::string uuid() override { return uuid_of(device_); }

  std::size_t total_bytes() override {
    std::size_t bytes = 0;
    check("cuDeviceTotalMem", api().cuDeviceTotalMem(&bytes, device_));
    return bytes;
  }

  std::size_t free_bytes() override { return free_memory(uuid()).value_or(total_bytes()); }

  int create(std::size_t size) override {
    faults().check("create");
    const Owned made(
        [&](AllocationHandle* handle) { check("cuMemCreate", api().cuMemCreate(handle, size, &properties_, 0)); });
    int file = -1;
    check("cuMemExportToShareableHandle", api().cuMemExportToShareableHandle(&file, made.handle, kHandlePosixFd, 0));
    return file;
  }

  void adopt(int file, std::size_t) override {
    // That it can be imported is all that the driver tells; its size shows when the next owner maps it.
    const Owned imported([&](AllocationHandle* handle) {
      void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(file));
      check("cuMemImportFromShareableHandle", api().cuMemImportFromShareableHandle(handle, as_pointer, kHandlePosixFd));
    });
  }

  void close(int file) override { ::close(file); }

 private:
  struct Owned {
    template <typename Get>
    explicit Owned(Get get) {
      get(&handle);
    }
    ~Owned() { api().cuMemRelease(handle); }
    AllocationHandle handle = 0;
  };

  const Device device_;
  const AllocationProp properties_;
};

}  // namespace

std::string cuda_uuid(int ordinal) { return uuid_of(device_at(ordinal)); }

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal) { return std::make_unique<CudaMemory>(ordinal); }

}  // namespace memsaver
