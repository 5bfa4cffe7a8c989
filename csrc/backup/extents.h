// Free extents of memory or of addresses. Touching extents are joined. Best fit takes logarithmic time.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace memsaver {

struct Extent {
  std::byte* data;
  std::size_t size;
  std::byte* end() const { return data + size; }
};

// Not thread-safe.
class FreeExtents {
 public:
  void put(Extent extent);  // no byte of it is in the set
  // From the smallest extent that holds `bytes`. If there is none: the whole largest extent, or nullopt if `whole`.
  std::optional<Extent> take(std::size_t bytes, bool whole);
  bool take_at(Extent extent);  // takes exactly this range; false if a part of it is not free

 private:
  using ByAddress = std::map<std::byte*, std::size_t>;

  void add(Extent extent);
  ByAddress::iterator erase(ByAddress::iterator entry);

  ByAddress by_address_;
  std::set<std::pair<std::size_t, std::byte*>> by_size_;
};

}  // namespace memsaver
