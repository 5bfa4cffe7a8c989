// A library with torch's table of the driver's functions, and with calls through it, as torch makes them for expandable
// segments (tests/torch_segments.py). The table has other words as well.
#include <dlfcn.h>
#include <unistd.h>

#include <stdexcept>

#include "driver/cuda_api.h"

using namespace memsaver::cuda;

namespace c10::cuda {
struct DriverAPI {
  static void* get();
};
}  // namespace c10::cuda

namespace {

struct Table {
  void* first = nullptr;
  decltype(Api::cuMemAddressReserve) reserve;
  decltype(Api::cuMemRelease) release;
  decltype(Api::cuMemMap) map;
  decltype(Api::cuMemAddressFree) address_free;
  decltype(Api::cuMemSetAccess) set_access;
  decltype(Api::cuMemUnmap) unmap;
  decltype(Api::cuMemCreate) create;
  decltype(Api::cuMemExportToShareableHandle) export_handle;
  void* last = nullptr;

  Table() {
    using LookUp = Result (*)(const char*, void**, int, unsigned long long, int*);
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error("no driver");
    const auto look_up = reinterpret_cast<LookUp>(dlsym(library, "cuGetProcAddress_v2"));
    const auto find = [&]<typename Function>(const char* name, Function& function) {
      void* found = nullptr;
      int status = 0;
      if (look_up(name, &found, 12000, 0, &status) != 0) throw std::runtime_error(name);
      function = reinterpret_cast<Function>(found);
    };
    find("cuMemAddressReserve", reserve);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemAddressFree", address_free);
    find("cuMemSetAccess", set_access);
    find("cuMemUnmap", unmap);
    find("cuMemCreate", create);
    find("cuMemExportToShareableHandle", export_handle);
  }
};

void nothing() {}
void (*const fixed_table[16])() = {&nothing};  // the loader makes this memory read-only
void* chosen_table = nullptr;

const Table& table() { return *static_cast<Table*>(c10::cuda::DriverAPI::get()); }

}  // namespace

void* c10::cuda::DriverAPI::get() {
  static Table only;
  return chosen_table != nullptr ? chosen_table : &only;
}

extern "C" {
int torch_reserve(DevicePointer* address, std::size_t size, DevicePointer at) {
  return table().reserve(address, size, 0, at, 0);
}
int torch_create(AllocationHandle* handle, std::size_t size, int handle_types, int device) {
  const AllocationProp properties{kAllocationPinned, handle_types, {kLocationDevice, device}, nullptr, {}};
  return table().create(handle, size, &properties, 0);
}
int torch_map(DevicePointer address, std::size_t size, AllocationHandle handle) {
  return table().map(address, size, 0, handle, 0);
}
int torch_allow(DevicePointer address, std::size_t size, int device) {
  const AccessDesc access{{kLocationDevice, device}, kAccessReadWrite};
  return table().set_access(address, size, &access, 1);
}
int torch_unmap(DevicePointer address, std::size_t size) { return table().unmap(address, size); }
int torch_release(AllocationHandle handle) { return table().release(handle); }
int torch_free(DevicePointer address, std::size_t size) { return table().address_free(address, size); }
int torch_export(AllocationHandle handle) {
  int file = -1;
  const int code = table().export_handle(&file, handle, kHandlePosixFd, 0);
  if (code == kSuccess) close(file);
  return code;
}

// The table that DriverAPI::get() returns is in read-only memory from now on.
void torch_fix_table() { chosen_table = const_cast<void*>(static_cast<const void*>(fixed_table)); }

// cuMemCreate of the table, for callers outside of this library.
void* torch_create_of_table() { return reinterpret_cast<void*>(table().create); }
}
