// One driver, bare, for the conformance tests that both drivers pass; and faults to order, for tests.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"

namespace memsaver {
namespace {

struct CopyMark {
  Driver* driver;
  Driver::Ticket ticket;
};

}  // namespace

void bind_driver(nb::module_& module) {
  nb::class_<Driver>(module, "Driver")
      .def_prop_ro("name", [](const Driver& driver) { return driver.name; })
      .def("uuid", &Driver::uuid)
      .def("memory",
           [](Driver& driver) {
             const Driver::Memory memory = driver.memory();
             return std::make_pair(memory.free, memory.total);
           })
      .def("processes",
           [](Driver& driver) {
             std::vector<std::pair<int, std::size_t>> rows;
             for (const Driver::Process& process : driver.processes()) rows.emplace_back(process.pid, process.bytes);
             return rows;
           })
      .def("reserve", &Driver::reserve, "size"_a)
      .def("unreserve", &Driver::unreserve, "address"_a, "size"_a)
      .def("create", &Driver::create, "size"_a)
      .def("release", &Driver::release, "handle"_a)
      .def("export_fd", &Driver::export_fd, "handle"_a)
      .def("import_fd", &Driver::import_fd, "fd"_a, "size"_a)
      .def("map", &Driver::map, "address"_a, "size"_a, "handle"_a)
      .def("allow", &Driver::allow, "address"_a, "size"_a)
      .def("unmap", &Driver::unmap, "address"_a, "size"_a)
      .def("synchronize", &Driver::synchronize, nb::call_guard<Unlocked>())
      .def("work_is_done",
           [](Driver& driver) {
             const Driver::Ticket ticket = driver.record();
             return ticket != nullptr && driver.done(ticket);
           })
      .def(
          "copy_out",
          [](Driver& driver, std::uintptr_t host, Address address, std::size_t size) {
            driver.copy_out(reinterpret_cast<void*>(host), address, size);
          },
          "host"_a, "address"_a, "size"_a)
      .def(
          "copy_in",
          [](Driver& driver, Address address, std::uintptr_t host, std::size_t size) {
            driver.copy_in(address, reinterpret_cast<void*>(host), size);
          },
          "address"_a, "host"_a, "size"_a)
      .def("fill", &Driver::fill, "address"_a, "size"_a, "byte"_a)
      .def(
          "mark",
          [](Driver& driver, const std::string& direction) {
            return CopyMark{&driver, driver.mark(direction == "out" ? Direction::out : Direction::in)};
          },
          "direction"_a)
      .def("host_node", &Driver::host_node)
      .def("finish_copies", &Driver::finish_copies, nb::call_guard<Unlocked>());
  nb::class_<CopyMark>(module, "CopyMark")
      .def("done", [](const CopyMark& mark) { return mark.driver->done(mark.ticket); })
      .def("wait", [](const CopyMark& mark) { mark.driver->wait(mark.ticket); }, nb::call_guard<Unlocked>());
  module.def(
      "open_driver", [](const std::string& name) -> Driver& { return *opened(name).driver; }, nb::rv_policy::reference,
      "device"_a);

  // Fault injection, for tests.
  module.def(
      "faults_arm", [](std::uint64_t nth, const std::string& kind) { faults().arm(nth, kind); }, "nth"_a,
      "kind"_a = "error");
  module.def("faults_disarm", [] { faults().disarm(); });
  module.def("faults_calls", [] { return faults().calls(); });
}

}  // namespace memsaver
