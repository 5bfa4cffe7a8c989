#define _GNU_SOURCE
#include "preload/core.h"

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
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
  char pattern[PATH_MAX + 16];
  snprintf(pattern, sizeof pattern, "%s/_core*.so", real);
  glob_t paths;
  const bool is = glob(pattern, 0, NULL, &paths) == 0 && paths.gl_pathc == 1;
  if (is) snprintf(path, size, "%s", paths.gl_pathv[0]);
  globfree(&paths);
  return is;
}

// The names that end in _cu12 and _cu13 stand for a version of CUDA.
static int expected_major(const char* library) {
  const char* suffix = strstr(library, "_cu1");
  return suffix == NULL ? 0 : atoi(suffix + 3);
}

static void load(void) {
  Dl_info own;
  char path[PATH_MAX + 16];
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
