// A library to preload (LD_PRELOAD): routes cudaMalloc and cudaFree to regions, for torch_memory_saver's hook mode
// "preload" and for whole processes (TMS_INIT_ENABLE). Until a thread's allocations are routed every call passes
// through, and nothing is loaded or initialized.
//
// It needs libc alone, since the programs that a process starts load it too. The CUDA runtime is found among the
// libraries that the process has loaded. A statically linked CUDA runtime does not call these functions.
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "preload/libraries.h"
#include "preload/settings.h"

#define EXPORT __attribute__((visibility("default")))

// The set of routed addresses: open addressing, a power of two of places, at most half of them taken. The caller locks.
static uintptr_t* places;
static size_t count, capacity;

static size_t place_of(uintptr_t address) {
  size_t at = (address >> 9) * 0x9E3779B97F4A7C15u & (capacity - 1);
  while (places[at] != 0 && places[at] != address) at = (at + 1) & (capacity - 1);
  return at;
}

// False: there is no memory for the set.
static bool addresses_add(uintptr_t address) {
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

// False: it was not in the set.
static bool addresses_remove(uintptr_t address) {
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

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards the following and the set of routed addresses
static size_t margin_bytes;
static bool handles_forks;
static bool passes_through;  // in a child that was forked after an allocation

static void before_fork(void) { pthread_mutex_lock(&mutex); }
static void in_parent(void) { pthread_mutex_unlock(&mutex); }

// The regions belong to the parent.
static void in_forked_child(void) {
  passes_through = true;
  pthread_mutex_unlock(&mutex);
}

// Whether a routed allocation of this size may be made, as an error of CUDA.
static int check_margin(size_t size) {
  pthread_mutex_lock(&mutex);
  const size_t margin = margin_bytes;
  pthread_mutex_unlock(&mutex);
  if (margin == 0) return kSuccess;
  size_t free_bytes = 0, total = 0;
  const int error = runtime_memory(&free_bytes, &total);
  if (error != kSuccess) return error;
  return margin > free_bytes || size > free_bytes - margin ? kOutOfMemory : kSuccess;
}

EXPORT int cudaMalloc(void** data, size_t size) {
  const Settings* wanted = settings();
  if (!wanted->interesting || data == NULL || size == 0) return runtime_malloc(data, size);
  if (!settings_are_valid()) return kInvalidValue;
  if (size > PTRDIFF_MAX) return kOutOfMemory;
  int device = 0;
  int error = runtime_device(&device);
  if (error == kSuccess) error = check_margin(size);
  if (error != kSuccess) return error;
  pthread_mutex_lock(&mutex);
  if (!handles_forks) handles_forks = pthread_atfork(before_fork, in_parent, in_forked_child) == 0;
  const bool passes = passes_through;
  pthread_mutex_unlock(&mutex);
  bool refuses = false;
  const Core* memsaver = passes ? NULL : core(&refuses);
  if (memsaver == NULL) return refuses ? kInvalidValue : runtime_malloc(data, size);
  void* made = NULL;
  const int policy = wanted->disk_backup ? 2 : wanted->cpu_backup ? 1 : 0;
  switch (memsaver->allocate(wanted->tag, policy, device, size, &made)) {
    case kAllocated: break;
    case kNotUsable: return runtime_malloc(data, size);
    case kNoMemory: return kOutOfMemory;
    default: return kInvalidValue;
  }
  pthread_mutex_lock(&mutex);
  const bool kept = addresses_add((uintptr_t)made);
  pthread_mutex_unlock(&mutex);
  if (!kept) {
    memsaver->release(made);
    return kOutOfMemory;
  }
  *data = made;
  return kSuccess;
}

EXPORT int cudaFree(void* data) {
  pthread_mutex_lock(&mutex);
  const bool routed = data != NULL && addresses_remove((uintptr_t)data);
  const bool passes = passes_through;
  pthread_mutex_unlock(&mutex);
  if (!routed) return runtime_free(data);
  bool refuses = false;
  if (!passes) core(&refuses)->release(data);
  return kSuccess;
}

// Callers look these up in this library.
EXPORT int cudaGetLastError(void) { return runtime_last_error(); }
EXPORT int cudaHostGetFlags(unsigned* flags, void* data) { return runtime_host_flags(flags, data); }

// The C functions of torch_memory_saver. Those without a result or an argument of the device concern the calling
// thread.

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
EXPORT void tms_set_cpu_backup_backend(const char* kind) {
  if (kind == NULL || (strcmp(kind, "pinned") != 0 && strcmp(kind, "mmap") != 0))
    fprintf(stderr, "memsaver: the backend is '%s', expected 'pinned' or 'mmap'; it stays '%s'\n",
            kind == NULL ? "NULL" : kind, tms_get_cpu_backup_backend());
  else
    settings()->mmap = strcmp(kind, "mmap") == 0;
}

// A routed allocation fails if it would leave less free memory of the device than this.
EXPORT void set_memory_margin_bytes(uint64_t nbytes) {
  pthread_mutex_lock(&mutex);
  margin_bytes = nbytes;
  pthread_mutex_unlock(&mutex);
}

// These need Python, which gives the functions. They return 0, or NULL for a pointer, if they fail.
typedef struct {
  int (*pause)(const char* tag);  // NULL: all tags
  int (*resume)(const char* tag);
  int (*set_disk_dir)(const char* path);
  uint8_t* (*backup)(const uint8_t* data, uint64_t size);
  int (*retain)(int wanted);  // negative: only read
} Calls;

static Calls calls;

EXPORT void memsaver_preload_calls(const Calls* given) { calls = *given; }

static bool has_calls(const char* name) {
  if (calls.pause == NULL)
    fprintf(stderr, "memsaver: %s was called before Python imported torch_memory_saver or torch\n", name);
  return calls.pause != NULL;
}

EXPORT int tms_pause(const char* tag) { return has_calls("tms_pause") ? calls.pause(tag) : kInvalidValue; }
EXPORT int tms_resume(const char* tag) { return has_calls("tms_resume") ? calls.resume(tag) : kInvalidValue; }
EXPORT void tms_set_disk_backup_dir(const char* path) {
  if (has_calls("tms_set_disk_backup_dir")) calls.set_disk_dir(path);
}
EXPORT uint8_t* tms_get_cpu_backup_pointer(const uint8_t* data, uint64_t size) {
  return has_calls("tms_get_cpu_backup_pointer") ? calls.backup(data, size) : NULL;
}
EXPORT void tms_set_retain_cpu_backup(bool wanted) {
  if (has_calls("tms_set_retain_cpu_backup")) calls.retain(wanted);
}
EXPORT bool tms_get_retain_cpu_backup(void) { return has_calls("tms_get_retain_cpu_backup") && calls.retain(-1); }
