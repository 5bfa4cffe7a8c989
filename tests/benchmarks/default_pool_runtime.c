// The part of a CUDA runtime that the default pool's trial needs: looks the driver's functions up by name.
#include <dlfcn.h>
#include <stddef.h>

int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long flags,
                                     int* status) {
  (void)version, (void)flags;
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  *function = library == NULL ? NULL : dlsym(library, symbol);
  if (status != NULL) *status = *function == NULL;
  return *function == NULL ? 500 : 0;
}
