// The CUDA runtime that the process has loaded: its functions, without a link to it. Without a runtime a function
// prints a line and returns kNoRuntime.
#pragma once

#include <stddef.h>

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoRuntime = 999 };  // of cudaError_t

int runtime_malloc(void** data, size_t size);
int runtime_free(void* data);
int runtime_device(int* device);
int runtime_memory(size_t* free_bytes, size_t* total);
int runtime_last_error(void);
int runtime_host_flags(unsigned* flags, void* data);
int runtime_major(void);  // of the CUDA version; 0: unknown
