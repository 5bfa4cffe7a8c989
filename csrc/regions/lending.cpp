#include "regions/lending.h"

#include <unistd.h>

namespace memsaver {

std::vector<Placed> lend_chunks(Region& region, const Ranges& ranges, std::uint64_t residence, std::uint64_t lease,
                                int pid) {
  const std::string name = "region '" + region.tag + "' of process " + std::to_string(::getpid());
  std::lock_guard lock(core().mutex);  // no transition marks the region meanwhile
  if (region.closed()) throw Error(name + " was closed");
  if (region.state() != State::active)
    throw RegionPausedError(name + " is " + name_of(region.state()), region.tag, name_of(region.state()));
  if (region.residence() != residence)
    throw Error(name + " was paused and resumed since the token was made (residence " + std::to_string(residence) +
                ", now " + std::to_string(region.residence()) + "): share again");
  if (region.sealed()) throw Error(name + " is frozen, and a copy of its contents is kept: thaw() it first");
  if (bytes_of(region.parts(ranges)) != bytes_of(ranges))
    throw Error(name + " no longer holds these tensors: share them again");
  std::vector<Placed> placed = region.chunks_under(sorted(ranges));
  std::vector<Handle> handles;
  for (const Placed& chunk : placed) handles.push_back(chunk.handle);
  region.lend(lease, pid, std::move(handles));
  return placed;
}

void end_lease(Region& region, std::uint64_t lease) {
  std::lock_guard lock(core().mutex);
  region.returned(lease);
  core().changed.notify_all();
}

}  // namespace memsaver
