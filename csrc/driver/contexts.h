// The contexts whose work may access the memory of one device: its own, and those of peers with access. Their events.
#pragma once

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/scoped.h"
#include "driver/cuda_api.h"

namespace memsaver::cuda {

// Makes a context current for one call, and sets relaxed capture mode: a capture on another thread would otherwise
// forbid the call. No call of the library becomes part of a capture.
class Scope : Immovable {
 public:
  Scope(const Api& api, Context context) : api_(api) {
    check(api, "cuCtxPushCurrent", api.cuCtxPushCurrent(context));
    api.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~Scope() {
    api_.cuThreadExchangeStreamCaptureMode(&mode_);
    Context popped = nullptr;
    api_.cuCtxPopCurrent(&popped);
  }

 private:
  const Api& api_;
  int mode_ = kCaptureRelaxed;
};

struct Mark {
  Context context;
  Event event;
};

// Events that no mark uses now. They are used again and never destroyed: marks end under locks over which no call of
// the driver is made, and in threads without a context.
class Events {
 public:
  explicit Events(const Api& api) : api_(api) {}
  // A blocking event: the wait sleeps, so a long transition does not occupy a core.
  Mark take(Context context) {  // the current one
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
  void give(const Mark& mark) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      idle_[mark.context].push_back(mark.event);
    } catch (const std::exception&) {
      // No host memory for the note: the event is not used again.
    }
  }

 private:
  const Api& api_;
  std::mutex mutex_;  // no other lock is taken under it, and no call of the driver is made
  std::map<Context, std::vector<Event>> idle_;
};

inline AccessDesc access_for(Device device) { return {{kLocationDevice, device}, kAccessReadWrite}; }

inline std::vector<Device> devices_that_reach(const Api& api, Device device) {
  std::vector<Device> found;
  for (const Device other : all_devices(api)) {
    int can = 0;
    if (other != device) check(api, "cuDeviceCanAccessPeer", api.cuDeviceCanAccessPeer(&can, other, device));
    if (can != 0 && attribute_of(api, other, kAttributeVirtualMemory) != 0) found.push_back(other);
  }
  return found;
}

// Whether any library in the process has made the device's primary context.
inline bool is_active(const Api& api, Device device) {
  unsigned flags = 0;
  int active = 0;
  check(api, "cuDevicePrimaryCtxGetState", api.cuDevicePrimaryCtxGetState(device, &flags, &active));
  return active != 0;
}

// Thread-safe.
class Peers {
 public:
  Peers(const Api& api, Device device, Context context)
      : api_(api),
        device_(device),
        reaching_(devices_that_reach(api, device)),
        access_({access_for(device)}),
        contexts_({context}),
        devices_({device}) {}

  // Devices on which the process has a primary context now, and which can reach this one's memory.
  std::vector<Device> candidates() const {
    std::vector<Device> found;
    for (const Device device : reaching_)
      if (is_active(api_, device)) found.push_back(device);
    return found;
  }
  // Gives access to these candidates and to the device itself from now on.
  void use(const std::vector<Device>& devices) {
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

  std::vector<AccessDesc> access() const {  // for a mapping that is made now
    const std::lock_guard lock(mutex_);
    return access_;
  }
  // Of every device that ever had access, its own first: earlier mappings keep their access.
  std::vector<Context> contexts() const {
    const std::lock_guard lock(mutex_);
    return contexts_;
  }

 private:
  const Api& api_;
  const Device device_;
  const std::vector<Device> reaching_;  // other devices that can reach the memory of this one
  std::mutex using_;  // one use() at a time; taken before mutex_, and held while contexts are retained
  mutable std::mutex mutex_;
  std::vector<AccessDesc> access_;
  std::vector<Context> contexts_;
  std::vector<Device> devices_;  // of contexts_, in the same order
};

}  // namespace memsaver::cuda
