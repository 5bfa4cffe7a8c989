// The contexts whose work may access the memory of one device: its own, and those of peers with access. Their events.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
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

// The primary context of a device, and a stream. They are released with their pointers.
std::shared_ptr<void> retained_context(const Api& api, Device device);
std::shared_ptr<void> new_stream(const Api& api, Context context);

struct Mark {
  Context context;
  Event event;
};

// Events that no mark uses now. They are used again and never destroyed: marks end under locks over which no call of
// the driver is made, and in threads without a context.
class Events {
 public:
  explicit Events(const Api& api) : api_(api) {}
  Mark take(Context context);  // the current one
  void give(const Mark& mark) noexcept;

 private:
  const Api& api_;
  std::mutex mutex_;  // no other lock is taken under it, and no call of the driver is made
  std::map<Context, std::vector<Event>> idle_;
};

// Thread-safe.
class Peers {
 public:
  Peers(const Api& api, Device device, Context context);

  // Devices on which the process has a primary context now, and which can reach this one's memory.
  std::vector<Device> candidates() const;
  // Gives access to these candidates and to the device itself from now on.
  void use(const std::vector<Device>& devices);

  std::vector<AccessDesc> access() const;  // for a mapping that is made now
  // Of every device that ever had access, its own first: earlier mappings keep their access.
  std::vector<Context> contexts() const;

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
