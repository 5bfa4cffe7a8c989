// A library to preload (LD_PRELOAD): routes cudaMalloc and cudaFree to regions, for torch_memory_saver's hook mode
// "preload". It knows nothing of memsaver's core. memsaver gives it C functions that allocate and free, for a thread.
// Until then every call passes through, and nothing is loaded or initialized.
//
// It needs libc alone, since the programs that a process starts load it too. The CUDA runtime is found among the
// libraries that the process has loaded. A statically linked CUDA runtime does not call these functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

enum { kSuccess = 0, kOutOfMemory = 2, kNoRuntime = 999 };  // of cudaError_t

typedef void* (*Allocate)(ssize_t size, int device, void* stream);
typedef void (*Release)(void* data, ssize_t size, int device, void* stream);

typedef struct {
  Allocate allocate;  // NULL: pass through
  int device;         // allocations on other devices pass through
} Route;

static _Thread_local Route route;
static _Thread_local bool suspended;                       // by tms_set_interesting_region(), until the route changes
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards all of the following
static Release release;
static size_t margin_bytes;
// The addresses that were routed: open addressing, a power of two of places, at most half of them taken.
static uintptr_t* places;
static size_t count, capacity;

static size_t place_of(uintptr_t address) {
  size_t at = (address >> 9) * 0x9E3779B97F4A7C15u & (capacity - 1);
  while (places[at] != 0 && places[at] != address) at = (at + 1) & (capacity - 1);
  return at;
}

static bool remember(uintptr_t address) {
  if (2 * (count + 1) > capacity) {
    uintptr_t* former = places;
    const size_t length = capacity, wanted = capacity == 0 ? 64 : 2 * capacity;
    uintptr_t* grown = calloc(wanted, sizeof *grown);
    if (grown == NULL) return false;
    places = grown;
    capacity = wanted;
    for (size_t i = 0; i < length; ++i)
      if (former[i] != 0) places[place_of(former[i])] = former[i];
    free(former);
  }
  places[place_of(address)] = address;
  ++count;
  return true;
}

static bool forget(uintptr_t address) {
  if (count == 0) return false;
  size_t at = place_of(address);
  if (places[at] == 0) return false;
  places[at] = 0;
  --count;
  // Later addresses of the same run move up, so that look-ups find them.
  for (size_t next = (at + 1) & (capacity - 1); places[next] != 0; next = (next + 1) & (capacity - 1)) {
    const uintptr_t moved = places[next];
    places[next] = 0;
    places[place_of(moved)] = moved;
  }
  return true;
}

static int find_runtime(struct dl_phdr_info* info, size_t size, void* found) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libcudart.so") == NULL) return 0;
  snprintf(found, 4096, "%s", info->dlpi_name);
  return 1;
}

// A function of the CUDA runtime: of a library after this one, or of one that was loaded apart from the others, as
// Python loads extensions.
static void* runtime_function(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function != NULL) return function;
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

static int runtime_malloc(void** data, size_t size) {
  typedef int (*Function)(void**, size_t);
  RUNTIME(Function, "cudaMalloc");
  return function(data, size);
}

static int runtime_free(void* data) {
  typedef int (*Function)(void*);
  RUNTIME(Function, "cudaFree");
  return function(data);
}

static int runtime_device(int* device) {
  typedef int (*Function)(int*);
  RUNTIME(Function, "cudaGetDevice");
  return function(device);
}

static int runtime_memory(size_t* free_bytes, size_t* total) {
  typedef int (*Function)(size_t*, size_t*);
  RUNTIME(Function, "cudaMemGetInfo");
  return function(free_bytes, total);
}

EXPORT int cudaMalloc(void** data, size_t size) {
  int device = 0;
  if (route.allocate == NULL || suspended || data == NULL || size == 0 || size > PTRDIFF_MAX)
    return runtime_malloc(data, size);
  if (runtime_device(&device) != kSuccess || device != route.device) return runtime_malloc(data, size);
  pthread_mutex_lock(&mutex);
  const size_t margin = margin_bytes;
  pthread_mutex_unlock(&mutex);
  if (margin > 0) {
    size_t free_bytes = 0, total = 0;
    const int error = runtime_memory(&free_bytes, &total);
    if (error != kSuccess) return error;
    if (margin > free_bytes || size > free_bytes - margin) return kOutOfMemory;
  }
  void* made = route.allocate((ssize_t)size, device, NULL);
  if (made == NULL) return kOutOfMemory;
  pthread_mutex_lock(&mutex);
  const bool kept = remember((uintptr_t)made);
  const Release give_back = release;
  pthread_mutex_unlock(&mutex);
  if (!kept) {
    give_back(made, (ssize_t)size, device, NULL);
    return kOutOfMemory;
  }
  *data = made;
  return kSuccess;
}

EXPORT int cudaFree(void* data) {
  pthread_mutex_lock(&mutex);
  const bool routed = data != NULL && forget((uintptr_t)data);
  const Release give_back = release;
  pthread_mutex_unlock(&mutex);
  if (!routed) return runtime_free(data);
  give_back(data, 0, 0, NULL);
  return kSuccess;
}

// Callers look these up in this library.
EXPORT int cudaGetLastError(void) {
  typedef int (*Function)(void);
  RUNTIME(Function, "cudaGetLastError");
  return function();
}

EXPORT int cudaHostGetFlags(unsigned* flags, void* data) {
  typedef int (*Function)(unsigned*, void*);
  RUNTIME(Function, "cudaHostGetFlags");
  return function(flags, data);
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void in_parent(void) { pthread_mutex_unlock(&mutex); }

// The regions belong to the parent: all calls pass through.
static void in_forked_child(void) {
  route.allocate = NULL;
  pthread_mutex_unlock(&mutex);
}

// The route of the calling thread. Both functions may be NULL: its calls pass through.
EXPORT void memsaver_preload_route(Allocate allocate, Release function, int device) {
  static bool forks_are_handled;
  pthread_mutex_lock(&mutex);
  if (!forks_are_handled) forks_are_handled = pthread_atfork(before_fork, in_parent, in_forked_child) == 0;
  if (function != NULL) release = function;
  pthread_mutex_unlock(&mutex);
  route = (Route){allocate, device};
  suspended = false;
}

// By the names of torch_memory_saver, for callers of its library: whether calls of this thread are routed.
EXPORT int tms_get_interesting_region(void) { return route.allocate != NULL && !suspended; }

EXPORT void tms_set_interesting_region(int interesting) { suspended = !interesting; }

// A routed allocation fails if it would leave less free memory of the device than this.
EXPORT void memsaver_preload_margin(size_t nbytes) {
  pthread_mutex_lock(&mutex);
  margin_bytes = nbytes;
  pthread_mutex_unlock(&mutex);
}
