#include "driver/contexts.h"

#include <algorithm>

#include "base/errors.h"

namespace memsaver::cuda {
namespace {

bool contains(const std::vector<Device>& devices, Device device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

AccessDesc access_for(Device device) { return {{kLocationDevice, device}, kAccessReadWrite}; }

// Other devices that can reach memory of this one. One driver call for each device; the result never changes.
std::vector<Device> devices_that_reach(const Api& api, Device device) {
  int count = 0;
  check(api, "cuDeviceGetCount", api.cuDeviceGetCount(&count));
  std::vector<Device> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device other = 0;
    check(api, "cuDeviceGet", api.cuDeviceGet(&other, ordinal));
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

Peers::Peers(const Api& api, Device device, Context context)
    : api_(api), device_(device), access_({access_for(device)}), devices_({device}), contexts_({context}) {}

const std::vector<Device>& Peers::reaching() {
  std::call_once(asked_, [this] { reaching_ = devices_that_reach(api_, device_); });
  return reaching_;
}

std::vector<Device> Peers::candidates() {
  std::vector<Device> found;
  for (const Device device : reaching())
    if (is_active(api_, device)) found.push_back(device);
  return found;
}

void Peers::use(const std::vector<int>& ordinals) {
  std::vector<AccessDesc> access = {access_for(device_)};
  std::vector<Device> wanted = {device_};
  for (const int ordinal : ordinals) {
    if (contains(wanted, ordinal)) continue;  // the device itself, or a duplicate
    if (!contains(reaching(), ordinal))
      throw BadArgument("peers names cuda:" + std::to_string(ordinal) +
                        ", expected devices that can access the memory of cuda:" + std::to_string(device_));
    wanted.push_back(ordinal);
    access.push_back(access_for(ordinal));
  }
  const std::lock_guard one_at_a_time(using_);
  for (const Device device : wanted) {
    if (contains(devices_, device)) continue;
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
