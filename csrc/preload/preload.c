// A library to preload (LD_PRELOAD): routes cudaMalloc and cudaFree to regions, for torch_memory_saver's hook mode
// "preload" and for whole processes (TMS_INIT_ENABLE). Until a thread's allocations are routed every call passes
// through, and nothing is loaded or initialized.
//
// It needs libc alone, since the programs that a process starts load it too. The CUDA runtime is found among the
// libraries that the process has loaded. A statically linked CUDA runtime does not call these functions.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

// Of cudaError_t, but for kNotUsable (csrc/torch/tagged_hooks.cpp).
enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoRuntime = 999, kNotUsable = -1 };

// The CUDA runtime that the process has loaded, without a link to it. Without one these print a line and return
// kNoRuntime.

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

static int runtime_malloc(void** data, size_t size) { CALL_RUNTIME("cudaMalloc", (void**, size_t), data, size); }
static int runtime_free(void* data) { CALL_RUNTIME("cudaFree", (void*), data); }
static int runtime_device(int* device) { CALL_RUNTIME("cudaGetDevice", (int*), device); }
static int runtime_memory(size_t* free_bytes, size_t* total) {
  CALL_RUNTIME("cudaMemGetInfo", (size_t*, size_t*), free_bytes, total);
}

// memsaver's core, the extension module beside this library. The first allocation that is routed loads it.

typedef struct {
  // `policy`: 0 none, 1 host, 2 disk. Returns a code of CUDA, or kNotUsable.
  int (*allocate)(const char* tag, int policy, int device, size_t size, void** data);
  bool (*release)(void* data);  // false: no region has this address
} Core;

static pthread_once_t core_once = PTHREAD_ONCE_INIT;
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

// Settings of a thread's allocations. A thread begins with the values of the variables TMS_INIT_*.

enum { kMostOfTag = 800 };  // bytes: memsaver allows 200 characters

typedef struct {
  bool known;        // the others are set
  bool interesting;  // allocations are routed
  bool cpu_backup, disk_backup;
  bool mmap;  // the name of the kind of host memory; memsaver has one kind
  char tag[kMostOfTag + 1];
} Settings;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char problem[256];  // of the variables
static atomic_flag problem_was_printed = ATOMIC_FLAG_INIT;
static Settings initial = {.known = true, .tag = "default"};
static _Thread_local Settings of_thread;
static atomic_bool retain;  // of the process
static _Atomic(uint64_t) margin_bytes;

static bool is_one_of(const char* value, const char* const* names) {
  while (*names != NULL && strcmp(value, *names) != 0) ++names;
  return *names != NULL;
}

static void refuse(const char* name, const char* value, const char* expected) {
  snprintf(problem, sizeof problem, "%s is '%.64s', expected %s", name, value, expected);
}

static bool read_switch(const char* name) {
  static const char* const on[] = {"1", "true", "TRUE", "True", "yes", "YES", NULL};
  static const char* const off[] = {"", "0", "false", "FALSE", "False", "no", "NO", NULL};
  const char* value = getenv(name);
  if (value == NULL || is_one_of(value, off)) return false;
  if (!is_one_of(value, on)) refuse(name, value, "1, true, yes, 0, false or no");
  return true;
}

static void read_variables(void) {
  initial.interesting = read_switch("TMS_INIT_ENABLE");
  initial.cpu_backup = read_switch("TMS_INIT_ENABLE_CPU_BACKUP");
  initial.disk_backup = read_switch("TMS_INIT_ENABLE_DISK_BACKUP");
  retain = read_switch("TMS_RETAIN_CPU_BACKUP");
  if (initial.cpu_backup && initial.disk_backup)
    refuse("TMS_INIT_ENABLE_DISK_BACKUP", getenv("TMS_INIT_ENABLE_DISK_BACKUP"),
           "one of TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP at most");
  const char* kind = getenv("TMS_INIT_CPU_BACKUP_BACKEND");
  initial.mmap = kind != NULL && strcmp(kind, "mmap") == 0;
  if (kind != NULL && *kind != 0 && !initial.mmap && strcmp(kind, "pinned") != 0)
    refuse("TMS_INIT_CPU_BACKUP_BACKEND", kind, "pinned or mmap");
}

static Settings* settings(void) {
  if (!of_thread.known) {
    pthread_once(&once, read_variables);
    of_thread = initial;
  }
  return &of_thread;
}

// NULL, or the text of an error: a variable has a wrong value.
EXPORT const char* memsaver_preload_problem(void) {
  pthread_once(&once, read_variables);
  return problem[0] == 0 ? NULL : problem;
}

static bool has_problem(void) {
  if (memsaver_preload_problem() == NULL) return false;
  if (!atomic_flag_test_and_set(&problem_was_printed)) fprintf(stderr, "memsaver: %s\n", problem);
  return true;
}

// Whether a routed allocation of this size may be made, as an error of CUDA.
static int check_margin(size_t size) {
  const size_t margin = margin_bytes;
  if (margin == 0) return kSuccess;
  size_t free_bytes = 0, total = 0;
  const int error = runtime_memory(&free_bytes, &total);
  if (error != kSuccess) return error;
  return margin > free_bytes || size > free_bytes - margin ? kOutOfMemory : kSuccess;
}

EXPORT int cudaMalloc(void** data, size_t size) {
  const Settings* wanted = settings();
  if (!wanted->interesting || data == NULL || size == 0) return runtime_malloc(data, size);
  if (has_problem()) return kInvalidValue;
  if (size > PTRDIFF_MAX) return kOutOfMemory;
  int device = 0;
  int error = runtime_device(&device);
  if (error == kSuccess) error = check_margin(size);
  if (error != kSuccess) return error;
  pthread_once(&core_once, load);
  const Core* found = atomic_load(&loaded);
  if (found == NULL) return has_python ? kInvalidValue : runtime_malloc(data, size);
  const int policy = wanted->disk_backup ? 2 : wanted->cpu_backup ? 1 : 0;
  const int code = found->allocate(wanted->tag, policy, device, size, data);
  return code != kNotUsable ? code : runtime_malloc(data, size);  // in a child that was forked after an allocation
}

EXPORT int cudaFree(void* data) {
  const Core* found = data == NULL ? NULL : atomic_load(&loaded);
  return found != NULL && found->release(data) ? kSuccess : runtime_free(data);
}

// The C functions of torch_memory_saver. The next ones concern the calling thread.

EXPORT bool tms_get_interesting_region(void) { return settings()->interesting; }
EXPORT void tms_set_interesting_region(bool interesting) { settings()->interesting = interesting; }

EXPORT const char* tms_get_current_tag(void) { return settings()->tag; }
EXPORT void tms_set_current_tag(const char* tag) {
  if (tag == NULL || strlen(tag) > kMostOfTag)
    fprintf(stderr, "memsaver: the tag is %s, expected at most %d bytes; it stays '%s'\n", tag == NULL ? "NULL" : tag,
            kMostOfTag, settings()->tag);
  else
    strcpy(settings()->tag, tag);
}

EXPORT bool tms_get_enable_cpu_backup(void) { return settings()->cpu_backup; }
EXPORT void tms_set_enable_cpu_backup(bool enabled) { settings()->cpu_backup = enabled; }
EXPORT bool tms_get_enable_disk_backup(void) { return settings()->disk_backup; }
EXPORT void tms_set_enable_disk_backup(bool enabled) { settings()->disk_backup = enabled; }

EXPORT const char* tms_get_cpu_backup_backend(void) { return settings()->mmap ? "mmap" : "pinned"; }
EXPORT void tms_set_cpu_backup_backend(const char* kind) { settings()->mmap = strcmp(kind, "mmap") == 0; }

// Of the process.
EXPORT bool tms_get_retain_cpu_backup(void) {
  pthread_once(&once, read_variables);
  return retain;
}
EXPORT void tms_set_retain_cpu_backup(bool wanted) {
  pthread_once(&once, read_variables);
  retain = wanted;
}

// A routed allocation fails if it would leave less free memory of the device than this.
EXPORT void set_memory_margin_bytes(uint64_t nbytes) { margin_bytes = nbytes; }

// These need Python, which gives the functions. They return 0 if they succeed. Tag NULL: all tags.
static int (*given_pause)(const char* tag);
static int (*given_resume)(const char* tag);

EXPORT void memsaver_preload_calls(int (*pause)(const char*), int (*resume)(const char*)) {
  given_pause = pause;
  given_resume = resume;
}

static int call(int (*given)(const char*), const char* name, const char* tag) {
  if (given != NULL) return given(tag);
  fprintf(stderr, "memsaver: %s was called before Python imported torch_memory_saver or torch\n", name);
  return kInvalidValue;
}

EXPORT int tms_pause(const char* tag) { return call(given_pause, "tms_pause", tag); }
EXPORT int tms_resume(const char* tag) { return call(given_resume, "tms_resume", tag); }
