// Devices made of host memory: CUDA's entry points over unnamed files of memory, with the codes of a CUDA driver. All
// code above the table of calls runs on them, failures and sharing between processes included.
//
// The device of a size is one for all processes of a user: see ledger.h. Work that accesses memory without a mapping is
// an illegal access, after which the context is dead.
#pragma once

#include <cstddef>

#include "driver/cuda_api.h"

namespace memsaver::host {

// The calls of csrc/driver, and calls that tests use.
struct Calls : cuda::Api {
  cuda::Result (*cuLaunchHostFunc)(cuda::Stream, void (*)(void*), void*) = nullptr;
  // Unlike CUDA's, it keeps memory and mappings: work that has not begun never runs, and a dead context lives again.
  cuda::Result (*cuDevicePrimaryCtxReset)(cuda::Device) = nullptr;
  cuda::Device (*open)(std::size_t) = nullptr;  // as open() below
};

// Opens the device of this size. Returns its number among the host devices of this process. Throws DriverError.
cuda::Device open(std::size_t capacity);
const cuda::Platform& platform();

}  // namespace memsaver::host

// The tables of functions of this library, for tests, which replace entries. "host": memsaver::host::Calls; "platform":
// memsaver::cuda::Platform, of host devices; "cuda": memsaver::cuda::Api, null without a CUDA driver; "files":
// memsaver::FileCalls; "clock": memsaver::ClockCalls.
extern "C" __attribute__((visibility("default"))) void* memsaver_table(const char* name);
