// Tensors of regions in other processes: the owner's chunks and leases, and the mapping in the receiver.
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <tuple>

#include "bindings/bindings.h"
#include "regions/lending.h"

namespace memsaver {
namespace {

// Descriptors of lent chunks. The pool is asked if there is one: the driver exports no memory of the broker.
std::vector<int> export_chunks(const std::string& device, const std::vector<Handle>& handles) {
  Device& on = opened(device);
  SharedPool* pool = nullptr;
  {
    std::lock_guard lock(core().mutex);
    pool = on.shared.get();
  }
  std::vector<File> files;
  if (pool != nullptr)
    files = pool->descriptors_of(handles);
  else
    for (const Handle handle : handles) files.emplace_back(on.driver->export_fd(handle));
  std::vector<int> kept;
  kept.reserve(files.size());
  for (File& file : files) kept.push_back(file.keep());
  return kept;
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

template <>
inline constexpr auto fields<Region::Placed> =
    [](const Region::Placed& chunk) { return std::make_tuple(chunk.offset, chunk.size, chunk.handle); };

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
  module.def("lend", &lend_chunks, unlocked, "region"_a, "range"_a, "residence"_a, "lease"_a, "pid"_a);
  module.def("end_lease", &end_lease, unlocked, "region"_a, "lease"_a);
  module.def("export_chunks", &export_chunks, unlocked, "device"_a, "handles"_a);  // the caller closes them
}

}  // namespace memsaver
