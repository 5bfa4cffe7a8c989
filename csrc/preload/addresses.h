// A set of addresses: open addressing, a power of two of places, at most half of them taken. The caller locks.
#pragma once

#include <stdbool.h>
#include <stdint.h>

bool addresses_add(uintptr_t address);     // false: there is no memory for the set
bool addresses_remove(uintptr_t address);  // false: it was not in the set
