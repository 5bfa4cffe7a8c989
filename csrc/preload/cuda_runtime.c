#define _GNU_SOURCE
#include "preload/cuda_runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcudart.so"

static int find_runtime(struct dl_phdr_info* info, size_t size, void* found) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, LIBRARY) == NULL) return 0;
  snprintf(found, 4096, "%s", info->dlpi_name);
  return 1;
}

// Whether a function is of a copy of this library, under another of its names.
static bool is_of_copy(void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_fname == NULL) return false;
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  const bool is = library != NULL && dlsym(library, "memsaver_preload_calls") != NULL;
  if (library != NULL) dlclose(library);
  return is;
}

// A function of a library after this one, or of one that was loaded apart from the others, as Python loads extensions.
static void* runtime_function(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function != NULL && !is_of_copy(function)) return function;
  char path[4096] = "";
  dl_iterate_phdr(find_runtime, path);
  void* library = path[0] == 0 ? NULL : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  return library == NULL ? NULL : dlsym(library, name);
}

#define RUNTIME(type, name)                                                                      \
  static _Atomic(uintptr_t) cached;                                                              \
  uintptr_t address = atomic_load(&cached);                                                      \
  if (address == 0) {                                                                            \
    address = (uintptr_t)runtime_function(name);                                                 \
    if (address == 0) {                                                                          \
      fprintf(stderr, "memsaver: %s was called, and no CUDA runtime library is loaded\n", name); \
      return kNoRuntime;                                                                         \
    }                                                                                            \
    atomic_store(&cached, address);                                                              \
  }                                                                                              \
  const type function = (type)address

int runtime_malloc(void** data, size_t size) {
  typedef int (*Function)(void**, size_t);
  RUNTIME(Function, "cudaMalloc");
  return function(data, size);
}

int runtime_free(void* data) {
  typedef int (*Function)(void*);
  RUNTIME(Function, "cudaFree");
  return function(data);
}

int runtime_device(int* device) {
  typedef int (*Function)(int*);
  RUNTIME(Function, "cudaGetDevice");
  return function(device);
}

int runtime_memory(size_t* free_bytes, size_t* total) {
  typedef int (*Function)(size_t*, size_t*);
  RUNTIME(Function, "cudaMemGetInfo");
  return function(free_bytes, total);
}

int runtime_last_error(void) {
  typedef int (*Function)(void);
  RUNTIME(Function, "cudaGetLastError");
  return function();
}

int runtime_host_flags(unsigned* flags, void* data) {
  typedef int (*Function)(unsigned*, void*);
  RUNTIME(Function, "cudaHostGetFlags");
  return function(flags, data);
}

int runtime_major(void) {
  Dl_info info;
  void* function = runtime_function("cudaMalloc");
  if (function == NULL || dladdr(function, &info) == 0 || info.dli_fname == NULL) return 0;
  const char* name = strstr(info.dli_fname, LIBRARY ".");
  return name == NULL ? 0 : atoi(name + sizeof LIBRARY);
}
