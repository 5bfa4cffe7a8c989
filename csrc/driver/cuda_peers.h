// The devices whose work may access the memory of one device: the device itself, and peers with access.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "driver/cuda_api.h"

namespace memsaver::cuda {

// Makes a context current for one call, and sets relaxed capture mode: a capture on another thread would otherwise
// forbid the call. No call of the library becomes part of a capture.
class Scope {
 public:
  explicit Scope(Context context) {
    check("cuCtxPushCurrent", api().cuCtxPushCurrent(context));
    api().cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~Scope() {
    api().cuThreadExchangeStreamCaptureMode(&mode_);
    Context popped = nullptr;
    api().cuCtxPopCurrent(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

// Thread-safe.
class Peers {
 public:
  Peers(Device device, Context context);

  // Devices on which the process has a primary context now, and which can reach this one's memory.
  std::vector<Device> candidates();
  // Gives access to these devices and to the device itself from now on. If it throws BadArgument, nothing has changed.
  void use(const std::vector<int>& ordinals);

  std::vector<AccessDesc> access() const;  // for a mapping that is made now
  // Of every device that ever had access, its own first: earlier mappings keep their access.
  std::vector<Context> contexts() const;

 private:
  const std::vector<Device>& reaching();

  const Device device_;
  std::once_flag asked_;
  std::vector<Device> reaching_;  // which devices can reach this one; after asked_ constant
  std::mutex using_;              // one use() at a time; taken before mutex_, and held while contexts are retained
  mutable std::mutex mutex_;
  std::vector<AccessDesc> access_;
  std::vector<Device> devices_;  // the devices of contexts_, in the same order
  std::vector<Context> contexts_;
};

}  // namespace memsaver::cuda
