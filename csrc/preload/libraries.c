#define _GNU_SOURCE
#include "preload/libraries.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int find_runtime(struct dl_phdr_info* info, size_t size, void* found) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libcudart.so") == NULL) return 0;
  snprintf(found, PATH_MAX, "%s", info->dlpi_name);
  return 1;
}

// A function of the CUDA runtime. Not by RTLD_NEXT: Python loads extensions and their libraries apart from the others,
// and the next library may be a copy of this one under another of its names.
static void* runtime_function(const char* name) {
  char path[PATH_MAX] = "";
  dl_iterate_phdr(find_runtime, path);
  void* library = path[0] == 0 ? NULL : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  void* function = library == NULL ? NULL : dlsym(library, name);
  if (function == NULL) fprintf(stderr, "memsaver: %s was called, and no CUDA runtime library is loaded\n", name);
  return function;
}

#define CALL_RUNTIME(name, parameters, ...)    \
  static _Atomic(uintptr_t) function;          \
  uintptr_t found = atomic_load(&function);    \
  if (found == 0) {                            \
    found = (uintptr_t)runtime_function(name); \
    atomic_store(&function, found);            \
  }                                            \
  return found == 0 ? kNoRuntime : ((int(*) parameters)found)(__VA_ARGS__)

int runtime_malloc(void** data, size_t size) { CALL_RUNTIME("cudaMalloc", (void**, size_t), data, size); }
int runtime_free(void* data) { CALL_RUNTIME("cudaFree", (void*), data); }
int runtime_device(int* device) { CALL_RUNTIME("cudaGetDevice", (int*), device); }
int runtime_memory(size_t* free_bytes, size_t* total) {
  CALL_RUNTIME("cudaMemGetInfo", (size_t*, size_t*), free_bytes, total);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_python = true;
static Core core;
static _Atomic(const Core*) loaded;

static int is_module(const struct dirent* file) {
  return strncmp(file->d_name, "_core.", 6) == 0 && strcmp(strrchr(file->d_name, '.'), ".so") == 0;
}

// The extension module. The folder of this library is memsaver/drop_in/tms/packages.
static void* open_module(void) {
  Dl_info own;
  char real[PATH_MAX], path[PATH_MAX + 512];
  if (dladdr((void*)&open_module, &own) == 0 || own.dli_fname == NULL || realpath(own.dli_fname, real) == NULL)
    return NULL;
  strcpy(strrchr(real, '/'), "/../../..");
  struct dirent** files = NULL;
  const int count = scandir(real, &files, is_module, NULL);
  void* module = NULL;
  if (count == 1) {
    snprintf(path, sizeof path, "%s/%s", real, files[0]->d_name);
    module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (module == NULL) fprintf(stderr, "memsaver: %s\n", dlerror());
  } else {
    fprintf(stderr, "memsaver: there is no extension module for %s\n", own.dli_fname);
  }
  return module;  // the list of files stays: this runs once
}

static void load(void) {
  has_python = dlsym(RTLD_DEFAULT, "Py_IsInitialized") != NULL;
  if (!has_python) {
    fprintf(stderr, "memsaver: %s does not run Python, so its memory is not managed: unset TMS_INIT_ENABLE for it\n",
            program_invocation_name);
    return;
  }
  void* module = open_module();
  if (module == NULL) return;
  core.allocate = (int (*)(const char*, int, int, size_t, void**))dlsym(module, "memsaver_tagged_allocate");
  core.release = (bool (*)(void*))dlsym(module, "memsaver_tagged_free");
  if (core.allocate != NULL && core.release != NULL)
    atomic_store(&loaded, &core);
  else
    fprintf(stderr, "memsaver: the extension module is of another version than the library to preload\n");
}

const Core* load_core(bool* refuses) {
  pthread_once(&once, load);
  const Core* found = loaded_core();
  *refuses = found == NULL && has_python;
  return found;
}

const Core* loaded_core(void) { return atomic_load(&loaded); }
