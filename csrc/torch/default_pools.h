// Torch's default pools as regions: the pieces of torch's expandable segments are segments of a region, at torch's
// addresses, over chunks of the region's source.
//
// Torch's allocator takes each piece in three calls of the driver: it creates memory, maps it, and gives access. It
// tries again without its cached blocks if there is no memory to create. So memory is taken in the first call, and
// mapped in the second. The handle that torch holds is a number of this file. Other handles and addresses pass through
// to the driver: pieces that torch made earlier or while the region was not active, and memory of other processes.
//
// The functions follow the rules of torch_hooks.cpp: torch calls them with the mutex of its allocator held.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver/taken_calls.h"
#include "regions/region.h"

namespace memsaver {

class DefaultPools final : public TakenCalls {
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
  std::optional<int> allow(Address address, std::size_t size, int ordinal,
                           const std::function<int(Address, std::size_t)>& driver) override;

 private:
  struct Piece {
    Region* region;
    std::size_t size;
    std::vector<Chunk> chunks;  // empty once the piece is mapped
  };

  Region* on(int ordinal);
  std::vector<Region*> all();
  bool knows(Handle handle);
  std::optional<Piece> take(Handle handle);  // for map(): the piece stays known, without its chunks

  std::mutex binding_;
  std::optional<std::string> reason_;
  std::mutex mutex_;                // guards the following; no other lock is taken under it
  std::map<int, Region*> regions_;  // by the ordinal of the device
  std::map<Handle, Piece> pieces_;
  Handle last_ = 0;
};

DefaultPools& default_pools();  // never destroyed, as Core

}  // namespace memsaver
