// This process as a client of shared pools, and its attachments to memory of other processes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings/borrowed_array.h"
#include "driver/physical.h"
#include "pool/sentinel.h"
#include "regions/attachment.h"
#include "regions/residents.h"

namespace memsaver {
namespace {

SharedPool& pool_of(const std::string& device) {
  Device& on = opened(device);
  std::lock_guard lock(core().mutex);
  if (!on.pooled)
    throw ConfigError("the memory of " + device + " is not in a shared pool: configure(pool='shared')", "pool");
  return *on.shared;
}

SharedPool& any_pool_of(const std::string& device) {
  Device& on = opened(device);
  std::lock_guard lock(core().mutex);
  return shared_pool(on);
}

void use_pool(const std::string& device, bool wanted) {
  any_pool_of(device);
  opened(device).pooled = wanted;
}

std::unique_ptr<Attachment> attach(const std::string& device, std::uint64_t owner, int pid, std::uint64_t residence,
                                   const std::string& key, double timeout) {
  any_pool_of(device);
  return std::make_unique<Attachment>(opened(device), owner, pid, residence, key, deadline_in(timeout));
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::class_<Attachment>(module, "Attachment")
      .def(
          "array",
          [](const Attachment& lease, std::size_t offset, std::size_t size, nb::handle owner) {
            return borrowed_array(lease.memory(), offset, size, owner);
          },
          "offset"_a, "size"_a, "owner"_a.none() = nb::none())
      .def("leave", &Attachment::leave, "idle"_a = false, nb::call_guard<Unlocked>());
  module.def(
      "connect", [](const std::string& device, const std::string& path) { any_pool_of(device).join(path); },
      nb::call_guard<Unlocked>(), "device"_a, "path"_a);
  module.def(
      "connected", [](const std::string& device) { return any_pool_of(device).joined(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def("use_pool", &use_pool, nb::call_guard<Unlocked>(), "device"_a, "wanted"_a);
  module.def(
      "in_pool", [](const std::string& device) { return opened(device).pooled.load(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "pool_client", [](const std::string& device) { return any_pool_of(device).client(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "pool_status",
      [](const std::string& device, std::optional<double> timeout_s) {
        SharedPool& pool = pool_of(device);
        if (!timeout_s) return pool.status();
        return pool.status(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*timeout_s)));
      },
      nb::call_guard<Unlocked>(), "device"_a, "timeout_s"_a.none() = nb::none());
  module.def(
      "send_ledger", [](const std::string& device, const std::string& text) { any_pool_of(device).send_ledger(text); },
      nb::call_guard<Unlocked>(), "device"_a, "text"_a);
  module.def(
      "pool_available", [](const std::string& device) { return pool_of(device).look().free; },
      nb::call_guard<Unlocked>(), "device"_a);
  module.def(
      "pool_waits",  // [(bytes, seconds)], [(pid, bytes, unused bytes or None, why)]
      [](const std::string& device) {
        std::pair<std::vector<SharedPool::Wait>, std::vector<SharedPool::Holder>> found;
        {
          const Unlocked release;
          found = pool_of(device).waits();
        }
        const NoCollector no_collector;
        nb::list waits, holders;
        for (const SharedPool::Wait& each : found.first) waits.append(nb::make_tuple(each.bytes, each.seconds));
        for (const SharedPool::Holder& each : found.second)
          holders.append(nb::make_tuple(each.pid, each.bytes, each.unused, each.why));
        return nb::make_tuple(waits, holders);
      },
      "device"_a);
  module.def("attach", &attach, nb::call_guard<Unlocked>(), "device"_a, "owner"_a, "pid"_a, "residence"_a, "key"_a,
             "timeout"_a);
  module.def("open_sentinel", &open_sentinel);
  module.def("exit_descriptors", [] {  // the caller closes them
    std::vector<int> files;
    for (File& file : exit_descriptors()) files.push_back(file.keep());
    return files;
  });
  module.def("add_children", &add_children, "pidfds"_a);
  module.def("set_close_on_fork", &set_close_on_fork, "wanted"_a);
  module.def("same_file", &same_file, "pid"_a, "descriptor"_a, "other_pid"_a, "other_descriptor"_a);
  module.def(
      "under_mps",
      [](const std::string& device) {
        const int ordinal = opened(device).driver->ordinal();
        return ordinal >= 0 && cuda_under_mps(ordinal);
      },
      nb::call_guard<Unlocked>(), "device"_a);
  module.def(
      "device_uuid", [](const std::string& device) { return opened(device).driver->uuid(); },
      nb::call_guard<Unlocked>(), "device"_a);
}

}  // namespace memsaver
