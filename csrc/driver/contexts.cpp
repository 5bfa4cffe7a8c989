#include "driver/contexts.h"

#include <algorithm>

namespace memsaver::cuda {
namespace {

AccessDesc access_for(Device device) { return {{kLocationDevice, device}, kAccessReadWrite}; }

std::vector<Device> devices_that_reach(const Api& api, Device device) {
  std::vector<Device> found;
  for (const Device other : all_devices(api)) {
    int can = 0;
    if (other != device) check(api, "cuDeviceCanAccessPeer", api.cuDeviceCanAccessPeer(&can, other, device));
    if (can != 0 && attribute_of(api, other, kAttributeVirtualMemory) != 0) found.push_back(other);
  }
  return found;
}

// Whether any library in the process has made the device's primary context.
bool is_active(const Api& api, Device device) {
  unsigned flags = 0;
  int active = 0;
  check(api, "cuDevicePrimaryCtxGetState", api.cuDevicePrimaryCtxGetState(device, &flags, &active));
  return active != 0;
}

}  // namespace

std::shared_ptr<void> retained_context(const Api& api, Device device) {
  Context context = nullptr;
  check(api, "cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(&context, device));
  return {context, [&api, device](Context) { api.cuDevicePrimaryCtxRelease(device); }};
}

std::shared_ptr<void> new_stream(const Api& api, Context context) {
  const Scope scope(api, context);
  Stream stream = nullptr;
  check(api, "cuStreamCreate", api.cuStreamCreate(&stream, kStreamNonBlocking));
  return {stream, [&api](Stream made) { api.cuStreamDestroy(made); }};
}

// A blocking event: the wait sleeps, so a long transition does not occupy a core.
Mark Events::take(Context context) {
  {
    const std::lock_guard lock(mutex_);
    std::vector<Event>& idle = idle_[context];
    if (!idle.empty()) {
      const Mark mark{context, idle.back()};
      idle.pop_back();
      return mark;
    }
  }
  Event event = nullptr;
  check(api_, "cuEventCreate", api_.cuEventCreate(&event, kEventDisableTiming | kEventBlockingSync));
  return {context, event};
}

void Events::give(const Mark& mark) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    idle_[mark.context].push_back(mark.event);
  } catch (const std::exception&) {
    // No host memory for the note: the event is not used again.
  }
}

Peers::Peers(const Api& api, Device device, Context context)
    : api_(api),
      device_(device),
      reaching_(devices_that_reach(api, device)),
      access_({access_for(device)}),
      contexts_({context}),
      devices_({device}) {}

std::vector<Device> Peers::candidates() const {
  std::vector<Device> found;
  for (const Device device : reaching_)
    if (is_active(api_, device)) found.push_back(device);
  return found;
}

void Peers::use(const std::vector<Device>& devices) {
  std::vector<AccessDesc> access = {access_for(device_)};
  const std::lock_guard one_at_a_time(using_);
  for (const Device device : devices) {
    access.push_back(access_for(device));
    if (std::find(devices_.begin(), devices_.end(), device) != devices_.end()) continue;
    Context context = nullptr;
    check(api_, "cuDevicePrimaryCtxRetain", api_.cuDevicePrimaryCtxRetain(&context, device));
    const std::lock_guard lock(mutex_);
    devices_.push_back(device);
    contexts_.push_back(context);
  }
  const std::lock_guard lock(mutex_);
  access_ = std::move(access);
}

std::vector<AccessDesc> Peers::access() const {
  const std::lock_guard lock(mutex_);
  return access_;
}

std::vector<Context> Peers::contexts() const {
  const std::lock_guard lock(mutex_);
  return contexts_;
}

}  // namespace memsaver::cuda
