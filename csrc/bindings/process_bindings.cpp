// The process-wide functions of the core: devices and their figures, options, captures, the exit.
#include <unistd.h>

#include <chrono>
#include <thread>

#include "backup/host_memory.h"
#include "bindings/bindings.h"
#include "pool/queries.h"
#include "torch/torch_hooks.h"

namespace memsaver {

Device& opened(const std::string& name) { return core().device(name); }

namespace {

// A figure of the system; nullopt if the read fails, as on a device with a dead context.
template <typename Read>
auto figure(Read read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<nb::dict> region_rows(const Device& device) {
  std::vector<nb::dict> found;
  for (const Region* region : core().regions_of(device))
    found.push_back(dict_of("tag", region->tag, "backup", region->policy, "state", region->state(), "frozen",
                            region->frozen, "allocated_bytes", region->allocated_bytes(), "mapped_bytes",
                            region->mapped_bytes(), "offered_bytes", region->offered_bytes(), "backup_bytes",
                            region->backup_bytes(), "paused_s", region->paused_s()));
  return found;
}

std::size_t release_host_memory() {
  std::size_t bytes = 0;
  for (Device* device : core().all_devices()) bytes += device->arena.release_idle() + device->files.release_idle();
  return bytes;
}

constexpr auto kEnd = std::chrono::seconds(4);

// The interpreter waits for the threads of background transitions before it calls stop_background(). A wait of such a
// thread may have no bound, for instance behind a kernel that does not end. This call bounds these waits. Waits of
// other threads go on: a program may work in them after its main thread has ended.
void bound_waits() { background_ends = now() + kEnd; }

// Called before the interpreter ends. A thread should not be in a driver call when the driver is unloaded, and a thread
// that needs the GIL after the end of the interpreter goes no further: see gil.h.
void stop_background() {
  if (!usable()) return;
  interpreter_exits = true;
  queries().stop();
  {
    std::lock_guard lock(core().mutex);
    core().changed.notify_all();
  }
  // A thread may be blocked in a driver call behind a kernel that does not end. It is abandoned at the deadline.
  const Deadline deadline = Clock::now() + kEnd;
  while (UnderWay::before_exit > 0 && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (Device* device : core().all_devices()) {
    device->reclaimer.stop(deadline);
    if (device->shared != nullptr) device->shared->stop(deadline);
  }
}

nb::dict device_stats(const std::string& name) {
  Device& device = opened(name);
  std::optional<Driver::Memory> memory;
  std::optional<std::string> uuid;
  {
    const Unlocked release;
    memory = figure([&] { return device.driver->memory(); });
    uuid = figure([&] { return device.driver->uuid(); });
  }
  return dict_of("uuid", uuid, "total_bytes", memory ? std::optional(memory->total) : std::nullopt, "free_bytes",
                 memory ? std::optional(memory->free) : std::nullopt, "retained_bytes", device.source().idle_bytes(),
                 "host_held_bytes", device.arena.held_bytes(), "host_used_bytes", device.arena.used_bytes(),
                 "host_common_bytes", device.arena.common_bytes(), "disk_held_bytes", device.files.held_bytes(),
                 "disk_used_bytes", device.files.used_bytes(), "regions", region_rows(device));
}

// The figures from which memsaver/ledger makes the ledger of a device.
nb::dict ledger_figures(const std::string& name) {
  Device& device = opened(name);
  std::optional<std::size_t> used;
  std::vector<Driver::Holding> holdings;
  std::size_t pooled = 0;
  {
    const Unlocked release;
    if (const auto memory = figure([&] { return device.driver->memory(); })) used = memory->total - memory->free;
    holdings = figure([&] { return device.driver->holdings(); }).value_or(std::vector<Driver::Holding>());
    std::unique_lock lock(core().mutex);
    SharedPool* pool = device.shared.get();
    lock.unlock();
    if (pool != nullptr) {
      pooled = pool->used_bytes();
      // The driver may have begun to list such chunks for this process.
      if (!device.driver->lists_all() && pool->outlives_broker())
        for (Driver::Holding& each : holdings)
          if (each.pid == ::getpid() && each.imported == 0U) each.imported = std::nullopt;
    }
  }
  return dict_of("used_bytes", used, "holdings", holdings, "lists_all", device.driver->lists_all(), "regions",
                 region_rows(device), "retained_bytes", device.retained.idle_bytes(), "host_held_bytes",
                 device.arena.held_bytes(), "pooled_bytes", pooled);
}

}  // namespace

void bind_process(nb::module_& module) {
  between_looks = [] {
    if (TorchAllocation::is_under_way()) return;
    const HeldGil python;
    if (memsaver_check_signals() != 0) throw nb::python_error();
  };
  module.def("cuda_device_count", &cuda_device_count);
  module.def("capture_begins", [] { core().parts.gate.capture_begins(); }, unlocked);
  module.def(
      "capture_ends",
      [] {
        core().parts.gate.capture_ends();
        for (Device* device : core().all_devices()) device->resting.mark();  // of segments freed during the capture
      },
      unlocked);
  module.def(
      "outside_captures",  // calls a function; captures begin after it. False: one is under way, and it was not called
      [](const nb::callable& act) {
        const CaptureGate::Pass pass(core().parts.gate);
        if (!pass) return false;
        act();
        return true;
      },
      "act"_a);
  module.def("capturing", [] { return core().parts.gate.capturing(); });
  module.def("refresh_peers", [] { core().refresh_peers(); }, unlocked);
  module.def("device_stats", &device_stats, "device"_a);
  module.def(
      "wait_idle",
      [](const std::string& device, std::optional<double> timeout) {
        opened(device).wait_idle(timeout ? deadline_in(*timeout) : kNever);
      },
      "device"_a, "timeout"_a.none(), unlocked);
  module.def("ledger_figures", &ledger_figures, "device"_a);
  module.def("stop_queries", [] {
    if (usable()) queries().stop();  // in a forked child another thread may have had the lock
  });
  module.def("next_query", [] { return queries().next(); }, unlocked);
  module.def(
      "caches_returned",
      [](const std::string& device, std::size_t cached, const std::string& why) {
        opened(device).reclaimer.python_is_done(cached, why);
      },
      unlocked, "device"_a, "cached"_a, "why"_a);
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
        RetainBudget& retain = core().parts.retain;
        retain.limit = bytes;
        for (Device* device : core().all_devices()) {
          const std::size_t held = retain.held;  // over all devices, like the limit
          if (held > bytes) device->retained.give_up(held - bytes);
        }
      },
      "bytes"_a);
  module.def(
      "set_host_limit", [](std::optional<std::size_t> bytes) { core().parts.host_budget.set_limit(bytes); },
      "bytes"_a.none());
  module.def("set_memory_timeout", [](double seconds) { core().parts.memory_timeout_s = seconds; }, "seconds"_a);
  module.def(
      "set_disk_dir",
      [](const std::string& directory) {
        std::lock_guard lock(core().mutex);
        core().disk_dir = directory;
      },
      "directory"_a);
  module.def("release_host_memory", &release_host_memory, unlocked);
  module.def(
      "host_memory_left",  // of another process, for `memsaver doctor`
      [](const std::string& process, const std::string& root) { return host_memory_left(false, process, root); },
      "process"_a, "root"_a);
  module.def("bound_waits", &bound_waits);
  module.def("in_background", [] { is_background = true; });  // this thread, from here on
  module.def("stop_background", &stop_background, nb::call_guard<ReleasedGil>());
  module.def(
      "set_host_device",
      [](std::size_t bytes) {
        std::lock_guard lock(core().mutex);
        if (core().devices.contains("cpu") && bytes != core().host_device_bytes)
          throw ConfigError("host_device cannot change to " + std::to_string(bytes) +
                                " bytes after the host device came into use with " +
                                std::to_string(core().host_device_bytes) + " bytes",
                            "host_device");
        core().host_device_bytes = bytes;
      },
      "bytes"_a);
}

}  // namespace memsaver
