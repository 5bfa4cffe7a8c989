#include "driver/cuda_peers.h"

#include <algorithm>

#include "base/errors.h"

namespace memsaver::cuda {
namespace {

bool contains(const std::vector<Device>& devices, Device device) {
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

AccessDesc access_for(Device device) { return {{kLocationDevice, device}, kAccessReadWrite}; }

}  // namespace

Peers::Peers(Device device, Context context)
    : device_(device), access_({access_for(device)}), devices_({device}), contexts_({context}) {}

const std::vector<Device>& Peers::reaching() {
  std::call_once(asked_, [this] { reaching_ = devices_that_reach(device_); });
  return reaching_;
}

std::vector<Device> Peers::candidates() {
  std::vector<Device> found;
  for (const Device device : reaching())
    if (is_active(device)) found.push_back(device);
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
    check("cuDevicePrimaryCtxRetain", api().cuDevicePrimaryCtxRetain(&context, device));
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
