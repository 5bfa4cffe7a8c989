// Bindings: what memsaver's Python files see of the core, and nothing that users should call themselves.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

#include "attachment.h"
#include "physical.h"
#include "region.h"
#include "residents.h"
#include "torch_hooks.h"
#include "transition.h"
#include "wire.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memsaver {
namespace {

using Unlocked = nb::gil_scoped_release;

// errors.py's make(kind, message, fields): the one place that knows the Python classes. Never freed: errors may be
// raised while the interpreter goes down.
PyObject* make_error = nullptr;

struct RegionRow {
  std::string tag;
  const char* backup;
  const char* state;
  bool frozen;
  std::size_t allocated, mapped, backed_up;
};

nb::list region_rows(const std::string& device) {
  // Read first, make Python objects after: making one may run the garbage collector, which frees arrays, which locks.
  std::vector<RegionRow> rows;
  {
    std::lock_guard lock(core().mutex);
    for (const auto& region : core().regions)
      if (region->device.driver->name == device)
        rows.push_back({region->tag, name_of(region->policy), name_of(region->state), region->frozen,
                        region->allocated_bytes(), region->mapped_bytes(),
                        region->backup ? region->backup->bytes() : 0});
  }
  nb::list found;
  for (const RegionRow& row : rows) {
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

template <typename Processes>
nb::list others(const Processes& processes) {
  nb::list rows;
  for (const auto& [pid, bytes] : processes)
    if (pid != ::getpid()) rows.append(nb::make_tuple(pid, bytes));
  return rows;
}

Device& opened(const std::string& name) {
  Core& all = core();
  std::lock_guard lock(all.mutex);
  return all.device(name);
}

void raise(const char* kind, const std::exception& error, nb::dict fields) {
  nb::object made = nb::borrow(make_error)(kind, error.what(), fields);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

void translate_ours(const std::exception_ptr& thrown) {
  nb::dict fields;
  try {
    std::rethrow_exception(thrown);
  } catch (const BadArgument& error) {
    raise("ValueError", error, fields);
  } catch (const ConfigError& error) {
    raise("ConfigError", error, fields);
  } catch (const BackupError& error) {
    fields["needed_bytes"] = error.needed_bytes;
    fields["held_bytes"] = error.held_bytes;
    fields["available_bytes"] = error.available_bytes;
    raise("BackupError", error, fields);
  } catch (const RegionPausedError& error) {
    fields["tag"] = error.tag;
    fields["state"] = error.state;
    raise("RegionPausedError", error, fields);
  } catch (const DriverError& error) {
    fields["call"] = error.call;
    fields["code"] = error.code;
    fields["detail"] = error.message;
    raise("DriverError", error, fields);
  } catch (const OutOfMemoryError& error) {
    fields["device"] = error.device;
    fields["needed_bytes"] = error.needed_bytes;
    fields["free_bytes"] = error.free_bytes;
    fields["regions"] = region_rows(error.device);
    fields["processes"] = others(error.holders);
    raise("OutOfMemoryError", error, fields);
  } catch (const BrokerError& error) {
    fields["path"] = error.path;
    raise("BrokerError", error, fields);
  } catch (const AttachedError& error) {
    fields["tag"] = error.tag;
    fields["holders"] = error.pids;
    raise("AttachedError", error, fields);
  } catch (const Error& error) {
    raise("Error", error, fields);
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    translate_ours(thrown);
  } catch (nb::python_error& error) {  // such as Ctrl-C, which Python delivers when its code next runs: here
    error.restore();
  }
}

// Threads that a transition or an allocation keeps, from before it lets go of the GIL until it has it back.
std::atomic<std::size_t> under_way = 0;
struct UnderWay {
  UnderWay() { ++under_way; }
  ~UnderWay() { --under_way; }
};

// Memory of a host region as an array that frees its segment when the last view of it goes.
nb::ndarray<std::uint8_t, nb::ndim<1>> allocate_array(Region& region, std::size_t size) {
  std::size_t offset = 0;
  {
    const UnderWay counted;
    Unlocked release;
    std::unique_lock lock(core().mutex);
    offset = region.allocate(size, lock);
  }
  struct Owner {
    Region* region;
    std::size_t offset;
  };
  nb::capsule owner(new Owner{&region, offset}, [](void* data) noexcept {
    const std::unique_ptr<Owner> held(static_cast<Owner*>(data));
    if (!usable()) return;
    // A transition may wait for the GIL while it holds nothing, never while it holds the lock.
    std::lock_guard lock(core().mutex);
    held->region->free(held->offset);
  });
  return {reinterpret_cast<void*>(region.base + offset), {size}, owner};
}

// Drops the copy of a frozen region, whose contents may change then.
void thaw(Region& region) {
  std::shared_ptr<Backup> dropped;
  std::lock_guard lock(core().mutex);
  if (region.state != State::active)
    throw RegionPausedError("region '" + region.tag + "' is " + name_of(region.state) +
                                ": its copy is all there is of its contents, so it cannot thaw",
                            region.tag, name_of(region.state));
  dropped = std::move(region.backup);
}

// A paused region whose backup is being read: no transition takes it meanwhile.
class Reading {
 public:
  Reading(Region& region, Range range) : region_(region) {
    std::lock_guard lock(core().mutex);
    if (region.state != State::paused)
      throw Error("region '" + region.tag + "' is " + name_of(region.state) +
                  ": a backup can be read while its region is paused");
    if (region.backup == nullptr || !region.backup->saved.covers(range))
      throw BackupError("region '" + region.tag + "' has no backup of these " + std::to_string(range.size) + " bytes",
                        range.size, region.backup ? region.backup->bytes() : 0, 0);
    ++region.users;
    backup = region.backup;
  }
  ~Reading() {
    std::lock_guard lock(core().mutex);
    --region_.users;
    core().changed.notify_all();
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::shared_ptr<Backup> backup;

 private:
  const std::lock_guard<std::mutex> one_at_a_time_{core().viewing};
  Region& region_;
};

// The contents where they wait: written to, they arrive with the resume. The memory stays while the array does.
nb::ndarray<std::uint8_t, nb::ndim<1>> backup_view(Region& region, std::size_t offset, std::size_t size) {
  std::shared_ptr<Backup> backup;
  std::byte* data = nullptr;
  {
    Unlocked release;
    const Reading reading(region, {offset, size});
    data = reading.backup->view({offset, size});
    backup = reading.backup;
  }
  nb::capsule owner(new std::shared_ptr<Backup>(std::move(backup)), [](void* held) noexcept {
    if (usable()) delete static_cast<std::shared_ptr<Backup>*>(held);
  });
  return {data, {size}, owner};
}

void backup_read(Region& region, std::size_t offset, std::size_t size, std::uintptr_t to) {
  const Reading reading(region, {offset, size});
  reading.backup->read({offset, size}, reinterpret_cast<std::byte*>(to));
}

std::vector<Region*> all_regions() {
  std::vector<Region*> found;
  std::lock_guard lock(core().mutex);
  for (const auto& region : core().regions) found.push_back(region.get());
  return found;
}

// Guarded launches: true and marked as users when all are active, or the first that is not.
Region* acquire(const std::vector<Region*>& regions) {
  std::lock_guard lock(core().mutex);
  for (Region* region : regions)
    if (region->state != State::active) return region;
  for (Region* region : regions) ++region->users;
  return nullptr;
}

void release(const std::vector<Region*>& regions) {
  Core& all = core();
  std::lock_guard lock(all.mutex);
  for (Region* region : regions) --region->users;
  all.changed.notify_all();
}

// Waits for the devices of the regions and returns what their freed segments held.
void reclaim(const std::vector<Region*>& regions) {
  Core& all = core();
  for (Region* region : regions) {
    std::uint64_t freed = 0;  // what is freed while this waits may have work in flight
    {
      std::lock_guard lock(all.mutex);
      freed = region->frees();
    }
    all.synchronize(region->device);
    std::lock_guard lock(all.mutex);
    if (region->state == State::active) region->reap(freed);
    region->device.source().settle();
  }
}

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

nb::tuple as_tuple(const std::vector<std::pair<std::size_t, std::size_t>>& pairs) {
  nb::list rows;
  for (const auto& [first, second] : pairs) rows.append(nb::make_tuple(first, second));
  return nb::tuple(rows);
}

void bind_region(nb::module_& module) {
  nb::class_<Region>(module, "Region")
      .def_prop_ro("tag", [](const Region& region) { return region.tag; })
      .def_prop_ro("device", [](const Region& region) { return region.device.driver->name; })
      .def_prop_ro("backup", [](const Region& region) { return name_of(region.policy); })
      .def_prop_ro("base", [](const Region& region) { return region.base; })
      .def_prop_ro("span", [](const Region& region) { return region.span; })
      .def_prop_ro("state",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return name_of(region.state);
                   })
      .def_prop_ro("allocated_bytes",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return region.allocated_bytes();
                   })
      .def_prop_ro("mapped_bytes",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return region.mapped_bytes();
                   })
      .def_prop_ro("backup_bytes",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return region.backup ? region.backup->bytes() : 0;
                   })
      .def_prop_ro("chunks",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     std::vector<std::size_t> sizes;
                     for (const Slot& slot : region.slots()) sizes.push_back(slot.size);
                     return sizes;
                   })
      .def_prop_ro("frozen", [](const Region& region) { return region.frozen; })
      .def_prop_ro("fill", [](const Region& region) { return name_of(region.fill); })
      .def_prop_ro("residence",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return region.residence;
                   })
      .def_prop_ro("sealed",
                   [](const Region& region) {
                     std::lock_guard lock(core().mutex);
                     return region.sealed();
                   })
      .def("thaw", &thaw, nb::call_guard<Unlocked>())
      .def("backup_view", &backup_view, "offset"_a, "size"_a)
      .def("backup_read", &backup_read, "offset"_a, "size"_a, "to"_a, nb::call_guard<Unlocked>())
      .def("live",
           [](const Region& region) {
             std::vector<std::pair<std::size_t, std::size_t>> ranges;
             {
               std::lock_guard lock(core().mutex);
               for (const Range& range : region.live()) ranges.emplace_back(range.offset, range.size);
             }
             return as_tuple(ranges);
           })
      .def("hooks",
           [](Region& region) {
             const HookNames names = bind_hooks(region);
             return std::make_pair(names.alloc, names.free);
           })
      .def("allocate_array", &allocate_array, "size"_a);
}

Deadline in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// A transition that reports to Python.
struct ReportingTransition : Transition {
  using Transition::Transition;
  ~ReportingTransition() {
    const Unlocked release;  // what copies may be about to report
    abort();
  }

  Progress::Report report() {
    if (progress.is_none()) return {};
    return [this](std::size_t done, std::size_t total) {
      nb::gil_scoped_acquire python;
      try {
        progress(done, total);
      } catch (nb::python_error&) {
        interrupt = std::current_exception();
      }
    };
  }

  // Drops what was reported to, and what that raised: both may know frames that know this transition, and Python's
  // collector cannot see a cycle that passes here.
  std::exception_ptr forget() {
    progress = nb::none();
    return std::exchange(interrupt, nullptr);
  }

  nb::object progress = nb::none();
  std::exception_ptr interrupt;  // Ctrl-C, delivered as the report's Python code begins
};

void prepare(ReportingTransition& transition, const std::vector<std::string>& policies,
             const std::vector<std::vector<std::pair<std::size_t, std::size_t>>>& live, bool restore, double timeout,
             nb::object progress) {
  std::vector<Transition::Pause> pauses;
  const auto& pausing = transition.pausing();
  if (policies.size() != pausing.size() || live.size() != pausing.size())
    throw BadArgument("one policy and one list of ranges are needed for each region that pauses");
  for (std::size_t i = 0; i < pausing.size(); ++i) {
    Ranges ranges;
    for (const auto& [offset, size] : live[i]) ranges.push_back({offset, size});
    pauses.push_back({pausing[i], policy_of(policies[i]), std::move(ranges)});
  }
  transition.progress = std::move(progress);
  const UnderWay counted;
  const Unlocked release;
  transition.prepare(pauses, restore, in_seconds(timeout), transition.report());
}

nb::dict run(ReportingTransition& transition, double timeout) {
  const UnderWay counted;
  Transition::Outcome outcome;
  std::exception_ptr error;
  {
    const Unlocked release;
    try {
      outcome = transition.run(in_seconds(timeout));
    } catch (...) {
      error = std::current_exception();
    }
  }
  const std::exception_ptr interrupt = transition.forget();
  if (error) std::rethrow_exception(error);
  if (interrupt) std::rethrow_exception(interrupt);
  nb::dict row;
  row["paused"] = nb::cast(outcome.paused, nb::rv_policy::reference);
  row["resumed"] = nb::cast(outcome.resumed, nb::rv_policy::reference);
  row["released_bytes"] = outcome.released_bytes;
  row["restored_bytes"] = outcome.restored_bytes;
  row["copied_bytes"] = outcome.copied_bytes;
  row["seconds"] = outcome.seconds;
  return row;
}

void bind_transition(nb::module_& module) {
  nb::class_<ReportingTransition>(module, "Transition")
      .def(nb::init<std::vector<Region*>, std::vector<Region*>>(), "pause"_a, "resume"_a)
      .def(
          "begin",
          [](ReportingTransition& transition, double timeout) {
            const UnderWay counted;
            const Unlocked release;
            transition.begin(in_seconds(timeout));
          },
          "timeout"_a = 0.0)
      .def(
          "abort", [](ReportingTransition& transition) { transition.abort(); }, nb::call_guard<Unlocked>())
      .def_prop_ro(
          "pausing", [](const ReportingTransition& transition) { return transition.pausing(); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "resuming", [](const ReportingTransition& transition) { return transition.resuming(); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "discarded", [](const ReportingTransition& transition) { return transition.discarded(); },
          nb::rv_policy::reference)
      .def("prepare", &prepare, "policies"_a, "live"_a, "restore"_a, "timeout"_a, "progress"_a.none())
      .def("run", &run, "timeout"_a);
}

struct CopyMark {
  Driver* driver;
  Driver::Ticket ticket;
};

// One driver, bare, for the conformance tests that both drivers pass.
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
}

SharedPool& pool_of(const std::string& device) {
  Device& on = opened(device);
  std::lock_guard lock(core().mutex);
  if (!on.pooled) throw ConfigError("the memory of " + device + " is not in a shared pool: configure(pool='shared')");
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
  return std::make_unique<Attachment>(opened(device), owner, pid, residence, key, in_seconds(timeout));
}

// Memory of the attachment as an array that does not keep it: its user is within the attachment's block.
nb::ndarray<std::uint8_t, nb::ndim<1>> attached_array(const Attachment& attachment, std::size_t offset,
                                                      std::size_t size) {
  const int ordinal = attachment.device().driver->ordinal();
  const nb::capsule nobody(&attachment, [](void*) noexcept {});
  return {reinterpret_cast<void*>(attachment.address_of(offset)),
          {size},
          nobody,
          {},
          nb::dtype<std::uint8_t>(),
          ordinal < 0 ? nb::device::cpu::value : nb::device::cuda::value,
          std::max(ordinal, 0)};
}

// This process as a client of shared pools.
void bind_pool(nb::module_& module) {
  nb::class_<Attachment>(module, "Attachment")
      .def("array", &attached_array, "offset"_a, "size"_a)
      .def("leave", &Attachment::leave, nb::call_guard<Unlocked>());
  module.def(
      "connect", [](const std::string& device, const std::string& path) { any_pool_of(device).join(path); },
      nb::call_guard<Unlocked>(), "device"_a, "path"_a);
  module.def(
      "connected", [](const std::string& device) { return any_pool_of(device).joined(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "set_scrub", [](const std::string& device, bool wanted) { any_pool_of(device).set_scrub(wanted); },
      nb::call_guard<Unlocked>(), "device"_a, "wanted"_a);
  module.def("use_pool", &use_pool, nb::call_guard<Unlocked>(), "device"_a, "wanted"_a);
  module.def(
      "in_pool", [](const std::string& device) { return opened(device).pooled.load(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "pool_client", [](const std::string& device) { return pool_of(device).client(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "pool_status", [](const std::string& device) { return pool_of(device).status(); }, nb::call_guard<Unlocked>(),
      "device"_a);
  module.def(
      "pool_figures",
      [](const std::string& device) {
        const Supply supply = pool_of(device).look();
        std::vector<std::pair<int, std::size_t>> holders;
        for (const Driver::Process& process : supply.holders) holders.emplace_back(process.pid, process.bytes);
        return std::make_pair(supply.free, holders);
      },
      nb::call_guard<Unlocked>(), "device"_a);
  module.def("attach", &attach, nb::call_guard<Unlocked>(), "device"_a, "owner"_a, "pid"_a, "residence"_a, "key"_a,
             "timeout"_a);
  module.def(
      "device_uuid", [](const std::string& device) { return opened(device).driver->uuid(); },
      nb::call_guard<Unlocked>(), "device"_a);
}

// What the broker is made of: memory, and the numbers of the protocol.
void bind_broker(nb::module_& module) {
  nb::class_<PhysicalMemory>(module, "PhysicalMemory")
      .def("uuid", &PhysicalMemory::uuid)
      .def("total_bytes", &PhysicalMemory::total_bytes)
      .def("free_bytes", &PhysicalMemory::free_bytes)
      .def("create", &PhysicalMemory::create, "size"_a)
      .def("adopt", &PhysicalMemory::adopt, "file"_a, "size"_a)
      .def("close", &PhysicalMemory::close, "file"_a);
  module.def("open_cuda_memory", &open_cuda_memory, "ordinal"_a);
  module.def("open_host_memory", [] { return open_host_memory(core().host_bytes()); });
  module.def("cuda_uuid", &cuda_uuid, "ordinal"_a);
  nb::dict kinds, refusals;
#define MEMSAVER_KIND(name, number) kinds[#name] = number;
  MEMSAVER_MESSAGES(MEMSAVER_KIND)
#undef MEMSAVER_KIND
#define MEMSAVER_REFUSAL(name, number) refusals[#name] = number;
  MEMSAVER_REFUSALS(MEMSAVER_REFUSAL)
#undef MEMSAVER_REFUSAL
  module.attr("MESSAGES") = kinds;
  module.attr("REFUSALS") = refusals;
  module.attr("PROTOCOL_VERSION") = wire::kVersion;
  module.attr("LONGEST_PACKET") = wire::kLongestPacket;
  module.attr("MOST_DESCRIPTORS") = wire::kMostDescriptors;
  module.attr("MOST_CHUNKS") = wire::kMostChunks;
  module.attr("HAS_DESCRIPTOR") = wire::kHasDescriptor;
  module.attr("SCRUB") = wire::kScrub;
  nb::list classes;
  for (const std::size_t size : kChunkClasses) classes.append(size);
  module.attr("CHUNK_CLASSES") = nb::tuple(classes);  // bytes, largest first
}

}  // namespace

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // a region entered at exit is no leak, and the library never prints
  module.def("set_error_factory", [](nb::callable factory) { make_error = factory.release().ptr(); });
  nb::register_exception_translator(translate);
  between_looks = [] {
    nb::gil_scoped_acquire python;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  bind_region(module);
  bind_transition(module);
  bind_driver(module);
  bind_pool(module);
  bind_broker(module);

  module.def("cuda_device_count", &cuda_device_count);
  module.def(
      "region",
      [](const std::string& tag, const std::string& device, const std::string& backup, bool frozen,
         const std::string& fill) {
        const Region::Options options{policy_of(backup), frozen, fill_of(fill)};
        Unlocked release;
        std::lock_guard lock(core().mutex);
        return &core().region(tag, device, options);
      },
      nb::rv_policy::reference, "tag"_a, "device"_a, "backup"_a, "frozen"_a = false, "fill"_a = "nothing");
  module.def("regions", &all_regions, nb::rv_policy::reference);
  module.def("acquire", &acquire, nb::rv_policy::reference, "regions"_a);
  module.def("release", &release, "regions"_a);
  module.def("reclaim", &reclaim, nb::call_guard<Unlocked>(), "regions"_a);
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
