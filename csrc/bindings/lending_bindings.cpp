// Tensors of regions in other processes: the owner's chunks and leases, and the mapping in the receiver.
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <tuple>

#include "bindings/bindings.h"
#include "regions/lending.h"

namespace memsaver {
namespace {

std::vector<std::tuple<std::size_t, std::size_t, Handle>> lend(Region& region, Address begin, std::size_t size,
                                                               std::uint64_t residence, std::uint64_t lease, int pid) {
  std::vector<std::tuple<std::size_t, std::size_t, Handle>> rows;
  for (const Region::Placed& chunk : lend_chunks(region, {begin, size}, residence, lease, pid))
    rows.emplace_back(chunk.offset, chunk.size, chunk.handle);
  return rows;
}

// Maps chunks at their offsets, and closes no descriptor.
void map_chunks(BorrowedMemory& memory, const std::vector<Slot>& slots, const std::vector<int>& files) {
  if (slots.size() != files.size())
    throw BadArgument(std::to_string(slots.size()) + " chunks came with " + std::to_string(files.size()) +
                      " descriptors, expected as many");
  for (std::size_t at = 0; at < slots.size(); ++at) memory.map(slots[at], files[at]);
}

// An array for torch, which keeps `owner`.
nb::ndarray<std::uint8_t, nb::ndim<1>> array_of(const BorrowedMemory& memory, std::size_t offset, std::size_t size,
                                                nb::handle owner) {
  const int ordinal = memory.device().driver->ordinal();
  return {reinterpret_cast<void*>(memory.address_of(offset)),
          {size},
          owner,
          {},
          nb::dtype<std::uint8_t>(),
          ordinal < 0 ? nb::device::cpu::value : nb::device::cuda::value,
          std::max(ordinal, 0)};
}

}  // namespace

void bind_lending(nb::module_& module) {
  nb::class_<BorrowedMemory>(module, "BorrowedMemory")
      .def("map", &map_chunks, "slots"_a, "files"_a, unlocked)
      .def("allow", &BorrowedMemory::allow, unlocked)
      .def("array", &array_of, "offset"_a, "size"_a, "owner"_a)
      .def("leave", &BorrowedMemory::leave, "idle"_a = false, unlocked);
  module.def(
      "borrow",
      [](const std::string& device, std::size_t first, std::size_t span) {
        return std::make_unique<BorrowedMemory>(opened(device), first, span);
      },
      unlocked, "device"_a, "first"_a, "span"_a);
  module.def("usable", &usable);
  module.def("lend", &lend, unlocked, "region"_a, "begin"_a, "size"_a, "residence"_a, "lease"_a, "pid"_a);
  module.def("end_lease", &end_lease, unlocked, "region"_a, "lease"_a);
  module.def(
      "export_chunk", [](const std::string& device, Handle handle) { return opened(device).driver->export_fd(handle); },
      unlocked, "device"_a, "handle"_a);
}

}  // namespace memsaver
