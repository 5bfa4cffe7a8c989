// torch calls these with its allocator's mutex held, from any thread, sometimes in the middle of a capture, and frees
// even during exit. So: bookkeeping, virtual memory calls, and the broker's answer where memory comes from a shared
// pool (which waits for nobody, and holds no lock of ours); no Python, no exception, and no state of the thread: the
// symbol itself says which region is meant.
#include "torch_hooks.h"

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdio>

namespace memsaver {
namespace {

std::array<std::atomic<Region*>, kHookPairs> bound{};

void* allocate(std::size_t pair, ssize_t size) noexcept {
  Region* region = bound[pair].load();
  if (region == nullptr || size <= 0 || !usable()) return nullptr;
  try {
    std::unique_lock lock(core().mutex);
    return reinterpret_cast<void*>(region->base + region->allocate(static_cast<std::size_t>(size), lock));
  } catch (const std::exception&) {
    return nullptr;  // torch raises its own out-of-memory error
  }
}

void deallocate(std::size_t pair, void* data) noexcept {
  Region* region = bound[pair].load();
  if (region == nullptr || data == nullptr || !usable()) return;
  try {
    const auto address = reinterpret_cast<Address>(data);
    std::lock_guard lock(core().mutex);
    if (region->owns(address)) region->free(address - region->base);
  } catch (const std::exception&) {
    // The segment stays where it is: there is nobody to tell.
  }
}

std::string name(const char* what, std::size_t pair) {
  char text[64];
  std::snprintf(text, sizeof text, "memsaver_%s_%02x", what, static_cast<unsigned>(pair));
  return text;
}

}  // namespace

HookNames bind_hooks(Region& region) {
  std::lock_guard lock(core().mutex);
  for (std::size_t pair = 0; pair < kHookPairs; ++pair) {
    Region* owner = bound[pair].load();
    if (owner == nullptr) bound[pair] = &region;
    if (owner == nullptr || owner == &region) return {name("alloc", pair), name("free", pair)};
  }
  throw ConfigError("region '" + region.tag + "' is one too many: torch can allocate in at most " +
                    std::to_string(kHookPairs) + " regions of a process");
}

}  // namespace memsaver

// A pool that has nothing: what a thread gets that allocates while the region it has entered is paused.
extern "C" __attribute__((visibility("default"))) void* memsaver_alloc_refused(ssize_t, int, void*) { return nullptr; }
extern "C" __attribute__((visibility("default"))) void memsaver_free_refused(void*, ssize_t, int, void*) {}

#define MEMSAVER_PAIR(n)                                                                                      \
  extern "C" __attribute__((visibility("default"))) void* memsaver_alloc_##n(ssize_t size, int, void*) {      \
    return memsaver::allocate(0x##n, size);                                                                   \
  }                                                                                                           \
  extern "C" __attribute__((visibility("default"))) void memsaver_free_##n(void* data, ssize_t, int, void*) { \
    memsaver::deallocate(0x##n, data);                                                                        \
  }
// clang-format off
#define MEMSAVER_ROW(r)                                                                                       \
  MEMSAVER_PAIR(r##0) MEMSAVER_PAIR(r##1) MEMSAVER_PAIR(r##2) MEMSAVER_PAIR(r##3) MEMSAVER_PAIR(r##4)         \
  MEMSAVER_PAIR(r##5) MEMSAVER_PAIR(r##6) MEMSAVER_PAIR(r##7) MEMSAVER_PAIR(r##8) MEMSAVER_PAIR(r##9)         \
  MEMSAVER_PAIR(r##a) MEMSAVER_PAIR(r##b) MEMSAVER_PAIR(r##c) MEMSAVER_PAIR(r##d) MEMSAVER_PAIR(r##e)         \
  MEMSAVER_PAIR(r##f)
// clang-format on
MEMSAVER_ROW(0)
MEMSAVER_ROW(1)
MEMSAVER_ROW(2)
MEMSAVER_ROW(3)
MEMSAVER_ROW(4)
MEMSAVER_ROW(5)
MEMSAVER_ROW(6)
MEMSAVER_ROW(7)
MEMSAVER_ROW(8)
MEMSAVER_ROW(9)
MEMSAVER_ROW(a)
MEMSAVER_ROW(b)
MEMSAVER_ROW(c)
MEMSAVER_ROW(d)
MEMSAVER_ROW(e)
MEMSAVER_ROW(f)
