// Regions by the tags of another library.

#include "bindings/bindings.h"
#include "regions/tagged.h"

namespace memsaver {

void bind_tagged(nb::module_& module) {
  nb::class_<TaggedRegions>(module, "TaggedRegions")
      .def(
          "active",
          [](TaggedRegions& tagged, const std::string& tag, const std::string& device, const std::string& backup,
             bool one_handle) {
            const Policy policy = policy_of(backup);
            const Unlocked release;
            return &tagged.active(tag, device, policy, one_handle);
          },
          nb::rv_policy::reference, "tag"_a, "device"_a, "backup"_a, "one_handle"_a = false)
      .def(
          "of",
          [](const TaggedRegions& tagged, const std::string& tag) {
            core();  // throws in a forked child
            return tagged.of(tag);
          },
          nb::rv_policy::reference, unlocked, "tag"_a)
      .def(
          "all",
          [](const TaggedRegions& tagged) {
            core();
            return tagged.all();
          },
          nb::rv_policy::reference, unlocked)
      .def(
          "set_aside",
          [](TaggedRegions& tagged, const std::vector<Region*>& regions, bool is_aside) {
            core();
            tagged.set_aside(regions, is_aside);
          },
          unlocked, "regions"_a, "is_aside"_a);
  module.def("tagged_regions", &tagged_regions, nb::rv_policy::reference, "prefix"_a);
}

}  // namespace memsaver
