// Regions as allocators for torch: a pair of C symbols per region, by which torch's pools reach it.
#pragma once

#include <cstddef>
#include <string>

#include "region.h"

namespace memsaver {

constexpr std::size_t kHookPairs = 256;

struct HookNames {
  std::string alloc;
  std::string free;
};

// Binds a pair to the region, once; later calls give the same. Throws ConfigError when all pairs are bound.
HookNames bind_hooks(Region& region);

}  // namespace memsaver
