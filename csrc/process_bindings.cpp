// What a process has of the core as a whole: devices and their figures, options, captures, the end.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <thread>

#include "bindings.h"
#include "host_memory.h"

namespace memsaver {

Deadline in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Device& opened(const std::string& name) {
  Core& all = core();
  std::lock_guard lock(all.mutex);
  return all.device(name);
}

nb::list region_rows(const std::string& device) {
  // Read first, make Python objects after: making one may run the garbage collector, which frees arrays, which locks.
  struct Row {
    std::string tag;
    const char* backup;
    const char* state;
    bool frozen;
    std::size_t allocated, mapped, backed_up;
  };
  std::vector<Row> rows;
  {
    std::lock_guard lock(core().mutex);
    for (const auto& region : core().regions)
      if (region->device.driver->name == device)
        rows.push_back({region->tag, name_of(region->policy), name_of(region->state), region->frozen,
                        region->allocated_bytes(), region->mapped_bytes(),
                        region->backup ? region->backup->bytes() : 0});
  }
  nb::list found;
  for (const Row& row : rows) {
    nb::dict entry;
    entry["tag"] = row.tag;
    entry["backup"] = row.backup;
    entry["state"] = row.state;
    entry["frozen"] = row.frozen;
    entry["allocated_bytes"] = row.allocated;
    entry["mapped_bytes"] = row.mapped;
    entry["backup_bytes"] = row.backed_up;
    found.append(entry);
  }
  return found;
}

namespace {

std::vector<Device*> all_devices() {
  std::vector<Device*> found;
  std::lock_guard lock(core().mutex);
  for (const auto& [name, device] : core().devices) found.push_back(device.get());
  return found;
}

std::size_t release_host_memory() {
  std::size_t bytes = 0;
  for (Device* device : all_devices()) bytes += device->arena.release_idle() + device->files.release_idle();
  return bytes;
}

// Before the interpreter goes: a thread in the middle of a driver call must not meet the driver's end, and one that
// wants the GIL after the interpreter's end is torn down where it stands.
void stop_background() {
  if (!usable()) return;
  waiting_is_over = true;
  {
    std::lock_guard lock(core().mutex);
    core().changed.notify_all();
  }
  while (under_way > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (Device* device : all_devices()) {
    device->arena.stop_background();
    if (device->shared != nullptr) device->shared->stop();
  }
}

nb::dict device_stats(const std::string& name) {
  Device& device = opened(name);
  Driver::Memory memory{};
  std::string uuid;
  std::size_t retained = 0, host_held = 0, host_used = 0;
  std::vector<Driver::Process> processes;
  {
    Unlocked release;
    memory = device.driver->memory();
    uuid = device.driver->uuid();
    processes = device.driver->processes();
    retained = device.source().idle_bytes();
    host_held = device.arena.held_bytes();
    host_used = device.arena.used_bytes();
  }
  nb::dict row;
  row["device"] = name;
  row["uuid"] = uuid;
  row["total_bytes"] = memory.total;
  row["free_bytes"] = memory.free;
  row["retained_bytes"] = retained;
  row["host_held_bytes"] = host_held;
  row["host_used_bytes"] = host_used;
  row["disk_held_bytes"] = device.files.held_bytes();
  row["disk_used_bytes"] = device.files.used_bytes();
  row["regions"] = region_rows(name);
  row["processes"] = others(processes);
  return row;
}

}  // namespace

void bind_process(nb::module_& module) {
  between_looks = [] {
    nb::gil_scoped_acquire python;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  module.def("cuda_device_count", &cuda_device_count);
  module.def("capture_begins", [] { core().capture_begins(); }, nb::call_guard<Unlocked>());
  module.def("capture_ends", [] { core().capture_ends(); });
  module.def("capturing", [] {
    std::lock_guard lock(core().mutex);
    return core().capturing();
  });
  module.def("device_stats", &device_stats, "device"_a);
  module.def("device_names", [] {
    std::vector<std::string> names;
    std::lock_guard lock(core().mutex);
    for (const auto& [name, device] : core().devices) names.push_back(name);
    return names;
  });
  module.def("unreleased_bytes", &unreleased_bytes);
  module.def(
      "set_retain",
      [](std::size_t bytes) {
        Unlocked release;
        Core& all = core();
        all.retain.set_limit(bytes);
        std::lock_guard lock(all.mutex);
        for (auto& [name, device] : all.devices) {
          const std::size_t held = all.retain.held();  // over all devices, as the limit is
          if (held > bytes) device->retained.give_up(held - bytes);
        }
      },
      "bytes"_a);
  module.def(
      "set_host_limit", [](std::optional<std::size_t> bytes) { core().host_budget.set_limit(bytes); },
      "bytes"_a.none());
  module.def(
      "set_backup_ahead",
      [](bool on) {
        std::lock_guard lock(core().mutex);
        core().backup_ahead = on;
      },
      "on"_a);
  module.def(
      "set_disk_dir",
      [](const std::string& directory) {
        std::lock_guard lock(core().mutex);
        core().disk_dir = directory;
      },
      "directory"_a);
  module.def("release_host_memory", &release_host_memory, nb::call_guard<Unlocked>());
  module.def("stop_background", &stop_background, nb::call_guard<Unlocked>());
  module.def(
      "host_memory",
      [](const std::string& root) {
        const HostMemory memory = host_memory(root);
        return std::make_pair(memory.available, memory.total);
      },
      "root"_a = "");
  module.def(
      "set_host_device",
      [](std::size_t bytes) {
        std::lock_guard lock(core().mutex);
        if (core().devices.contains("cpu") && bytes != core().host_device_bytes)
          throw ConfigError("host_device cannot change after the host device came into use");
        core().host_device_bytes = bytes;
      },
      "bytes"_a);
}

}  // namespace memsaver
