// The core's part of the broker: memory, and the numbers of the protocol and of reports.
#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings.h"
#include "driver/physical.h"
#include "host/calls.h"
#include "pool/wire.h"

namespace memsaver {

void bind_broker(nb::module_& module) {
  nb::class_<PhysicalMemory>(module, "PhysicalMemory")
      .def("uuid", &PhysicalMemory::uuid)
      .def("total_bytes", &PhysicalMemory::total_bytes)
      .def("free_bytes", &PhysicalMemory::free_bytes)
      .def("create", &PhysicalMemory::create, "size"_a)
      .def("close", &PhysicalMemory::close, "file"_a)
      .def("compute_pids", &PhysicalMemory::compute_pids)
      .def("holdings", &PhysicalMemory::holdings)
      .def("lists_all", &PhysicalMemory::lists_all)
      .def("used_bytes", &PhysicalMemory::used_bytes)
      .def("under_mps", &PhysicalMemory::under_mps);
  module.def("open_cuda_memory", &open_cuda_memory, "ordinal"_a);
  module.def("open_host_memory",
             [] { return std::make_unique<PhysicalMemory>(host::platform(), host::open(core().host_bytes()), "cpu"); });
  module.def("cuda_uuid", &cuda_uuid, "ordinal"_a);
  module.def("cuda_version", &cuda_version);
  module.def("gpu_facts", [] {
    std::vector<nb::dict> found;
    for (const GpuFacts& each : gpu_facts())
      found.push_back(dict_of("name", each.name, "virtual_memory", each.virtual_memory, "posix", each.posix, "fabric",
                              each.fabric, "mps", each.mps));
    return found;
  });
  const auto all_of = [](const auto& array) {
    return std::apply([](const auto&... each) { return nb::make_tuple(each...); }, array);
  };
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
  module.attr("UNKNOWN_BYTES") = wire::kUnknown;
  module.attr("HAS_DESCRIPTOR") = wire::kHasDescriptor;
  module.attr("FOREIGN") = wire::kForeign;
  module.attr("CHUNK_CLASSES") = all_of(kChunkClasses);  // bytes, largest first
  module.attr("BACKUPS") = all_of(kPolicyNames);
  module.attr("FILLS") = all_of(kFillNames);
}

}  // namespace memsaver
