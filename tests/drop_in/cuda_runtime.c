// A CUDA runtime that takes memory of the heap. With -DCALLER a library that calls it, with -DPROGRAM a program.
#include <stddef.h>
#include <stdlib.h>

#ifdef CALLER
int cudaMalloc(void** data, size_t size);
int cudaFree(void* data);

int call_malloc(void** data, size_t size) { return cudaMalloc(data, size); }
int call_free(void* data) { return cudaFree(data); }
#elif defined(PROGRAM)
int cudaMalloc(void** data, size_t size);
int seen_mallocs(void);

int main(void) {
  void* data = NULL;
  return !(cudaMalloc(&data, 64) == 0 && seen_mallocs() == 1);
}
#else
static int mallocs, frees;
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
  *current = 0;
  return 0;
}

int cudaMemGetInfo(size_t* available, size_t* total) {
  *available = free_bytes;
  *total = 2u << 30;
  return 0;
}

int seen_mallocs(void) { return mallocs; }
int seen_frees(void) { return frees; }
void set_free(size_t nbytes) { free_bytes = nbytes; }
#endif
