// A driver alone, for the conformance tests of both drivers. Controls for tests: faults, and the behaviour of a GPU on
// the host device.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>

#include "bindings/bindings.h"
#include "driver/host_driver.h"

namespace memsaver {
namespace {

struct WorkMark {
  Driver* driver;
  Driver::Ticket ticket;
};

void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

struct StreamRead {
  std::shared_ptr<const HostDriver::Found> found;
};

HostDriver& host_driver() { return dynamic_cast<HostDriver&>(*opened("cpu").driver); }

void bind_host_controls(nb::module_& module) {
  using Hold = std::optional<double>;
  module.def("host_stream_create", [] { return host_driver().new_stream(); });
  module.def(
      "host_stream_write",
      [](std::size_t stream, Address address, std::size_t size, unsigned char byte, Hold hold) {
        host_driver().launch_write(stream, address, size, byte, hold);
      },
      "stream"_a, "address"_a, "size"_a, "byte"_a, "hold"_a.none() = nb::none());
  module.def(
      "host_stream_touch",
      [](std::size_t stream, Address address, std::size_t size, Hold hold) {
        host_driver().launch_touch(stream, address, size, hold);
      },
      "stream"_a, "address"_a, "size"_a, "hold"_a.none() = nb::none());
  nb::class_<StreamRead>(module, "StreamRead").def("bytes", [](const StreamRead& read) -> nb::object {
    if (!read.found->there) return nb::none();
    return nb::bytes(read.found->bytes.data(), read.found->bytes.size());
  });
  module.def(
      "host_stream_read",
      [](std::size_t stream, Address address, std::size_t size, Hold hold) {
        return StreamRead{host_driver().launch_read(stream, address, size, hold)};
      },
      "stream"_a, "address"_a, "size"_a, "hold"_a.none() = nb::none());
  module.def(
      "host_stream_release", [](std::size_t stream) { host_driver().release_stream(stream); }, "stream"_a,
      nb::call_guard<Unlocked>());
  module.def("host_stream_release_all", [] { host_driver().release_streams(); }, nb::call_guard<Unlocked>());
  // Returns the memory of freed segments. The caller guarantees that their work has ended: no driver call is made.
  module.def(
      "host_settle",
      [] {
        for (Device* each : core().all_devices())
          if (each->driver->name == "cpu") each->resting.reap(each->resting.frees());
      },
      nb::call_guard<Unlocked>());
  module.def("host_marks_delay", [](double seconds) { host_driver().delay_marks(seconds); }, "seconds"_a);
  module.def("host_copies_delay", [](double seconds) { host_driver().delay_copies(seconds); }, "seconds"_a);
  module.def("host_busy", [](double seconds) { host_driver().keep_busy(seconds); }, "seconds"_a);
  module.def("host_record_supported", [](bool on) { host_driver().support_record(on); }, "on"_a);
  module.def("host_capture_begin", [] { host_driver().begin_capture(); });
  module.def("host_capture_end", [] { return host_driver().end_capture(); });
  module.def("host_kill_context", [] { host_driver().kill_context(); });
  module.def("host_context_lost", [] { return host_driver().context_lost(); });
  module.def(
      "host_reset",
      [] {
        Device* device = nullptr;
        {
          std::lock_guard lock(core().mutex);
          if (const auto found = core().devices.find("cpu"); found != core().devices.end())
            device = found->second.get();
        }
        if (device == nullptr) return;
        host_driver().reset();
        device->lost = false;  // lost regions stay lost
      },
      nb::call_guard<Unlocked>());

  module.def("virtual_clock", &use_virtual_clock, "on"_a);
  module.def("clock_now", [] { return std::chrono::duration<double>(now().time_since_epoch()).count(); });
  module.def(
      "clock_pass",
      [](double seconds) {
        if (!clock_is_virtual() || !(seconds >= 0))
          throw BadArgument("seconds is " + std::to_string(seconds) + ", expected 0 or more, on a virtual clock");
        sleep_for(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
      },
      "seconds"_a);
}

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
      .def("exports", &Driver::exports)
      .def("export_fd", &Driver::export_fd, "handle"_a)
      .def("import_fd", &Driver::import_fd, "fd"_a, "size"_a, nb::call_guard<Unlocked>())
      .def("map", &Driver::map, "address"_a, "size"_a, "handle"_a)
      .def("allow", &Driver::allow, "address"_a, "size"_a)
      .def("unmap", &Driver::unmap, "address"_a, "size"_a)
      .def("synchronize", &Driver::synchronize, nb::call_guard<Unlocked>())
      .def("peer_candidates", &Driver::peer_candidates)
      .def("use_peers", &Driver::use_peers, "ordinals"_a, nb::call_guard<Unlocked>())
      .def("record",
           [](Driver& driver) -> std::optional<WorkMark> {
             const Driver::Ticket ticket = driver.record();
             if (ticket == nullptr) return std::nullopt;
             return WorkMark{&driver, ticket};
           })
      .def(
          "copy_out",
          [](Driver& driver, std::uintptr_t host, Address address, std::size_t size) {
            driver.copy_out(as_pointer(host), address, size);
          },
          "host"_a, "address"_a, "size"_a)
      .def(
          "copy_in",
          [](Driver& driver, Address address, std::uintptr_t host, std::size_t size) {
            driver.copy_in(address, as_pointer(host), size);
          },
          "address"_a, "host"_a, "size"_a)
      .def("fill", &Driver::fill, "address"_a, "size"_a, "byte"_a)
      .def("copy_within", &Driver::copy_within, "to"_a, "source"_a, "size"_a)
      .def(
          "mark",
          [](Driver& driver, const std::string& direction) {
            return WorkMark{&driver, driver.mark(direction == "out" ? Direction::out : Direction::in)};
          },
          "direction"_a)
      .def("host_node", &Driver::host_node)
      .def(
          "pin", [](Driver& driver, std::uintptr_t host, std::size_t size) { driver.pin(as_pointer(host), size); },
          "host"_a, "size"_a)
      .def(
          "unpin", [](Driver& driver, std::uintptr_t host) { driver.unpin(as_pointer(host)); }, "host"_a)
      .def("finish_copies", &Driver::finish_copies, nb::call_guard<Unlocked>());
  nb::class_<WorkMark>(module, "WorkMark")
      .def("done", [](const WorkMark& mark) { return mark.driver->done(mark.ticket); })
      .def("wait", [](const WorkMark& mark) { mark.driver->wait(mark.ticket); }, nb::call_guard<Unlocked>());
  module.def(
      "open_driver", [](const std::string& name) -> Driver& { return *opened(name).driver; }, nb::rv_policy::reference,
      "device"_a);

  // Fault injection, for tests.
  module.def(
      "faults_arm",
      [](std::uint64_t nth, const std::string& kind, const std::string& call) { faults().arm(nth, kind, call); },
      "nth"_a, "kind"_a = "error", "call"_a = "");
  module.def("faults_disarm", [] { faults().disarm(); });
  module.def("faults_calls", [] { return faults().calls(); });
  bind_host_controls(module);
}

}  // namespace memsaver
