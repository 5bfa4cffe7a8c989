// Regions: their memory, their figures, their backups.
#include <nanobind/ndarray.h>

#include "bindings/bindings.h"
#include "regions/eviction.h"
#include "regions/tagged.h"
#include "torch/default_pools.h"
#include "torch/torch_hooks.h"

namespace memsaver {
namespace {

// Memory of a host region as an array. The segment is freed with the last view.
nb::ndarray<std::uint8_t, nb::ndim<1>> allocate_array(Region& region, std::size_t size) {
  Address begin = 0;
  {
    core();  // throws in a forked child
    const Unlocked release;
    begin = region.allocate(size, now() + kShortageWait, region.device.memory_deadline());
  }
  struct Owner {
    Region* region;
    Address begin;
  };
  nb::capsule owner(new Owner{&region, begin}, [](void* data) noexcept {
    const std::unique_ptr<Owner> held(static_cast<Owner*>(data));
    if (usable()) held->region->free(held->begin);
  });
  return {reinterpret_cast<void*>(begin), {size}, owner};
}

// Drops the copy of a frozen region, so that its contents may change.
void thaw(Region& region) {
  std::shared_ptr<Backup> dropped;
  std::lock_guard lock(core().mutex);
  if (region.state() != State::active)
    throw region.wrong_state(region.state(), "its copy has its only contents, so it cannot thaw before a resume");
  dropped = region.replace_backup(nullptr);
}

// Holds a region whose backup is read: transitions wait for the end.
class Reading {
 public:
  Reading(Region& region, Range range) : region_(region) {
    copy_offered(range);
    std::unique_lock lock(core().mutex);
    wait_until(lock, core().changed, kNever, [&] { return !region.evicting(); });
    backup = region.backup();
    // After the death of the context the backup has the only contents, also for a frozen region that was active.
    if (region.state() != State::paused && region.state() != State::lost)
      throw Error("region '" + region.tag + "' is " + name_of(region.state()) +
                  ": its backup can be read only while it is paused");
    if (backup == nullptr || !backup->saved.covers(range))
      throw BackupError("region '" + region.tag + "' has no backup of these " + std::to_string(range.size) +
                            " bytes: pause it with backup='host' or 'disk'",
                        range.size, backup ? backup->bytes() : 0, 0);
    region.begin_use();
  }
  ~Reading() {
    std::lock_guard lock(core().mutex);
    region_.end_use();
    core().changed.notify_all();
  }

  std::shared_ptr<Backup> backup;

 private:
  // Copies offered contents out, of the allocation as a whole: a view needs it in one piece.
  void copy_offered(Range range) {
    const std::shared_ptr<Backup> found = region_.backup();
    if (found == nullptr) return;
    for (const Range& part : found->parts())
      if (part.offset <= range.offset && part.end() >= range.end()) range = part;
    evict_within(region_, range, kNever);
  }

  const std::lock_guard<std::mutex> one_at_a_time_{core().viewing};
  Region& region_;
};

// The contents in the backup. A resume copies changes of this array in. The array keeps the memory.
nb::ndarray<std::uint8_t, nb::ndim<1>> backup_view(Region& region, Address begin, std::size_t size) {
  std::shared_ptr<Backup> backup;
  std::byte* data = nullptr;
  {
    Unlocked release;
    const Reading reading(region, {begin, size});
    data = reading.backup->view({begin, size});
    backup = reading.backup;
  }
  nb::capsule owner(new std::shared_ptr<Backup>(std::move(backup)), [](void* held) noexcept {
    if (usable()) delete static_cast<std::shared_ptr<Backup>*>(held);
  });
  return {data, {size}, owner};
}

void backup_read(Region& region, Address begin, std::size_t size, std::uintptr_t to) {
  const Reading reading(region, {begin, size});
  reading.backup->read({begin, size}, reinterpret_cast<std::byte*>(to));
}

// For guarded launches. Null: all regions are active and marked as in use. Else the first region that is not active.
Region* acquire(const std::vector<Region*>& regions) {
  core().refresh_peers();
  std::lock_guard lock(core().mutex);
  for (Region* region : regions)
    if (region->state() != State::active || region->closed()) return region;
  for (Region* region : regions) region->begin_use();
  return nullptr;
}

void release(const std::vector<Region*>& regions) {
  Core& all = core();
  std::lock_guard lock(all.mutex);
  for (Region* region : regions) region->end_use();
  all.changed.notify_all();
}

void check_unused(Region& region) {
  core();  // throws in a forked child
  std::unique_lock lock(core().mutex);
  const NoCopiesAhead still(region, lock);
  if (!region.closed()) region.check_unused();
}

// Waits for work on freed segments, and returns chunks that no segment uses.
void release_unused(Region& region, std::optional<double> timeout) {
  core();  // throws in a forked child
  if (region.device.lost || region.closed()) return;
  const std::uint64_t freed = region.device.resting.frees();
  region.device.wait_idle(timeout ? deadline_in(*timeout) : kNever);
  region.device.resting.reap(freed);
  region.sweep_all();  // also those that the driver refused to unmap before
  {
    const Region::Remapping last(region);  // a thread that is unmapping chunks meanwhile ends first
  }
  region.device.source().settle();
}

// `keep_entry_points`: a pool of torch that the program keeps refers to them. They stay those of the closed region,
// which refuses all allocations.
void close_region(Region& region, bool keep_entry_points) {
  core().close(region);
  if (!keep_entry_points) unbind_entry_points(region);
}

}  // namespace

// Calls a member function of a region. Throws in a forked child.
template <auto look>
auto looked(const Region& region) {
  core();
  return (region.*look)();
}

// Of the parts that backup_view() takes whole.
Ranges backup_parts(const Region& region) {
  core();
  const std::shared_ptr<Backup> backup = region.backup();
  return backup ? backup->parts() : Ranges();
}

std::vector<std::size_t> chunk_sizes(const Region& region) {
  core();
  std::vector<std::size_t> sizes;
  for (const Slot& slot : region.slots()) sizes.push_back(slot.size);
  return sizes;
}

// Each segment in use, or its parts within ranges.
Ranges segments(const Region& region, const std::optional<Ranges>& within) {
  core();
  return region.parts(within ? *within : region.live());
}

Region* make_region(const std::string& tag, const std::string& device, Policy backup, bool frozen, Fill fill,
                    bool one_handle) {
  return &core().region(tag, device, {.policy = backup, .frozen = frozen, .fill = fill, .one_handle = one_handle});
}

// The region of torch's default pool on a CUDA device, which is made at the first call.
Region* default_pool(const std::string& tag, const std::string& device, Policy backup) {
  if (Region* known = default_pool_on(core().device(device).driver->ordinal())) return known;
  Region& made = core().region(tag, device, {.policy = backup, .most_slack = 0, .placed = true});
  if (!made.placed) throw BadArgument("region '" + tag + "' on " + device + " exists, expected a new tag");
  add_default_pool(made);
  return &made;
}

// Tag, device, mapped bytes and offered bytes of each region.
std::vector<std::tuple<std::string, std::string, std::size_t, std::size_t>> region_memory() {
  std::vector<std::tuple<std::string, std::string, std::size_t, std::size_t>> found;
  for (const Region* region : core().all_regions())
    found.emplace_back(region->tag, region->device.driver->name, region->mapped_bytes(), region->offered_bytes());
  return found;
}

void bind_regions(nb::module_& module) {
  // Reads of figures take Device::mutex, which is held for bookkeeping alone.
  nb::class_<Region>(module, "Region")
      .def_ro("tag", &Region::tag)
      .def_prop_ro("device", [](const Region& region) { return region.device.driver->name; })
      .def_ro("backup", &Region::policy)
      .def_ro("frozen", &Region::frozen)
      .def_ro("one_handle", &Region::one_handle)
      .def_ro("fill", &Region::fill)
      .def_ro("placed", &Region::placed)
      .def_prop_ro("state", &looked<&Region::state>)
      .def_prop_ro("closed", &looked<&Region::closed>)
      .def_prop_ro("allocated_bytes", &looked<&Region::allocated_bytes>)
      .def_prop_ro("mapped_bytes", &looked<&Region::mapped_bytes>)
      .def_prop_ro("offered_bytes", &looked<&Region::offered_bytes>)
      .def_prop_ro("residence", &looked<&Region::residence>)
      .def_prop_ro("sealed", &looked<&Region::sealed>)
      .def_prop_ro("discarded", &looked<&Region::discarded>)
      .def_prop_ro("backup_bytes", &looked<&Region::backup_bytes>)
      .def_prop_ro("keeps_contents", &looked<&Region::keeps_contents>)
      .def_prop_ro("chunks", &chunk_sizes)
      .def("owns", &Region::owns, "address"_a)
      .def("thaw", &thaw, unlocked)
      .def("check_unused", &check_unused, unlocked)
      .def("release_unused", &release_unused, "timeout"_a.none(), unlocked)
      .def("close", &close_region, unlocked, "keep_entry_points"_a = false)
      .def("backup_parts", &backup_parts)
      .def("backup_view", &backup_view, "address"_a, "size"_a)
      .def("backup_read", &backup_read, "address"_a, "size"_a, "to"_a, unlocked)
      .def("live", &looked<&Region::live>)  // segments in use, touching ones joined
      .def("segments", &segments, "within"_a.none() = nb::none())
      .def("entry_points", &bind_entry_points)
      .def("allocate_array", &allocate_array, "size"_a);
  module.def("region", &make_region, unlocked, nb::rv_policy::reference, "tag"_a, "device"_a, "backup"_a,
             "frozen"_a = false, "fill"_a = Fill::clean, "one_handle"_a = false);
  module.def("bind_default_pools", &bind_default_pools, "library"_a, unlocked);
  module.def("default_pool", &default_pool, unlocked, nb::rv_policy::reference, "tag"_a, "device"_a, "backup"_a);
  module.def("region_memory", &region_memory);
  module.def("region_count", [] { return core().region_count(); });
  module.def("regions", [] { return core().all_regions(); }, nb::rv_policy::reference);
  module.def(
      "region_at", [](Address address) { return core().parts.addresses.at(address); }, nb::rv_policy::reference,
      "address"_a);
  module.def("refusing_entry_points", &refusing_entry_points);
  module.def("plain_entry_points", &plain_entry_points);
  module.def("take_allocation_error", &take_allocation_error);
  nb::class_<TaggedRegions>(module, "TaggedRegions")
      .def("active", &TaggedRegions::active, unlocked, nb::rv_policy::reference, "tag"_a, "device"_a, "backup"_a,
           "one_handle"_a = false)
      .def("all", &TaggedRegions::all, nb::rv_policy::reference, unlocked)
      .def("set_aside", &TaggedRegions::set_aside, unlocked, "regions"_a, "is_aside"_a);
  module.def("tagged_regions", &tagged_regions, nb::rv_policy::reference, "prefix"_a);
  module.def("acquire", &acquire, unlocked, nb::rv_policy::reference, "regions"_a);
  module.def("release", &release, "regions"_a);
}

}  // namespace memsaver
