// C functions by which the library to preload (csrc/preload) allocates in tagged regions. It looks them up by name.
// Callers are in cudaMalloc and cudaFree: the rules of torch_hooks.cpp apply, but for the first allocation of a tag on
// a device, which makes the region.
#include <cstdio>
#include <string>

#include "regions/tagged.h"
#include "torch/torch_hooks.h"

namespace memsaver {
namespace {

// An allocation that meets a pause takes another region. Pauses do not follow so closely.
constexpr int kAttempts = 100;

enum Result { kAllocated = 0, kInvalid = 1, kOutOfMemory = 2, kNotUsable = -1 };  // of cudaError_t, but for the last

std::string device_name(int ordinal) {
  static const bool has_gpus = cuda_device_count() > 0;
  return has_gpus ? "cuda:" + std::to_string(ordinal) : "cpu";
}

Address allocate_tagged(const std::string& tag, Policy policy, int ordinal, std::size_t size) {
  const std::string name = device_name(ordinal);
  for (int attempt = 1;; ++attempt) {
    Region& region = tagged_regions("tms").active(tag, name, policy);
    try {
      return TorchAllocation::allocate(region, size);
    } catch (const RegionPausedError&) {  // a pause began meanwhile
      if (attempt == kAttempts) throw;
    }
  }
}

}  // namespace
}  // namespace memsaver

extern "C" {

// `policy`: a number of memsaver::Policy.
__attribute__((visibility("default"), used)) int memsaver_tagged_allocate(const char* tag, int policy, int ordinal,
                                                                          std::size_t size, void** data) {
  using namespace memsaver;
  if (!usable()) return kNotUsable;
  try {
    *data = reinterpret_cast<void*>(allocate_tagged(tag, static_cast<Policy>(policy), ordinal, size));
    return kAllocated;
  } catch (const OutOfMemoryError&) {
    return kOutOfMemory;  // torch frees its cache and tries again
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver: an allocation of %zu bytes with the tag '%s' failed: %s\n", size, tag,
                 error.what());
    return kInvalid;
  }
}

// False: no region has this address, or this is a forked child, whose regions belong to the parent.
__attribute__((visibility("default"), used)) bool memsaver_tagged_free(void* data) {
  using namespace memsaver;
  if (!usable()) return false;
  const auto address = reinterpret_cast<Address>(data);
  Region* region = core().parts.addresses.at(address);
  if (region == nullptr) return false;
  try {
    region->free(address);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver: %p could not be freed: %s\n", data, error.what());
  }
  return true;
}
}
