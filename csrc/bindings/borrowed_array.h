// Memory of another process as an array for torch.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "regions/borrowed.h"

namespace memsaver {

using BorrowedArray = nb::ndarray<std::uint8_t, nb::ndim<1>>;

// The array keeps `owner`. With None the caller has to drop the array before the memory is left.
inline BorrowedArray borrowed_array(const BorrowedMemory& memory, std::size_t offset, std::size_t size,
                                    nb::handle owner) {
  const int ordinal = memory.device().driver->ordinal();
  const nb::object kept = owner.is_none() ? nb::object(nb::capsule(&memory, [](void*) noexcept {})) : nb::borrow(owner);
  return {reinterpret_cast<void*>(memory.address_of(offset)),
          {size},
          kept,
          {},
          nb::dtype<std::uint8_t>(),
          ordinal < 0 ? nb::device::cpu::value : nb::device::cuda::value,
          std::max(ordinal, 0)};
}

}  // namespace memsaver
