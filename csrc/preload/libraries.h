// The libraries that the preloaded one calls, without a link to them: the CUDA runtime that the process has loaded, and
// memsaver's core, the extension module beside this library, which the first allocation that is routed loads.
#pragma once

#include <stdbool.h>
#include <stddef.h>

// Without a runtime these print a line and return kNoRuntime.
enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoRuntime = 999 };  // of cudaError_t

int runtime_malloc(void** data, size_t size);
int runtime_free(void* data);
int runtime_device(int* device);
int runtime_memory(size_t* free_bytes, size_t* total);

enum { kAllocated = 0, kRefused = 1, kNoMemory = 2, kNotUsable = 3 };  // as in csrc/torch/tagged_hooks.cpp

typedef struct {
  // `policy`: 0 none, 1 host, 2 disk.
  int (*allocate)(const char* tag, int policy, int device, size_t size, void** data);
  bool (*release)(void* data);  // false: no region has this address
} Core;

// NULL: it cannot be loaded, and a line was printed once. `refuses`: the process needs it, since it runs Python.
const Core* load_core(bool* refuses);
const Core* loaded_core(void);  // NULL: load_core() has not loaded it
