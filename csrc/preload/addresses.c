#include "preload/addresses.h"

#include <stddef.h>
#include <stdlib.h>

static uintptr_t* places;
static size_t count, capacity;

static size_t place_of(uintptr_t address) {
  size_t at = (address >> 9) * 0x9E3779B97F4A7C15u & (capacity - 1);
  while (places[at] != 0 && places[at] != address) at = (at + 1) & (capacity - 1);
  return at;
}

bool addresses_add(uintptr_t address) {
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

bool addresses_remove(uintptr_t address) {
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
