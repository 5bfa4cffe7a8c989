#define _GNU_SOURCE
#include "preload/libraries.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/limits.h>
#include <pthread.h>
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

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool loaded, no_python;
static Core found;

// The folder of this library is memsaver/drop_in/tms/packages.
static bool find_core(const char* library, char* path, size_t size) {
  char real[PATH_MAX];
  if (realpath(library, real) == NULL) return false;
  for (int level = 0; level < 4; ++level) {
    char* end = strrchr(real, '/');
    if (end == NULL) return false;
    *end = 0;
  }
  DIR* folder = opendir(real);
  if (folder == NULL) return false;
  int count = 0;
  for (const struct dirent* each = readdir(folder); each != NULL; each = readdir(folder)) {
    const char* end = strrchr(each->d_name, '.');
    if (strncmp(each->d_name, "_core.", 6) != 0 || end == NULL || strcmp(end, ".so") != 0) continue;
    ++count;
    snprintf(path, size, "%s/%s", real, each->d_name);
  }
  closedir(folder);
  return count == 1;
}

// File names that end in _cu12.abi3.so and _cu13.abi3.so stand for a version of CUDA.
static int expected_major(const char* library) {
  const char* slash = strrchr(library, '/');
  const char* suffix = strstr(slash == NULL ? library : slash, "_cu1");
  return suffix == NULL ? 0 : atoi(suffix + 3);
}

static void load(void) {
  Dl_info own;
  char path[PATH_MAX + 256];
  if (dladdr((void*)&load, &own) == 0 || own.dli_fname == NULL) return;
  const int expected = expected_major(own.dli_fname), has = runtime_major();
  if (expected != 0 && has != 0 && expected != has) {
    fprintf(stderr, "memsaver: the process has the runtime of CUDA %d, and LD_PRELOAD names %s: expected ..._cu%d...\n",
            has, own.dli_fname, has);
    return;
  }
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") == NULL) {
    no_python = true;
    fprintf(stderr, "memsaver: %s does not run Python, so its memory is not managed: unset TMS_INIT_ENABLE for it\n",
            program_invocation_name);
    return;
  }
  if (!find_core(own.dli_fname, path, sizeof path)) {
    fprintf(stderr, "memsaver: there is no extension module for %s\n", own.dli_fname);
    return;
  }
  void* module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (module == NULL) {
    fprintf(stderr, "memsaver: %s\n", dlerror());
    return;
  }
  found.allocate = (int (*)(const char*, int, int, size_t, void**))dlsym(module, "memsaver_tagged_allocate");
  found.release = (void (*)(void*))dlsym(module, "memsaver_tagged_free");
  loaded = found.allocate != NULL && found.release != NULL;
  if (!loaded) fprintf(stderr, "memsaver: %s is of another version than %s\n", path, own.dli_fname);
}

const Core* core(bool* refuses) {
  pthread_once(&once, load);
  *refuses = !loaded && !no_python;
  return loaded ? &found : NULL;
}
