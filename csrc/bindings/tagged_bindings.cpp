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
      .def("all", &TaggedRegions::all, nb::rv_policy::reference, unlocked)
      .def("set_aside", &TaggedRegions::set_aside, unlocked, "regions"_a, "is_aside"_a);
  module.def("tagged_regions", &tagged_regions, nb::rv_policy::reference, "prefix"_a);
}

}  // namespace memsaver
