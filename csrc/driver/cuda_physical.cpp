// The memory of a GPU, without a context.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "driver/cuda_api.h"
#include "driver/driver.h"
#include "driver/physical.h"

namespace memsaver {
namespace {

using namespace cuda;

// Drivers before CUDA 12.2 lack the attribute; the pipe of the MPS server is checked instead.
bool mps_serves(Device device) {
  int enabled = 0;
  if (api().cuDeviceGetAttribute(&enabled, kAttributeMps, device) == kSuccess) return enabled != 0;
  const char* named = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const std::string folder = named != nullptr ? named : "/tmp/nvidia-mps";
  return ::access((folder + "/control").c_str(), F_OK) == 0;
}

class CudaMemory final : public PhysicalMemory {
 public:
  explicit CudaMemory(int ordinal) : device_(device_at(ordinal)), properties_(chunk_properties(device_, true)) {
    if (!has_posix_handles(device_))
      throw DriverError(
          "cuDeviceGetAttribute", kNotSupported,
          "cuda:" + std::to_string(ordinal) + " has no POSIX descriptors for its memory, which a shared pool needs");
  }

  std::string uuid() override { return uuid_of(device_); }

  std::size_t total_bytes() override { return total_memory(device_); }

  std::size_t free_bytes() override { return free_memory(uuid()).value_or(total_bytes()); }

  int create(std::size_t size) override {
    faults().check("create");
    const Owned made([&](AllocationHandle* handle) {
      const Result code = api().cuMemCreate(handle, size, &properties_, 0);
      if (refuses_handle_type(code))
        throw DriverError("cuMemCreate", code,
                          "the driver refuses memory with a POSIX descriptor, which a shared pool needs");
      check("cuMemCreate", code);
    });
    int file = -1;
    check("cuMemExportToShareableHandle", api().cuMemExportToShareableHandle(&file, made.handle, kHandlePosixFd, 0));
    return file;
  }

  void adopt(int file, std::size_t) override {
    // The driver only reports whether the import succeeds. The next owner's mapping checks the size.
    const Owned imported([&](AllocationHandle* handle) { *handle = import_posix(file); });
  }

  void close(int file) override { ::close(file); }

  std::vector<int> compute_pids() override {
    std::vector<int> pids;
    for (const ProcessUse& process : compute_processes(uuid())) pids.push_back(process.pid);
    return pids;
  }

  std::vector<Driver::Holding> holdings() override {
    std::vector<Driver::Holding> found;
    for (const ProcessUse& use : compute_processes(uuid()))
      if (use.bytes > 0) found.push_back({use.pid, use.bytes, std::nullopt});
    return found;
  }

  std::optional<std::size_t> used_bytes() override {
    const std::optional<std::size_t> free = free_memory(uuid());
    if (!free) return std::nullopt;
    return total_bytes() - std::min(*free, total_bytes());
  }

  bool under_mps() override { return mps_serves(device_); }

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

bool cuda_under_mps(int ordinal) { return mps_serves(device_at(ordinal)); }

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal) { return std::make_unique<CudaMemory>(ordinal); }

}  // namespace memsaver
