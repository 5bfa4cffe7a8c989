// The contexts whose work may access the memory of one device: its own, and those of peers with access. Their streams,
// events and marks.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/cuda_api.h"

namespace memsaver::cuda {

// Makes a context current for one call, and sets relaxed capture mode: a capture on another thread would otherwise
// forbid the call. No call of the library becomes part of a capture.
class Scope {
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
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const Api& api_;
  int mode_ = kCaptureRelaxed;
};

// This and the next are released by their destructors, so that a driver whose constructor fails later leaks nothing.
struct PrimaryContext {
  PrimaryContext(const Api& calls, Device of) : api(calls), device(of) {
    check(api, "cuDevicePrimaryCtxRetain", api.cuDevicePrimaryCtxRetain(&context, device));
  }
  ~PrimaryContext() { api.cuDevicePrimaryCtxRelease(device); }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  const Api& api;
  const Device device;
  Context context = nullptr;
};

struct OwnedStream {
  OwnedStream(const Api& calls, Context context) : api(calls) {
    const Scope scope(api, context);
    check(api, "cuStreamCreate", api.cuStreamCreate(&stream, kStreamNonBlocking));
  }
  ~OwnedStream() { api.cuStreamDestroy(stream); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  const Api& api;
  Stream stream = nullptr;
};

// Events that no mark uses now. They are used again and never destroyed: marks end under locks over which no call of
// the driver is made, and in threads without a context.
class Events {
 public:
  explicit Events(const Api& api) : api_(api) {}
  // For the current context. A blocking event: the wait sleeps, so a long transition does not occupy a core.
  Event take(Context context) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<Event>& idle = idle_[context];
      if (!idle.empty()) {
        const Event event = idle.back();
        idle.pop_back();
        return event;
      }
    }
    Event event = nullptr;
    check(api_, "cuEventCreate", api_.cuEventCreate(&event, kEventDisableTiming | kEventBlockingSync));
    return event;
  }

  void give(Context context, Event event) noexcept {
    try {
      const std::lock_guard lock(mutex_);
      idle_[context].push_back(event);
    } catch (const std::exception&) {
      // No host memory for the note: the event is not used again.
    }
  }

 private:
  const Api& api_;
  std::mutex mutex_;  // no other lock is taken under it, and no call of the driver is made
  std::map<Context, std::vector<Event>> idle_;
};

// A mark in the contexts of a device and its peers.
class Marks {
 public:
  struct Mark {
    Context context;
    Event event;
  };

  explicit Marks(std::shared_ptr<Events> events) : events_(std::move(events)) {}
  ~Marks() {
    for (const Mark& mark : marks_) events_->give(mark.context, mark.event);
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  // An event to be recorded in a context, which is the current one.
  Event add(Context context) {
    marks_.push_back({context, events_->take(context)});
    return marks_.back().event;
  }
  const std::vector<Mark>& all() const { return marks_; }

 private:
  const std::shared_ptr<Events> events_;
  std::vector<Mark> marks_;
};

// Thread-safe.
class Peers {
 public:
  Peers(const Api& api, Device device, Context context);

  // Devices on which the process has a primary context now, and which can reach this one's memory.
  std::vector<Device> candidates();
  // Gives access to these devices and to the device itself from now on. If it throws BadArgument, nothing has changed.
  void use(const std::vector<int>& ordinals);

  std::vector<AccessDesc> access() const;  // for a mapping that is made now
  // Of every device that ever had access, its own first: earlier mappings keep their access.
  std::vector<Context> contexts() const;

 private:
  const std::vector<Device>& reaching();

  const Api& api_;
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
