// Torch's default pools as regions: the pieces of torch's expandable segments are segments of a region, at torch's
// addresses, over chunks of the region's source.
//
// Torch's allocator takes each piece in three calls of the driver: it creates memory, maps it, and gives access. It
// tries again without its cached blocks if there is no memory to create. So memory is taken in the first call, and
// mapped in the second. The handle that torch holds is a number of this file. Other handles and addresses pass through
// to the driver: pieces that torch made earlier or while the region was not active, and memory of other processes.
//
// Torch calls these functions with the mutex of its allocator held, from any thread, also during a capture. They use no
// Python. They make calls of the driver, a bounded wait for memory of other processes, and short ones for threads that
// change mappings of the region.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "regions/region.h"

namespace memsaver {

// Releases reserved addresses by the driver, after unreserve() has answered for it. Returns the driver's code.
int unreserve_by_driver(Address address, std::size_t size);

class DefaultPools;
// Intercepts the calls of a library that the process has loaded. `getter`: the symbol of its function that returns the
// address of its table. Returns the reason why the calls cannot be intercepted; empty: they are, for the rest of the
// process. `calls` is never destroyed. Throws DriverError if there is no CUDA driver.
std::string intercept_calls(const std::string& library, const char* getter, DefaultPools& calls);

class DefaultPools {
 public:
  enum Code { kDone = 0, kNoMemory = 2, kNotPermitted = 800, kNoSupport = 801, kUnknownError = 999 };

  // Takes the calls of torch's library at this path. Later calls return the same result: the reason why they cannot be
  // taken; empty: they are.
  std::string bind(const std::string& library);
  // From now on torch's pieces on the region's device are segments of this region, which is placed.
  void add(Region& region);
  Region* on(int ordinal);  // the region of a CUDA device; null: none

  // Calls of torch. Each returns the driver's code for the call, or nullopt: the driver makes the call. They throw
  // nothing, since the caller is C code.
  std::optional<int> create(Handle& made, std::size_t size, int ordinal);
  std::optional<int> release(Handle handle);
  std::optional<int> export_handle(Handle handle);
  std::optional<int> map(Address address, std::size_t size, Handle handle);
  std::optional<int> unmap(Address address, std::size_t size);
  std::optional<int> unreserve(Address address, std::size_t size);
  // Access of the device `ordinal` to a mapped range. `driver`: gives it to a part of the range by the driver.
  std::optional<int> allow(Address address, std::size_t size, int ordinal,
                           const std::function<int(Address, std::size_t)>& driver);

 private:
  struct Piece {
    Region* region;
    std::size_t size;
    std::vector<Chunk> chunks;  // empty once the piece is mapped
  };

  void unreserve_late();  // addresses that were freed while a transition had chunks there
  std::vector<Region*> all();
  bool is_used(Range range);                 // by a chunk or a segment of a region
  std::optional<Piece> take(Handle handle);  // for map(): the piece stays known, without its chunks

  std::mutex binding_;
  std::optional<std::string> reason_;
  std::mutex mutex_;                // guards the following; no other lock is taken under it
  std::map<int, Region*> regions_;  // by the ordinal of the device
  Ranges late_;                     // addresses that torch has freed, with chunks of a transition; not sorted
  std::map<Handle, Piece> pieces_;
  Handle last_ = 0;
};

DefaultPools& default_pools();  // never destroyed, as Core

}  // namespace memsaver
