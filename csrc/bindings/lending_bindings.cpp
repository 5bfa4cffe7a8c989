// Leases between processes without a broker: the owner's chunks, and their mapping in the receiver.
#include <nanobind/stl/unique_ptr.h>

#include <tuple>

#include "bindings/borrowed_array.h"
#include "regions/lending.h"

namespace memsaver {
namespace {

std::vector<std::tuple<std::size_t, std::size_t, Handle>> lend(Region& region, const Ranges& ranges,
                                                               std::uint64_t residence, std::uint64_t lease, int pid) {
  std::vector<std::tuple<std::size_t, std::size_t, Handle>> rows;
  for (const Placed& chunk : lend_chunks(region, ranges, residence, lease, pid))
    rows.emplace_back(chunk.offset, chunk.size, chunk.handle);
  return rows;
}

// The chunks under the ranges: those of the shared pool, and all.
std::pair<std::size_t, std::size_t> pooled_chunks(Region& region, const Ranges& ranges) {
  core();  // throws in a forked child
  const std::vector<Placed> placed = region.chunks_under(sorted(ranges));
  std::size_t pooled = 0;
  if (SharedPool* pool = region.device.shared.get())
    for (const Placed& chunk : placed) pooled += pool->lends(chunk.handle) ? 1 : 0;
  return {pooled, placed.size()};
}

// Maps chunks at their offsets, and closes no descriptor.
void map_chunks(BorrowedMemory& memory, const std::vector<Slot>& slots, const std::vector<int>& files) {
  if (slots.size() != files.size())
    throw BadArgument(std::to_string(slots.size()) + " chunks came with " + std::to_string(files.size()) +
                      " descriptors, expected as many");
  for (std::size_t at = 0; at < slots.size(); ++at) memory.map(slots[at], files[at]);
}

}  // namespace

void bind_lending(nb::module_& module) {
  nb::class_<BorrowedMemory>(module, "BorrowedMemory")
      .def("map", &map_chunks, "slots"_a, "files"_a, unlocked)
      .def("allow", &BorrowedMemory::allow, unlocked)
      .def("array", &borrowed_array, "offset"_a, "size"_a, "owner"_a.none() = nb::none())
      .def("leave", &BorrowedMemory::leave, "idle"_a = false, unlocked);
  module.def(
      "borrow",
      [](const std::string& device, std::size_t first, std::size_t span) {
        return std::make_unique<BorrowedMemory>(opened(device), first, span);
      },
      unlocked, "device"_a, "first"_a, "span"_a);
  module.def("usable", &usable);
  module.def("lend", &lend, unlocked, "region"_a, "ranges"_a, "residence"_a, "lease"_a, "pid"_a);
  module.def("end_lease", &end_lease, unlocked, "region"_a, "lease"_a);
  module.def("pooled_chunks", &pooled_chunks, unlocked, "region"_a, "ranges"_a);
  module.def(
      "export_chunk", [](const std::string& device, Handle handle) { return opened(device).driver->export_fd(handle); },
      unlocked, "device"_a, "handle"_a);
}

}  // namespace memsaver
