// torch's pools over regions that no thread uses, which can be ended without Python: the GIL may be held for seconds
// while another process waits for their free segments.
//
// torch frees segments of a pool only after the pool's last reference is gone, and has no C interface for either. So
// this calls methods of torch's allocator object through its table of virtual functions. The places in that table
// differ by version. They are known for the versions that were verified; others are refused, and Python's thread is
// left (memsaver/_caches.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "regions/region.h"

namespace memsaver {

using TorchPoolId = std::pair<unsigned long long, unsigned long long>;  // as torch passes it by value

class TorchPools {
 public:
  // Binds the allocator of the library at this path, which the process has loaded. Later calls return the same result:
  // the reason why it cannot be used; empty: it can.
  std::string bind(const std::string& path, int major, int minor);
  std::string unusable();  // the same; a reason as well before the first bind()

  // A new pool, lent to a thread. `uses`: torch's count of its uses as Python has it. If torch's allocator tells
  // another number, it is not used any more.
  void add(TorchPoolId id, Region& region, int uses);
  bool lend(TorchPoolId id);       // false: the pool was ended, and is not known any more. True for other unknown ids
  void take_back(TorchPoolId id);  // no thread uses it now
  void forget(TorchPoolId id);     // Python ends it

  // While a thread is routed to a pool, torch can end none. route_begins() waits for an end under way.
  void route_begins();
  void route_ends();

  // Ends the pools over active regions of a device that no thread uses, which frees their free segments, and frees
  // segments of earlier ones that have become free. Does nothing during a capture or a route.
  void end_idle(Device& device);

 private:
  struct Methods {  // places in the table
    std::size_t empty_cache = 0, release_pool = 0, use_count = 0;
  };
  enum class Use { lent, idle, ended };
  struct Pool {
    Region* region;
    Use use;
  };
  template <typename Function>
  Function method(std::size_t place) const;
  std::optional<int> uses(TorchPoolId id, const Device& device) const;
  std::vector<TorchPoolId> idle_on(const Device& device);
  void end(TorchPoolId id, const Device& device);

  std::mutex mutex_;  // guards the pools. No other lock is taken under it
  std::map<TorchPoolId, Pool> pools_;
  std::map<Device*, Deadline>
      refused_;  // nothing could end because of a route: until then the next idle pool is wanted
  std::string reason_ = "torch has no pool over a region yet";
  bool is_bound_ = false;

  std::mutex ending_;  // guards the rest; held over calls of torch. Taken before `mutex_`
  std::size_t routes_ = 0;
  Methods methods_;
  void* allocator_ = nullptr;                   // null: unusable
  std::map<TorchPoolId, const Device*> ended_;  // tensors may still have segments of them
};

TorchPools& torch_pools();  // never destroyed, as Core

}  // namespace memsaver
