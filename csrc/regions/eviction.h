// Takes chunks that lazy pauses offer, for a demand that lacks memory. Contents are copied out first, and a chunk
// returns to its source as soon as its copy has arrived. A chunk whose contents cannot be copied stays offered.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "regions/region.h"

namespace memsaver {

// Chunks that suffice, or all: the largest that is at most the rest, again and again, and at last the smallest. Without
// any of them the others would not suffice.
std::vector<Slot> enough_of(std::vector<Slot> chunks, std::size_t bytes);

// `some`: memory has returned, and the demand asks its source again. `busy`: none has, and a reader, a capture or the
// beginning of a transition is in the way. Of copy_ahead(): whether contents were copied; other copies are in the way
// too.
enum class Evicted { none, some, busy };

// Evicts up to `bytes`, and at most one chunk more for each region, from the regions of a device but those that
// `spares` names. Of chunks that are given without a copy it evicts a share of all offers, if that is more. One thread
// does this at a time: another one waits for its end, up to the deadline, and then returns `some`; `busy` if that
// thread looks for longer than kShortageWait. `looks`: calls WaitsEndWith::look(). Called without a lock of the
// library.
Evicted evict(Device& device, std::size_t bytes, const std::function<bool(const Region&)>& spares, Deadline deadline,
              bool looks);

// Evicts what an allocation of `needed` bytes lacks. None in a shared pool, whose broker asks for offered chunks by
// itself.
Evicted evict_for(Device& device, std::size_t needed);

constexpr auto kNextWait = std::chrono::milliseconds(10);  // between two tries of an allocation

// Copies a batch of contents ahead of a demand, unless a demand or a transfer copies, or a transition has the region.
// The chunks stay offered. The copies of a region end when none are left, or one has failed.
Evicted copy_ahead(Device& device);

// No copy ahead of a demand runs in a region while this lives. They go on afterwards, unless the region is closed.
class NoCopiesAhead : Immovable {
 public:
  // Core::mutex is held. Waits for an eviction and for a copy that is under way.
  NoCopiesAhead(Region& region, std::unique_lock<std::mutex>& lock);
  ~NoCopiesAhead();

 private:
  explicit NoCopiesAhead(Region& region);  // complete before the wait, which may throw

  Region& region_;
  const bool copied_;
};

struct Given {
  std::size_t bytes = 0;               // of the chunks that returned to their source
  std::size_t copied = 0;              // contents
  std::exception_ptr error = nullptr;  // why the rest stays
  bool late = false;                   // the deadline has passed, and some are still offered
};

// Evicts the chunks of a paused region that overlap a range. Throws the error of a copy, and Error during a capture. At
// least one batch is copied.
Given evict_within(Region& region, Range range, Deadline deadline);

}  // namespace memsaver
