// memsaver's core: the extension module beside this library. It is loaded by the first allocation that is routed.
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { kAllocated = 0, kRefused = 1, kNoMemory = 2, kNotUsable = 3 };  // as in csrc/torch/tagged_hooks.cpp

typedef struct {
  // `policy`: 0 none, 1 host, 2 disk.
  int (*allocate)(const char* tag, int policy, int device, size_t size, void** data);
  void (*release)(void* data);
} Core;

// NULL: it cannot be loaded, and a line was printed once. `refuses`: the process needs it, since it runs Python.
const Core* core(bool* refuses);
