// A library to preload (LD_PRELOAD) for the trial of default_pool.py: the physical memory of torch's own caching
// allocator, with expandable segments, can leave the device and return at the same addresses.
//
// torch asks cudaGetDriverEntryPointByVersion for the driver's functions. It gets those of this file in the place of
// the ones that deal with chunks of memory. A handle that torch holds is a number of this library, since the driver's
// handle changes in a pause. Numbers that are not known pass through: imported memory, and handles that the driver
// returned for an address.
//
// One mutex guards all, and is held over calls of the driver. The library needs libc alone. It is for one process that
// does not fork after its first allocation.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define COUNT(array) (sizeof(array) / sizeof *(array))

typedef int Result;
typedef unsigned long long Pointer;
typedef unsigned long long Handle;
typedef unsigned long long Flags;
typedef void* Stream;
typedef struct {
  int type, id;
} Location;
typedef struct {
  int type, handle_types;
  Location location;
  void* win32_meta;
  unsigned char flags[8];
} Properties;
typedef struct {
  Location location;
  int flags;
} Access;

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kNotReady = 600 };
enum { kOnDevice = 1, kReadWrite = 3, kMostDevices = 64, kMostChunks = 1 << 20, kMostSizes = 8 };
static const Handle kMark = 0x6d73ULL << 48;  // of this library's numbers, above any address

// Memory that torch made by one cuMemCreate.
typedef struct {
  Handle real;  // 0: no memory, while paused
  size_t size;
  Properties properties;
  Pointer address;   // 0: not mapped
  uint64_t devices;  // that may access it, a bit for each
  char* backup;      // within `host`, or NULL
  uint16_t generation;
  bool used, held, paused;
  bool stays;  // it was exported, or mapped in a way that torch's segments are not: another may hold the memory
} Chunk;

typedef struct {
  double work_s, host_s, copy_s, unmap_s, create_s, map_s, access_s;
  uint64_t chunks, bytes, backed_up_bytes, staying_bytes;
} Report;

typedef struct {
  uint64_t taken, creates, releases, maps, unmaps, accesses, reserves, refused_by_limit, refused_by_driver, exports;
  uint64_t mapped_bytes, paused_bytes, staying_bytes, handle_types, checked_unmaps, busy_unmaps;
  uint64_t sizes[kMostSizes], counts[kMostSizes];  // chunks that are mapped, by size
} Stats;

typedef struct {
  Pointer address;
  uint64_t size;
} Range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Chunk chunks[kMostChunks];     // pages of the system's only where they are touched
static uint32_t mapped[kMostChunks];  // the mapped chunks by address
static size_t made, mapped_count, spare_count;
static uint32_t spare[kMostChunks];
static Stats stats;
static size_t live_bytes, limit_bytes;
static bool checks_unmaps;
static char* host;  // pinned, for backups
static size_t host_bytes;
static void* contexts[kMostDevices];
static Stream streams[kMostDevices];

// The driver's functions of which this file has its own.
static struct {
  Result (*create)(Handle*, size_t, const Properties*, Flags);
  Result (*release)(Handle);
  Result (*map)(Pointer, size_t, size_t, Handle, Flags);
  Result (*unmap)(Pointer, size_t);
  Result (*set_access)(Pointer, size_t, const Access*, size_t);
  Result (*reserve)(Pointer*, size_t, size_t, Pointer, Flags);
  Result (*address_free)(Pointer, size_t);
  Result (*export_handle)(void*, Handle, int, Flags);
  Result (*retain)(Handle*, void*);
  Result (*properties_of)(Properties*, Handle);
  Result (*bind)(Handle, size_t, Handle, size_t, size_t, Flags);
} driver;

// The driver's functions that a pause and a resume need in addition.
static struct {
  Result (*cuDevicePrimaryCtxRetain)(void**, int);
  Result (*cuCtxPushCurrent)(void*);
  Result (*cuCtxPopCurrent)(void**);
  Result (*cuCtxSynchronize)(void);
  Result (*cuStreamCreate)(Stream*, unsigned);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuStreamQuery)(Stream);  // NULL where the driver has none
  Result (*cuMemHostRegister)(void*, size_t, unsigned);
  Result (*cuMemHostUnregister)(void*);
  Result (*cuMemcpyDtoHAsync)(void*, Pointer, size_t, Stream);
  Result (*cuMemcpyHtoDAsync)(Pointer, const void*, size_t, Stream);
} calls;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// --- Chunks ---

static Handle number_of(const Chunk* chunk) {
  return kMark | (Handle)chunk->generation << 32 | (Handle)(chunk - chunks);
}

static Chunk* chunk_of(Handle handle) {
  const uint32_t index = (uint32_t)handle;
  if ((handle & 0xffffULL << 48) != kMark || index >= made) return NULL;
  Chunk* chunk = &chunks[index];
  return chunk->used && number_of(chunk) == handle ? chunk : NULL;
}

static Chunk* new_chunk(void) {
  if (spare_count == 0 && made == kMostChunks) return NULL;
  Chunk* chunk = &chunks[spare_count > 0 ? spare[--spare_count] : made++];
  const uint16_t generation = chunk->generation;
  *chunk = (Chunk){.generation = generation, .used = true, .held = true};
  return chunk;
}

static Result drop_chunk(Chunk* chunk) {
  Result result = kSuccess;
  if (chunk->real != 0) {
    result = driver.release(chunk->real);
    live_bytes -= chunk->size;
  }
  chunk->used = false;
  ++chunk->generation;
  spare[spare_count++] = (uint32_t)(chunk - chunks);
  return result;
}

// The place of the first mapped chunk that ends behind the address.
static size_t place_of(Pointer address) {
  size_t low = 0, high = mapped_count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    const Chunk* chunk = &chunks[mapped[middle]];
    if (chunk->address + chunk->size <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static Chunk* mapped_at(size_t place) { return place < mapped_count ? &chunks[mapped[place]] : NULL; }

static void insert(Chunk* chunk, Pointer address) {
  const size_t place = place_of(address);
  memmove(mapped + place + 1, mapped + place, (mapped_count++ - place) * sizeof *mapped);
  mapped[place] = (uint32_t)(chunk - chunks);
  chunk->address = address;
}

static void erase(size_t place, size_t count) {
  memmove(mapped + place, mapped + place + count, (mapped_count - place - count) * sizeof *mapped);
  mapped_count -= count;
}

// The chunks that a range consists of, as a place and a number of them. False if it has parts that are not chunks.
static bool find(Pointer address, size_t size, size_t* place, size_t* count) {
  *place = place_of(address);
  *count = 0;
  Pointer next = address;
  for (Chunk* chunk; next < address + size && (chunk = mapped_at(*place + *count)) != NULL; ++*count) {
    if (chunk->address != next) return false;
    next += chunk->size;
  }
  return size > 0 && next == address + size;
}

static bool any_paused(size_t place, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (mapped_at(place + i)->paused) return true;
  return false;
}

// --- What torch calls ---

static Result create(Handle* handle, size_t size, const Properties* properties, Flags flags) {
  pthread_mutex_lock(&mutex);
  Result result = kOutOfMemory;
  Chunk* chunk = NULL;
  if (limit_bytes != 0 && (size > limit_bytes || live_bytes > limit_bytes - size)) {
    ++stats.refused_by_limit;
  } else if ((chunk = new_chunk()) != NULL) {
    result = driver.create(&chunk->real, size, properties, flags);
    if (result == kSuccess) {
      ++stats.creates;
      stats.handle_types |= (uint64_t)properties->handle_types;
      chunk->size = size;
      chunk->properties = *properties;
      chunk->stays = flags != 0 || properties->location.type != kOnDevice || properties->location.id < 0 ||
                     properties->location.id >= kMostDevices;
      live_bytes += size;
      *handle = number_of(chunk);
    } else {
      if (result == kOutOfMemory) ++stats.refused_by_driver;
      chunk->real = 0;
      drop_chunk(chunk);
    }
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result release(Handle handle) {
  pthread_mutex_lock(&mutex);
  Chunk* chunk = chunk_of(handle);
  Result result = kSuccess;
  if (chunk == NULL) {
    result = driver.release(handle);
  } else if (!chunk->held) {
    result = kInvalidValue;
  } else {
    ++stats.releases;
    chunk->held = false;
    if (chunk->address == 0) result = drop_chunk(chunk);  // otherwise with its mapping
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result map(Pointer address, size_t size, size_t offset, Handle handle, Flags flags) {
  pthread_mutex_lock(&mutex);
  Chunk* chunk = chunk_of(handle);
  Result result = kSuccess;
  const bool whole = chunk != NULL && chunk->address == 0 && offset == 0 && size == chunk->size && flags == 0;
  if (chunk != NULL && chunk->real == 0) {  // it was unmapped while it was paused
    result = chunk->address != 0 ? kInvalidValue : driver.create(&chunk->real, chunk->size, &chunk->properties, 0);
    if (result == kSuccess) live_bytes += chunk->size;
  }
  if (result == kSuccess) result = driver.map(address, size, offset, chunk != NULL ? chunk->real : handle, flags);
  if (result == kSuccess && chunk != NULL) {
    ++stats.maps;
    if (whole)
      insert(chunk, address);
    else
      chunk->stays = true;
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result unmap(Pointer address, size_t size) {
  pthread_mutex_lock(&mutex);
  size_t place, count;
  Result result = kSuccess;
  if (!find(address, size, &place, &count)) {
    result = driver.unmap(address, size);
  } else {
    ++stats.unmaps;
    if (checks_unmaps && calls.cuStreamQuery != NULL) {
      ++stats.checked_unmaps;
      if (calls.cuStreamQuery(NULL) == kNotReady) ++stats.busy_unmaps;
    }
    if (!any_paused(place, count)) {
      result = driver.unmap(address, size);
    } else {
      for (size_t i = 0; i < count && result == kSuccess; ++i) {
        const Chunk* chunk = mapped_at(place + i);
        if (!chunk->paused) result = driver.unmap(chunk->address, chunk->size);
      }
    }
    if (result == kSuccess) {
      for (size_t i = 0; i < count; ++i) {
        Chunk* chunk = mapped_at(place + i);
        chunk->address = 0;
        chunk->devices = 0;
        chunk->backup = NULL;
        chunk->paused = false;
        if (!chunk->held) drop_chunk(chunk);
      }
      erase(place, count);
    }
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result set_access(Pointer address, size_t size, const Access* access, size_t count) {
  pthread_mutex_lock(&mutex);
  size_t place, found;
  Result result = kSuccess;
  if (!find(address, size, &place, &found)) {
    result = driver.set_access(address, size, access, count);
  } else {
    ++stats.accesses;
    if (!any_paused(place, found)) {
      result = driver.set_access(address, size, access, count);
    } else {
      for (size_t i = 0; i < found && result == kSuccess; ++i) {
        const Chunk* chunk = mapped_at(place + i);
        if (!chunk->paused) result = driver.set_access(chunk->address, chunk->size, access, count);
      }
    }
    for (size_t i = 0; i < found && result == kSuccess; ++i) {
      Chunk* chunk = mapped_at(place + i);
      for (size_t j = 0; j < count; ++j) {
        const int device = access[j].location.id;
        const bool plain = access[j].location.type == kOnDevice && device >= 0 && device < kMostDevices &&
                           (access[j].flags == kReadWrite || access[j].flags == 0);
        if (!plain)
          chunk->stays = true;
        else if (access[j].flags == kReadWrite)
          chunk->devices |= 1ULL << device;
        else
          chunk->devices &= ~(1ULL << device);
      }
    }
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result reserve(Pointer* address, size_t size, size_t alignment, Pointer wanted, Flags flags) {
  const Result result = driver.reserve(address, size, alignment, wanted, flags);
  pthread_mutex_lock(&mutex);
  if (result == kSuccess) ++stats.reserves;
  pthread_mutex_unlock(&mutex);
  return result;
}

// While a chunk of the range is mapped or paused the driver must not get the addresses back.
static Result address_free(Pointer address, size_t size) {
  pthread_mutex_lock(&mutex);
  const Chunk* chunk = mapped_at(place_of(address));
  const bool taken = chunk != NULL && chunk->address < address + size;
  const Result result = taken ? kInvalidValue : driver.address_free(address, size);
  pthread_mutex_unlock(&mutex);
  return result;
}

// The driver's handle, for a call after which another may hold the memory. 0: the chunk is paused.
static Handle lend(Handle handle) {
  Chunk* chunk = chunk_of(handle);
  if (chunk == NULL) return handle;
  if (chunk->real != 0) chunk->stays = true;
  return chunk->real;
}

static Result export_handle(void* file, Handle handle, int type, Flags flags) {
  pthread_mutex_lock(&mutex);
  const Handle lent = lend(handle);
  const Result result = lent == 0 ? kInvalidValue : driver.export_handle(file, lent, type, flags);
  ++stats.exports;
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result retain(Handle* handle, void* address) {
  pthread_mutex_lock(&mutex);
  Chunk* chunk = mapped_at(place_of((Pointer)(uintptr_t)address));
  const bool inside = chunk != NULL && chunk->address <= (Pointer)(uintptr_t)address;
  const Result result = inside && chunk->paused ? kInvalidValue : driver.retain(handle, address);
  if (inside && result == kSuccess) chunk->stays = true;
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result properties_of(Properties* properties, Handle handle) {
  pthread_mutex_lock(&mutex);
  const Chunk* chunk = chunk_of(handle);
  Result result = kSuccess;
  if (chunk == NULL)
    result = driver.properties_of(properties, handle);
  else
    *properties = chunk->properties;
  pthread_mutex_unlock(&mutex);
  return result;
}

static Result bind_multicast(Handle group, size_t offset, Handle handle, size_t from, size_t size, Flags flags) {
  pthread_mutex_lock(&mutex);
  const Handle lent = lend(handle);
  const Result result = lent == 0 ? kInvalidValue : driver.bind(group, offset, lent, from, size, flags);
  pthread_mutex_unlock(&mutex);
  return result;
}

// --- The CUDA runtime's function ---

typedef Result (*Lookup)(const char*, void**, unsigned, Flags, int*);

static const struct {
  const char* name;
  void *own, *real;  // real: where the driver's is kept
} taken[] = {
    {"cuMemCreate", create, &driver.create},
    {"cuMemRelease", release, &driver.release},
    {"cuMemMap", map, &driver.map},
    {"cuMemUnmap", unmap, &driver.unmap},
    {"cuMemSetAccess", set_access, &driver.set_access},
    {"cuMemAddressReserve", reserve, &driver.reserve},
    {"cuMemAddressFree", address_free, &driver.address_free},
    {"cuMemExportToShareableHandle", export_handle, &driver.export_handle},
    {"cuMemRetainAllocationHandle", retain, &driver.retain},
    {"cuMemGetAllocationPropertiesFromHandle", properties_of, &driver.properties_of},
    {"cuMulticastBindMem", bind_multicast, &driver.bind},
};

static int find_runtime(struct dl_phdr_info* info, size_t size, void* found) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libcudart.so") == NULL) return 0;
  snprintf(found, 4096, "%s", info->dlpi_name);
  return 1;
}

// Of the libraries after this one, or of a runtime that Python loaded apart from the others.
static Lookup runtime(void) {
  static const char name[] = "cudaGetDriverEntryPointByVersion";
  void* function = dlsym(RTLD_NEXT, name);
  char path[4096] = "";
  if (function == NULL) dl_iterate_phdr(find_runtime, path);
  void* library = path[0] == 0 ? NULL : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library != NULL) function = dlsym(library, name);
  return (Lookup)function;
}

EXPORT Result cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, Flags flags,
                                               int* status) {
  const Lookup lookup = runtime();
  if (lookup == NULL) return kNotFound;
  const Result result = lookup(symbol, function, version, flags, status);
  if (result != kSuccess || symbol == NULL || function == NULL || *function == NULL) return result;
  pthread_mutex_lock(&mutex);
  for (size_t i = 0; i < COUNT(taken); ++i) {
    if (strcmp(symbol, taken[i].name) != 0) continue;
    if (*(void**)taken[i].real == NULL) ++stats.taken;
    *(void**)taken[i].real = *function;
    *function = taken[i].own;
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

// Finds the functions of `calls`. False if one that is needed is missing.
static bool has_calls(void) {
  static const struct {
    const char* name;
    void* kept;
    bool optional;
  } needed[] = {
#define CALL(name, optional) {#name, &calls.name, optional}
      CALL(cuDevicePrimaryCtxRetain, false),
      CALL(cuCtxPushCurrent, false),
      CALL(cuCtxPopCurrent, false),
      CALL(cuCtxSynchronize, false),
      CALL(cuStreamCreate, false),
      CALL(cuStreamSynchronize, false),
      CALL(cuStreamQuery, true),
      CALL(cuMemHostRegister, false),
      CALL(cuMemHostUnregister, false),
      CALL(cuMemcpyDtoHAsync, false),
      CALL(cuMemcpyHtoDAsync, false),
#undef CALL
  };
  if (calls.cuMemcpyHtoDAsync != NULL) return true;
  const Lookup lookup = runtime();
  for (size_t i = 0; i < COUNT(needed); ++i) {
    void* function = NULL;
    int status = 0;
    if (lookup == NULL || lookup(needed[i].name, &function, 12000, 0, &status) != kSuccess) function = NULL;
    if (function == NULL && !needed[i].optional) return false;
    *(void**)needed[i].kept = function;
  }
  return true;
}

// --- Pause and resume ---

static Result enter(int device) {
  if (device < 0 || device >= kMostDevices || !has_calls() || driver.create == NULL) return kInvalidValue;
  Result result = kSuccess;
  if (contexts[device] == NULL) result = calls.cuDevicePrimaryCtxRetain(&contexts[device], device);
  if (result == kSuccess) result = calls.cuCtxPushCurrent(contexts[device]);
  if (result == kSuccess && streams[device] == NULL) result = calls.cuStreamCreate(&streams[device], 1);
  return result;
}

static void leave(void) {
  void* context = NULL;
  calls.cuCtxPopCurrent(&context);
}

static Result reserve_host(size_t wanted) {
  const size_t page = 2 << 20;
  wanted = (wanted + page - 1) / page * page;
  if (wanted <= host_bytes) return kSuccess;
  if (host != NULL) {
    calls.cuMemHostUnregister(host);
    munmap(host, host_bytes);
    host = NULL;
    host_bytes = 0;
  }
  void* memory = mmap(NULL, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  madvise(memory, wanted, MADV_HUGEPAGE);
  const Result result = calls.cuMemHostRegister(memory, wanted, 1);
  if (result != kSuccess) {
    munmap(memory, wanted);
    return result;
  }
  host = memory;
  host_bytes = wanted;
  return kSuccess;
}

static bool can_pause(const Chunk* chunk, int device) {
  return !chunk->paused && !chunk->stays && chunk->properties.location.id == device;
}

// Whether a chunk has a byte of one of the ranges, which are by address; `at` follows the chunks.
static bool is_kept(const Chunk* chunk, const Range* ranges, size_t count, size_t* at) {
  while (*at < count && ranges[*at].address + ranges[*at].size <= chunk->address) ++*at;
  return *at < count && ranges[*at].address < chunk->address + chunk->size;
}

// Copies what is kept to the host. Sets `backup` of these chunks if and only if it succeeds.
static Result back_up(int device, const Range* ranges, size_t count, Report* report) {
  size_t total = 0, at = 0;
  for (size_t i = 0; i < mapped_count; ++i) {
    const Chunk* chunk = mapped_at(i);
    if (can_pause(chunk, device) && is_kept(chunk, ranges, count, &at)) total += chunk->size;
  }
  double begin = now();
  Result result = reserve_host(total);
  report->host_s = now() - begin;
  begin = now();
  char* to = host;
  at = 0;
  for (size_t i = 0; i < mapped_count && result == kSuccess; ++i) {
    const Chunk* chunk = mapped_at(i);
    if (!can_pause(chunk, device) || !is_kept(chunk, ranges, count, &at)) continue;
    result = calls.cuMemcpyDtoHAsync(to, chunk->address, chunk->size, streams[device]);
    to += chunk->size;
  }
  const Result ended = calls.cuStreamSynchronize(streams[device]);
  if (result == kSuccess) result = ended;
  report->copy_s = now() - begin;
  if (result != kSuccess) return result;
  report->backed_up_bytes = total;
  to = host;
  at = 0;
  for (size_t i = 0; i < mapped_count; ++i) {
    Chunk* chunk = mapped_at(i);
    if (!can_pause(chunk, device) || !is_kept(chunk, ranges, count, &at)) continue;
    chunk->backup = to;
    to += chunk->size;
  }
  return kSuccess;
}

// The end of the run of chunks from a place on that lie side by side, can be accessed by the same devices, and are
// paused or can be paused.
static size_t end_of_run(size_t place, int device, bool paused) {
  size_t end = place;
  for (const Chunk* chunk; (chunk = mapped_at(end)) != NULL; ++end) {
    if (paused ? !chunk->paused || chunk->properties.location.id != device : !can_pause(chunk, device)) break;
    if (end == place) continue;
    const Chunk* before = mapped_at(end - 1);
    if (before->address + before->size != chunk->address || before->devices != chunk->devices) break;
  }
  return end;
}

static size_t bytes_of(size_t place, size_t end) {
  return mapped_at(end - 1)->address + mapped_at(end - 1)->size - mapped_at(place)->address;
}

static Result release_memory(int device, Report* report) {
  const double begin = now();
  Result result = kSuccess;
  for (size_t place = 0, end; place < mapped_count && result == kSuccess; place = end) {
    end = end_of_run(place, device, false);
    if (end == place) {
      const Chunk* chunk = mapped_at(place);
      if (chunk->properties.location.id == device && !chunk->paused) report->staying_bytes += chunk->size;
      ++end;
      continue;
    }
    result = driver.unmap(mapped_at(place)->address, bytes_of(place, end));
    for (size_t i = place; i < end && result == kSuccess; ++i) {
      Chunk* chunk = mapped_at(i);
      result = driver.release(chunk->real);
      chunk->real = 0;
      chunk->paused = true;
      live_bytes -= chunk->size;
      ++report->chunks;
      report->bytes += chunk->size;
    }
  }
  report->unmap_s = now() - begin;
  return result;
}

static bool has_paused(int device) {
  for (size_t i = 0; i < mapped_count; ++i)
    if (mapped_at(i)->paused && mapped_at(i)->properties.location.id == device) return true;
  return false;
}

// Releases the memory of a device's mapped chunks. Chunks with a byte of the ranges, which are by address, keep their
// contents on the host; the others lose them. Returns the driver's code. If it is not 0 and a later pool_resume does
// not help, the driver has failed at unmapping; all earlier failures change nothing.
EXPORT Result pool_pause(int device, const Range* ranges, size_t count, Report* report) {
  *report = (Report){0};
  pthread_mutex_lock(&mutex);
  const double begin = now();
  Result result = enter(device);
  if (result == kSuccess) {
    result = has_paused(device) ? kInvalidValue : calls.cuCtxSynchronize();
    report->work_s = now() - begin;
    if (result == kSuccess) result = back_up(device, ranges, count, report);
    if (result == kSuccess) result = release_memory(device, report);
    leave();
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

// Creates memory for all paused chunks of a device, or for none.
static Result create_memory(int device, Report* report) {
  const double begin = now();
  Result result = kSuccess;
  size_t wanted = 0;
  for (size_t i = 0; i < mapped_count; ++i) {
    const Chunk* chunk = mapped_at(i);
    if (chunk->paused && chunk->properties.location.id == device) wanted += chunk->size;
  }
  if (limit_bytes != 0 && (wanted > limit_bytes || live_bytes > limit_bytes - wanted)) return kOutOfMemory;
  size_t i = 0;
  for (; i < mapped_count; ++i) {
    Chunk* chunk = mapped_at(i);
    if (!chunk->paused || chunk->properties.location.id != device) continue;
    result = driver.create(&chunk->real, chunk->size, &chunk->properties, 0);
    if (result != kSuccess) {
      chunk->real = 0;
      break;
    }
  }
  if (result != kSuccess) {
    while (i-- > 0) {
      Chunk* chunk = mapped_at(i);
      if (!chunk->paused || chunk->properties.location.id != device) continue;
      driver.release(chunk->real);
      chunk->real = 0;
    }
  } else {
    live_bytes += wanted;
  }
  report->create_s = now() - begin;
  return result;
}

static Result map_memory(int device, Report* report) {
  Result result = kSuccess;
  for (size_t place = 0, end; place < mapped_count && result == kSuccess; place = end) {
    end = end_of_run(place, device, true);
    if (end == place) {
      ++end;
      continue;
    }
    double begin = now();
    for (size_t i = place; i < end && result == kSuccess; ++i) {
      const Chunk* chunk = mapped_at(i);
      result = driver.map(chunk->address, chunk->size, 0, chunk->real, 0);
    }
    report->map_s += now() - begin;
    begin = now();
    for (int each = 0; each < kMostDevices && result == kSuccess; ++each) {
      if ((mapped_at(place)->devices >> each & 1) == 0) continue;
      const Access access = {{kOnDevice, each}, kReadWrite};
      result = driver.set_access(mapped_at(place)->address, bytes_of(place, end), &access, 1);
    }
    report->access_s += now() - begin;
  }
  return result;
}

static Result copy_back(int device, Report* report) {
  const double begin = now();
  Result result = kSuccess;
  for (size_t i = 0; i < mapped_count && result == kSuccess; ++i) {
    Chunk* chunk = mapped_at(i);
    if (!chunk->paused || chunk->properties.location.id != device) continue;
    ++report->chunks;
    report->bytes += chunk->size;
    if (chunk->backup == NULL) continue;
    result = calls.cuMemcpyHtoDAsync(chunk->address, chunk->backup, chunk->size, streams[device]);
    report->backed_up_bytes += chunk->size;
  }
  const Result ended = calls.cuStreamSynchronize(streams[device]);
  if (result == kSuccess) result = ended;
  report->copy_s = now() - begin;
  return result;
}

// Brings back the memory of all paused chunks of a device, at their addresses, and what was kept of their contents.
// Returns the driver's code. Out of memory (2) changes nothing; after another failure the process must end.
EXPORT Result pool_resume(int device, Report* report) {
  *report = (Report){0};
  pthread_mutex_lock(&mutex);
  Result result = enter(device);
  if (result == kSuccess) {
    result = create_memory(device, report);
    if (result == kSuccess) result = map_memory(device, report);
    if (result == kSuccess) result = copy_back(device, report);
    for (size_t i = 0; i < mapped_count && result == kSuccess; ++i) {
      Chunk* chunk = mapped_at(i);
      if (!chunk->paused || chunk->properties.location.id != device) continue;
      chunk->paused = false;
      chunk->backup = NULL;
    }
    leave();
  }
  pthread_mutex_unlock(&mutex);
  return result;
}

// Makes cuMemCreate fail for lack of memory beyond so many bytes in the process. 0: no limit.
EXPORT void pool_limit(uint64_t nbytes) {
  pthread_mutex_lock(&mutex);
  limit_bytes = nbytes;
  pthread_mutex_unlock(&mutex);
}

// Whether each cuMemUnmap of torch's asks if the default stream has work. Returns false where the driver cannot tell.
EXPORT bool pool_check(bool wanted) {
  pthread_mutex_lock(&mutex);
  checks_unmaps = wanted;
  const bool can = has_calls() && calls.cuStreamQuery != NULL;
  pthread_mutex_unlock(&mutex);
  return can;
}

EXPORT void pool_stats(Stats* found) {
  pthread_mutex_lock(&mutex);
  *found = stats;
  for (size_t i = 0; i < mapped_count; ++i) {
    const Chunk* chunk = mapped_at(i);
    if (chunk->paused)
      found->paused_bytes += chunk->size;
    else
      found->mapped_bytes += chunk->size;
    if (chunk->stays) found->staying_bytes += chunk->size;
    size_t which = 0;
    while (which + 1 < kMostSizes && found->sizes[which] != 0 && found->sizes[which] != chunk->size) ++which;
    found->sizes[which] = chunk->size;
    ++found->counts[which];
  }
  pthread_mutex_unlock(&mutex);
}
