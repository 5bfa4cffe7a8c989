/* A library that takes memory as NCCL does: by functions of the driver that it keeps in its own data, each once. They
   are looked up by the first call that needs them.

   VARIANT: 0: as NCCL. 1: there is another pointer to cuMemMap. 2: cuMemUnmap is not looked up. 3: memory is taken in
   another way, as with NCCL_CUMEM_ENABLE=0. 4: its calls fail. 5: the linker has put one more pointer to cuMemMap where
   the loader makes memory read-only. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

typedef unsigned long long u64;
typedef struct {
  int type, handle_types, location, id;
  void* win32;
  unsigned char flags[8];
} properties;
typedef struct {
  int location, id, flags;
} access_of;

enum { PINNED = 1, POSIX = 1, DEVICE = 1, HOST_NODE = 3 };

/* As NCCL's globals: not static, so that the compiler keeps them in memory. */
void* before_pointers[5];
int (*pfn_cuMemAddressReserve)(u64*, size_t, size_t, u64, u64);
int (*pfn_cuMemAddressFree)(u64, size_t);
int (*pfn_cuMemCreate)(u64*, size_t, const properties*, u64);
int (*pfn_cuMemRelease)(u64);
int (*pfn_cuMemMap)(u64, size_t, size_t, u64, u64);
int (*pfn_cuMemUnmap)(u64, size_t);
int (*pfn_cuMemSetAccess)(u64, size_t, const access_of*, size_t);
int (*pfn_cuMemRetainAllocationHandle)(u64*, void*);
int (*pfn_cuMemExportToShareableHandle)(void*, u64, int, u64);
int (*pfn_cuMemImportFromShareableHandle)(u64*, void*, int);
void* another_pointer;

#if VARIANT == 5
extern int cuMemMap(u64, size_t, size_t, u64, u64);
int (*const linked_pointer)(u64, size_t, size_t, u64, u64) = cuMemMap;
#endif

static int device = 0;
static size_t page = 2 << 20;

static void load(const char* name, void* function) {
  int (*look_up)(const char*, void**, int, u64, int*) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
  int found;
  look_up(name, function, 12000, 0, &found);
}

static void initialize(void) {
  if (pfn_cuMemCreate != NULL) return;
  load("cuMemAddressReserve", &pfn_cuMemAddressReserve);
  load("cuMemAddressFree", &pfn_cuMemAddressFree);
  load("cuMemCreate", &pfn_cuMemCreate);
  load("cuMemRelease", &pfn_cuMemRelease);
  load("cuMemMap", &pfn_cuMemMap);
  if (VARIANT == 1) load("cuMemMap", &another_pointer);
  if (VARIANT != 2) load("cuMemUnmap", &pfn_cuMemUnmap);
  load("cuMemSetAccess", &pfn_cuMemSetAccess);
  load("cuMemRetainAllocationHandle", &pfn_cuMemRetainAllocationHandle);
  load("cuMemExportToShareableHandle", &pfn_cuMemExportToShareableHandle);
  load("cuMemImportFromShareableHandle", &pfn_cuMemImportFromShareableHandle);
}

int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "other"; }

static properties properties_of(int location, int id) {
  properties found = {PINNED, POSIX, location, id, NULL, {0}};
  return found;
}

static int map(u64* address, u64 handle, size_t size) {
  access_of access = {DEVICE, device, 3};
  int code = pfn_cuMemAddressReserve(address, size, page, 0, 0);
  if (code == 0) code = pfn_cuMemMap(*address, size, 0, handle, 0);
  return code != 0 ? code : pfn_cuMemSetAccess(*address, size, &access, 1);
}

/* NCCL's own memory. */
void fake_device(int number) { device = number; }
int fake_alloc(u64* address, size_t size) {
  properties wanted = properties_of(DEVICE, device);
  u64 handle;
  initialize();
  int code = pfn_cuMemCreate(&handle, size, &wanted, 0);
  return code != 0 ? code : map(address, handle, size);
}
/* As ncclCuMemFree(): a reference beside the first, then both end. */
int fake_free(u64 address, size_t size) {
  u64 handle;
  int code = pfn_cuMemRetainAllocationHandle(&handle, (void*)address);
  if (code == 0) code = pfn_cuMemRelease(handle);
  if (code == 0) code = pfn_cuMemUnmap(address, size);
  if (code == 0) code = pfn_cuMemRelease(handle);
  return code != 0 ? code : pfn_cuMemAddressFree(address, size);
}

/* The steps of memory whose handle is released while it is mapped, or mapped twice. */
int fake_create(u64* handle, size_t size) {
  properties wanted = properties_of(DEVICE, device);
  initialize();
  return pfn_cuMemCreate(handle, size, &wanted, 0);
}
int fake_release(u64 handle) { return pfn_cuMemRelease(handle); }
int fake_map(u64* address, u64 handle, size_t size) { return map(address, handle, size); }
int fake_unmap(u64 address, size_t size) { return pfn_cuMemUnmap(address, size); }
int fake_retain(u64* handle, u64 address) { return pfn_cuMemRetainAllocationHandle(handle, (void*)address); }
int fake_export(int* file, u64 handle) { return pfn_cuMemExportToShareableHandle(file, handle, POSIX, 0); }
int fake_import(u64* handle, size_t file) { return pfn_cuMemImportFromShareableHandle(handle, (void*)file, POSIX); }
int fake_create_on_host(u64* handle) {
  properties wanted = properties_of(HOST_NODE, 0);
  initialize();
  return pfn_cuMemCreate(handle, page, &wanted, 0);
}

/* Memory for callers. */
__attribute__((noinline)) int ncclMemAlloc(void** address, size_t size) {
  properties wanted = properties_of(DEVICE, device);
  u64 handle;
  initialize();
  if (VARIANT == 4) return 5;
  if (VARIANT == 3) return (*address = malloc(size)) == NULL;
  size = (size + page - 1) / page * page;
  int code = pfn_cuMemCreate(&handle, size, &wanted, 0);
  return code != 0 ? code : map((u64*)address, handle, size);
}
int ncclMemFree(void* address) {
  if (VARIANT == 3) {
    free(address);
    return 0;
  }
  return fake_free((u64)address, page);
}
