#define _GNU_SOURCE
#include "preload/core.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "preload/cuda_runtime.h"

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
