// Regions: their memory, their figures, their backups.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "torch_hooks.h"

namespace memsaver {
namespace {

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

nb::tuple as_tuple(const std::vector<std::pair<std::size_t, std::size_t>>& pairs) {
  nb::list rows;
  for (const auto& [first, second] : pairs) rows.append(nb::make_tuple(first, second));
  return nb::tuple(rows);
}

}  // namespace

void bind_regions(nb::module_& module) {
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
}

}  // namespace memsaver
