// This process as a client of shared pools.

#include "bindings/bindings.h"
#include "driver/physical.h"
#include "pool/link.h"

namespace memsaver {
namespace {

SharedPool& any_pool_of(const std::string& device) {
  Device& on = opened(device);
  std::lock_guard lock(core().mutex);
  return on.shared_pool();
}

SharedPool& pool_of(const std::string& device) {
  if (!opened(device).pooled)
    throw ConfigError("the memory of " + device + " is not in a shared pool: configure(pool='shared')", "pool");
  return any_pool_of(device);
}

void use_pool(const std::string& device, bool wanted) {
  any_pool_of(device);
  opened(device).pooled = wanted;
}

}  // namespace

template <>
inline constexpr auto fields<SharedPool::Holder> =
    [](const SharedPool::Holder& each) { return std::make_tuple(each.pid, each.bytes, each.unused, each.why); };

void bind_pool(nb::module_& module) {
  module.def(
      "connect", [](const std::string& device, const std::string& path) { any_pool_of(device).join(path); }, unlocked,
      "device"_a, "path"_a);
  module.def("connected", [](const std::string& device) { return any_pool_of(device).joined(); }, unlocked, "device"_a);
  module.def("use_pool", &use_pool, unlocked, "device"_a, "wanted"_a);
  module.def("in_pool", [](const std::string& device) { return opened(device).pooled.load(); }, unlocked, "device"_a);
  module.def(
      "pool_status",
      [](const std::string& device, double timeout_s) {
        const std::chrono::duration<double> timeout(timeout_s);
        return pool_of(device).status(std::chrono::duration_cast<Clock::duration>(timeout));
      },
      unlocked, "device"_a, "timeout_s"_a = 10.0);
  module.def(
      "send_report", [](const std::string& device, const std::string& text) { any_pool_of(device).send_report(text); },
      unlocked, "device"_a, "text"_a);
  module.def(
      "pool_available", [](const std::string& device) { return pool_of(device).look().free; }, unlocked, "device"_a);
  module.def(
      "pool_waits",  // [(bytes, seconds)], [(pid, bytes, unused bytes or None, why)]
      [](const std::string& device) { return pool_of(device).waits(); }, unlocked, "device"_a);
  module.def("sentinel", [] { return sentinel().keep(); });  // the caller closes it
  module.def(
      "under_mps",
      [](const std::string& device) {
        const int ordinal = opened(device).driver->ordinal();
        return ordinal >= 0 && cuda_under_mps(ordinal);
      },
      unlocked, "device"_a);
  module.def(
      "device_uuid", [](const std::string& device) { return opened(device).driver->uuid(); }, unlocked, "device"_a);
}

}  // namespace memsaver
