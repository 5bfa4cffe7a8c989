// A CUDA runtime that takes memory of the heap, and a program's calls of it: with -DCALLER the library that calls.
#include <stddef.h>
#include <stdlib.h>

#ifdef CALLER
int cudaMalloc(void** data, size_t size);
int cudaFree(void* data);

int call_malloc(void** data, size_t size) { return cudaMalloc(data, size); }
int call_free(void* data) { return cudaFree(data); }
#else
static int mallocs, frees, device;
static size_t free_bytes = 1 << 30;

int cudaMalloc(void** data, size_t size) {
  ++mallocs;
  *data = malloc(size);
  return *data == NULL ? 2 : 0;
}

int cudaFree(void* data) {
  ++frees;
  free(data);
  return 0;
}

int cudaGetDevice(int* current) {
  *current = device;
  return 0;
}

int cudaMemGetInfo(size_t* available, size_t* total) {
  *available = free_bytes;
  *total = 2u << 30;
  return 0;
}

int cudaGetLastError(void) { return 77; }

int cudaHostGetFlags(unsigned* flags, void* data) {
  *flags = data != NULL;
  return 0;
}

int seen_mallocs(void) { return mallocs; }
int seen_frees(void) { return frees; }
void set_device(int number) { device = number; }
void set_free(size_t nbytes) { free_bytes = nbytes; }
#endif
