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
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver/intercepted_calls.h"
#include "regions/region.h"

namespace memsaver {

class DefaultPools final : public InterceptedCalls {
 public:
  // Takes the calls of torch's library at this path. Later calls return the same result: the reason why they cannot be
  // taken; empty: they are.
  std::string bind(const std::string& library);
  // From now on torch's pieces on the region's device are segments of this region, which is placed.
  void add(Region& region);
  Region* of(const Device& device);  // null: none

  std::optional<int> create(Handle& made, std::size_t size, int ordinal) override;
  std::optional<int> release(Handle handle) override;
  std::optional<int> export_handle(Handle handle) override;
  std::optional<int> map(Address address, std::size_t size, Handle handle) override;
  std::optional<int> unmap(Address address, std::size_t size) override;
  void reserved(Address address, std::size_t size) override;
  std::optional<int> unreserve(Address address, std::size_t size) override;
  std::optional<int> allow(Address address, std::size_t size, int ordinal,
                           const std::function<int(Address, std::size_t)>& driver) override;

 private:
  struct Piece {
    Region* region;
    std::size_t size;
    std::vector<Chunk> chunks;  // empty once the piece is mapped
  };

  Region* on(int ordinal);
  // Whether a piece may lie in another reservation of addresses than the one before it. Reservations from before bind()
  // are not known.
  bool may_begin_reservation(Address address);
  Region* taking(int ordinal);  // the region that new pieces on a device go to; null: the driver makes them
  void unreserve_late();        // addresses that were freed while a transition had chunks there
  std::vector<Region*> all();
  bool knows(Handle handle);
  std::optional<Piece> take(Handle handle);  // for map(): the piece stays known, without its chunks

  std::mutex binding_;
  std::optional<std::string> reason_;
  std::mutex mutex_;                // guards the following; no other lock is taken under it
  std::map<int, Region*> regions_;  // by the ordinal of the device
  Ranges late_;                     // addresses that torch has freed, with chunks of a transition; not sorted
  std::map<Handle, Piece> pieces_;
  std::map<Address, std::size_t> reservations_;  // of torch, since bind()
  Handle last_ = 0;
};

DefaultPools& default_pools();  // never destroyed, as Core

}  // namespace memsaver
