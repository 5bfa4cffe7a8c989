// Regions as allocators of torch: one entry point for each region, which torch's pools call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "regions/region.h"

namespace memsaver {

constexpr std::size_t kEntryPoints = 4096;

// Addresses of C functions, for torch's pluggable allocator:
//   void* alloc(ssize_t size, int device, void* stream)
//   void free(void* data, ssize_t size, int device, void* stream)
using EntryPoints = std::pair<std::uintptr_t, std::uintptr_t>;

// The error of this thread's last allocation through an entry point, if it failed and torch's own error does not tell
// the reason: a broker that does not answer, a call of the driver. Each error is returned once. Empty: none.
std::string take_allocation_error();

// While it lives, the thread is in an allocation by torch, which holds torch's mutex: its waits must not take the GIL,
// so they do not end on Ctrl-C.
class TorchAllocation : Immovable {
 public:
  TorchAllocation() { is_under_way_ = true; }
  ~TorchAllocation() { is_under_way_ = false; }
  static bool is_under_way() { return is_under_way_; }
  // As Region::allocate(), with the waits of the device. torch frees its cached blocks after a failure and asks again:
  // then the allocation does not wait for memory of others again.
  static Address allocate(Region& region, std::size_t size);

 private:
  static thread_local bool is_under_way_;
};

// Binds an entry point to the region. Later calls return the same one. Throws ConfigError when all are bound.
EntryPoints bind_entry_points(Region& region);
void unbind_entry_points(const Region& region);  // for a region that was closed
// The entry points of a pool that refuses all allocations. A thread gets this pool while the region that it has entered
// is paused.
EntryPoints refusing_entry_points();
// Those of a pool outside of regions, with memory that the driver allocates whole. torch's own pools are not used for
// this: it frees a pool over expandable segments that was dropped while tensors have parts of a segment.
EntryPoints plain_entry_points();

}  // namespace memsaver
