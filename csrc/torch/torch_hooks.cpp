// torch calls these functions with the mutex of its allocator held, from any thread, also during a capture; it frees
// even during exit. So they use no Python and let no exception out. They make virtual memory calls, wait for the broker
// of a shared pool, and make a bounded wait for freed memory. The entry point determines the region of an allocation; a
// free finds the region by its address. The only state of a thread is the error for its user.
#include "torch/torch_hooks.h"

#include <sys/types.h>

#include <array>
#include <atomic>
#include <string>
#include <utility>

#include "driver/driver.h"
#include "regions/core.h"

namespace memsaver {
namespace {

std::array<std::atomic<Region*>, kEntryPoints> bound_regions{};
std::mutex binding;

thread_local std::string allocation_error;
thread_local Deadline wait_failed = Deadline::min();  // the end of this thread's last wait that found no memory

constexpr auto kSecondTry = std::chrono::seconds(1);  // after the first one, at most

}  // namespace

thread_local bool TorchAllocation::is_under_way_ = false;

Address TorchAllocation::allocate(Region& region, std::size_t size) {
  const TorchAllocation under_way;
  const Deadline shortage = region.device.shortage_deadline();
  const Deadline memory = now() > wait_failed + kSecondTry ? region.device.memory_deadline() : Deadline::min();
  try {
    return region.allocate(size, shortage, memory);
  } catch (const OutOfMemoryError&) {
    if (memory != Deadline::min()) wait_failed = now();
    throw;
  }
}

}  // namespace memsaver

extern "C" {

// Each entry point is a stub that loads its number as a fourth argument and jumps here: thousands of C functions that
// differ in one constant.
__attribute__((visibility("hidden"), used)) void* memsaver_alloc_numbered(ssize_t size, int, void*,
                                                                          std::uint32_t number) {
  using namespace memsaver;
  Region* region = bound_regions[number].load();
  if (region == nullptr || size <= 0 || !usable()) return nullptr;
  // torch raises its own out-of-memory error.
  try {
    allocation_error.clear();
    return reinterpret_cast<void*>(TorchAllocation::allocate(*region, static_cast<std::size_t>(size)));
  } catch (const OutOfMemoryError&) {
    return nullptr;
  } catch (const RegionPausedError&) {
    return nullptr;  // the region's state tells
  } catch (const std::exception& error) {
    try {
      allocation_error =
          "an allocation of " + std::to_string(size) + " bytes in region '" + region->tag + "' failed: " + error.what();
    } catch (const std::exception&) {
      // No host memory for the text.
    }
    return nullptr;
  }
}

__attribute__((visibility("hidden"), used)) void memsaver_free_any(void* data, ssize_t, int, void*) {
  using namespace memsaver;
  if (data == nullptr || !usable()) return;
  try {
    const auto address = reinterpret_cast<Address>(data);
    if (Region* region = core().parts.addresses.at(address)) region->free(address);
  } catch (const std::exception&) {
    // The segment stays: torch's interface has no way to report an error.
  }
}

static void* refuse(ssize_t, int, void*) { return nullptr; }
static void pass_over(void*, ssize_t, int, void*) {}

static void* allocate_plain(ssize_t size, int ordinal, void*) {
  try {
    return reinterpret_cast<void*>(memsaver::allocate_whole(ordinal, static_cast<std::size_t>(size)));
  } catch (const std::exception&) {
    return nullptr;
  }
}

static void free_plain(void* data, ssize_t, int ordinal, void*) {
  if (data == nullptr || !memsaver::usable()) return;
  try {
    memsaver::free_whole(ordinal, reinterpret_cast<memsaver::Address>(data));
  } catch (const std::exception&) {
    // The context is dead, and its memory with it.
  }
}

extern const char memsaver_alloc_stubs[] __attribute__((visibility("hidden")));
}

#if defined(__x86_64__)
asm(R"(
  .pushsection .text
  .balign 16
  .hidden memsaver_alloc_stubs
  .globl memsaver_alloc_stubs
memsaver_alloc_stubs:
  .set memsaver_number, 0
  .rept 16384
  .balign 16
  endbr64
  movl $memsaver_number, %ecx
  jmp memsaver_alloc_numbered
  .set memsaver_number, memsaver_number + 1
  .endr
  .popsection
)");
#elif defined(__aarch64__)
asm(R"(
  .pushsection .text
  .balign 16
  .hidden memsaver_alloc_stubs
  .globl memsaver_alloc_stubs
memsaver_alloc_stubs:
  .set memsaver_number, 0
  .rept 16384
  .balign 16
  hint #34
  movz w3, #memsaver_number
  b memsaver_alloc_numbered
  .set memsaver_number, memsaver_number + 1
  .endr
  .popsection
)");
#else
#error "entry points for torch are written for x86-64 and 64-bit Arm"
#endif

namespace memsaver {

constexpr std::size_t kStubBytes = 16;

EntryPoints bind_entry_points(Region& region) {
  const auto free = reinterpret_cast<std::uintptr_t>(&memsaver_free_any);
  const auto stubs = reinterpret_cast<std::uintptr_t>(&memsaver_alloc_stubs);
  std::lock_guard lock(binding);
  for (std::size_t number = 0; number < kEntryPoints; ++number) {
    Region* owner = bound_regions[number].load();
    if (owner == nullptr) bound_regions[number] = &region;
    if (owner == nullptr || owner == &region) return {stubs + kStubBytes * number, free};
  }
  throw ConfigError("region '" + region.tag + "' is one too many: torch can allocate in at most " +
                    std::to_string(kEntryPoints) + " regions of a process");
}

void unbind_entry_points(const Region& region) {
  std::lock_guard lock(binding);
  for (auto& owner : bound_regions)
    if (owner.load() == &region) owner = nullptr;
}

std::string take_allocation_error() { return std::exchange(allocation_error, {}); }

EntryPoints refusing_entry_points() {
  return {reinterpret_cast<std::uintptr_t>(&refuse), reinterpret_cast<std::uintptr_t>(&pass_over)};
}

EntryPoints plain_entry_points() {
  return {reinterpret_cast<std::uintptr_t>(&allocate_plain), reinterpret_cast<std::uintptr_t>(&free_plain)};
}

}  // namespace memsaver
