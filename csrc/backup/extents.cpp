#include "backup/extents.h"

#include <algorithm>
#include <iterator>

namespace memsaver {

void FreeExtents::add(Extent extent) {
  if (extent.size == 0) return;
  by_address_[extent.data] = extent.size;
  by_size_.emplace(extent.size, extent.data);
}

FreeExtents::ByAddress::iterator FreeExtents::erase(ByAddress::iterator entry) {
  by_size_.erase({entry->second, entry->first});
  return by_address_.erase(entry);
}

void FreeExtents::put(Extent extent) {
  auto next = by_address_.lower_bound(extent.data);
  if (next != by_address_.end() && next->first == extent.end()) {
    extent.size += next->second;
    next = erase(next);
  }
  if (next != by_address_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == extent.data) {
      extent = {before->first, before->second + extent.size};
      erase(before);
    }
  }
  add(extent);
}

std::optional<Extent> FreeExtents::take(std::size_t bytes, bool whole) {
  if (by_size_.empty()) return std::nullopt;
  auto best = by_size_.lower_bound({bytes, nullptr});
  if (best == by_size_.end()) {
    if (whole) return std::nullopt;
    --best;
  }
  const Extent found{best->second, best->first};
  const Extent taken{found.data, std::min(bytes, found.size)};
  erase(by_address_.find(found.data));
  add({taken.end(), found.size - taken.size});
  return taken;
}

bool FreeExtents::take_at(Extent extent) {
  auto entry = by_address_.upper_bound(extent.data);
  if (entry == by_address_.begin()) return false;
  --entry;
  const Extent found{entry->first, entry->second};
  if (found.end() < extent.end()) return false;
  erase(entry);
  add({found.data, static_cast<std::size_t>(extent.data - found.data)});
  add({extent.end(), static_cast<std::size_t>(found.end() - extent.end())});
  return true;
}

}  // namespace memsaver
