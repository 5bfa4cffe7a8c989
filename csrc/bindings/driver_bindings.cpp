// A driver alone, for tests.

#include <optional>

#include "bindings/bindings.h"
#include "driver/driver.h"

namespace memsaver {
namespace {

struct WorkMark {
  Driver* driver;
  Driver::Ticket ticket;
};

void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

template <>
inline constexpr auto fields<Driver::Memory> =
    [](const Driver::Memory& memory) { return std::make_tuple(memory.free, memory.total); };

void bind_driver(nb::module_& module) {
  nb::class_<Driver>(module, "Driver")
      .def_ro("name", &Driver::name)
      .def("uuid", &Driver::uuid)
      .def("memory", &Driver::memory)
      .def("holdings", &Driver::holdings)
      .def("reserve", &Driver::reserve, "size"_a)
      .def("unreserve", &Driver::unreserve, "address"_a, "size"_a)
      .def("create", &Driver::create, "size"_a, "whole"_a = false)
      .def("release", &Driver::release, "handle"_a)
      .def("exports", &Driver::exports)
      .def("export_fd", &Driver::export_fd, "handle"_a)
      .def("import_fd", &Driver::import_fd, "fd"_a, unlocked)
      .def("map", &Driver::map, "address"_a, "size"_a, "handle"_a)
      .def("allow", &Driver::allow, "address"_a, "size"_a)
      .def("unmap", &Driver::unmap, "address"_a, "size"_a)
      .def("synchronize", &Driver::synchronize, unlocked)
      .def("peer_candidates", &Driver::peer_candidates)
      .def("use_peers", &Driver::use_peers, "ordinals"_a, unlocked)
      .def("record",
           [](Driver& driver) -> std::optional<WorkMark> {
             const Driver::Ticket ticket = driver.record();
             if (ticket == nullptr) return std::nullopt;
             return WorkMark{&driver, ticket};
           })
      .def("copy_out", [](Driver& driver, std::uintptr_t host, Address at,
                          std::size_t size) { driver.copy_out(as_pointer(host), at, size); })
      .def("copy_in", [](Driver& driver, Address at, std::uintptr_t host,
                         std::size_t size) { driver.copy_in(at, as_pointer(host), size); })
      .def("fill", &Driver::fill, "address"_a, "size"_a, "byte"_a)
      .def("copy_within", &Driver::copy_within, "to"_a, "source"_a, "size"_a)
      .def("mark",
           [](Driver& driver, const std::string& direction) {
             return WorkMark{&driver, driver.mark(direction == "out" ? Direction::out : Direction::in)};
           })
      .def("host_node", &Driver::host_node)
      .def("pin", [](Driver& driver, std::uintptr_t host, std::size_t size) { driver.pin(as_pointer(host), size); })
      .def("unpin", [](Driver& driver, std::uintptr_t host) { driver.unpin(as_pointer(host)); })
      .def(
          "finish_copies",
          [](Driver& driver) {
            for (const Direction direction : {Direction::out, Direction::in}) driver.finish_copies(direction);
          },
          unlocked);
  nb::class_<WorkMark>(module, "WorkMark")
      .def("done", [](const WorkMark& mark) { return mark.driver->done(mark.ticket); })
      .def("wait", [](const WorkMark& mark) { mark.driver->wait(mark.ticket); }, unlocked);
  module.def(
      "open_driver", [](const std::string& name) -> Driver& { return *opened(name).driver; }, nb::rv_policy::reference,
      "device"_a);

  // For tests.
  module.def(
      "settle",  // frees the memory of freed segments. The caller guarantees that their work has ended
      [] {
        for (Device* each : core().all_devices()) {
          Resting& resting = each->resting;
          // The second returns when a sweep that another thread began has ended.
          while (resting.reap(resting.frees()) || resting.reclaim(now(), resting.given_back())) continue;
        }
      },
      unlocked);
  module.def(
      "forget_loss",  // of contexts that live again. Lost regions stay lost
      [] {
        for (Device* each : core().all_devices()) each->lost = false;
      },
      unlocked);
}

}  // namespace memsaver
