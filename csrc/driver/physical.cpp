#include "driver/physical.h"

#include <unistd.h>

#include <cstdlib>

#include "base/errors.h"

namespace memsaver {

using namespace cuda;

namespace {

// Drivers before CUDA 12.2 lack the attribute; the pipe of the MPS server is checked instead.
bool mps_serves(const Api& api, Device device) {
  int enabled = 0;
  if (api.cuDeviceGetAttribute(&enabled, kAttributeMps, device) == kSuccess) return enabled != 0;
  const char* named = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const std::string folder = named != nullptr ? named : "/tmp/nvidia-mps";
  return ::access((folder + "/control").c_str(), F_OK) == 0;
}

}  // namespace

PhysicalMemory::PhysicalMemory(const Platform& platform, Device device, const std::string& name)
    : platform_(platform), device_(device), properties_(chunk_properties(platform.api, device, name, kHandlePosixFd)) {
  if (attribute_of(platform.api, device, kAttributePosixFd) == 0)
    throw DriverError("cuDeviceGetAttribute", kNotSupported,
                      name + " has no POSIX descriptors for its memory, which a shared pool needs");
}

int PhysicalMemory::create(std::size_t size) {
  const Api& api = platform_.api;
  AllocationHandle handle = 0;
  const Result code = api.cuMemCreate(&handle, size, &properties_, 0);
  if (refuses_handle_type(code))
    throw DriverError("cuMemCreate", code,
                      "the driver refuses memory with a POSIX descriptor, which a shared pool needs");
  check(api, "cuMemCreate", code);
  int file = -1;
  try {
    check(api, "cuMemExportToShareableHandle", api.cuMemExportToShareableHandle(&file, handle, kHandlePosixFd, 0));
  } catch (const DriverError&) {
    api.cuMemRelease(handle);
    throw;
  }
  const std::lock_guard lock(mutex_);
  handles_[file] = handle;
  return file;
}

void PhysicalMemory::close(int file) {
  AllocationHandle handle = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = handles_.find(file);
    if (found == handles_.end()) throw BadArgument("descriptor " + std::to_string(file) + " is not one of this memory");
    handle = found->second;
    handles_.erase(found);
  }
  ::close(file);
  check(platform_.api, "cuMemRelease", platform_.api.cuMemRelease(handle));
}

bool PhysicalMemory::under_mps() const { return mps_serves(platform_.api, device_); }

std::vector<GpuFacts> gpu_facts() {
  const Api& calls = api();
  std::vector<GpuFacts> found;
  for (const Device device : all_devices(calls)) {
    char name[256] = "";
    calls.cuDeviceGetName(name, sizeof name, device);
    const auto has = [&](int which) {
      int value = 0;
      return calls.cuDeviceGetAttribute(&value, which, device) == kSuccess && value != 0;
    };
    found.push_back(
        {name, has(kAttributeVirtualMemory), has(kAttributePosixFd), has(kAttributeFabric), mps_serves(calls, device)});
  }
  return found;
}

int cuda_version() {
  int version = 0;
  return api().cuDriverGetVersion(&version) == kSuccess ? version : 0;
}

std::string cuda_uuid(int ordinal) { return uuid_of(platform(), device_at(ordinal)); }

bool cuda_under_mps(int ordinal) { return mps_serves(api(), device_at(ordinal)); }

std::unique_ptr<PhysicalMemory> open_cuda_memory(int ordinal) {
  return std::make_unique<PhysicalMemory>(platform(), device_at(ordinal), "cuda:" + std::to_string(ordinal));
}

}  // namespace memsaver
