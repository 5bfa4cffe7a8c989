#include "regions/capture_gate.h"

#include <utility>

namespace memsaver {

void CaptureGate::capture_begins() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return operations_ == 0; });
  ++captures_;
}

void CaptureGate::capture_ends() {
  std::lock_guard lock(mutex_);
  if (captures_ > 0) --captures_;
}

bool CaptureGate::capturing() const {
  std::lock_guard lock(mutex_);
  return captures_ > 0;
}

CaptureGate::Pass::Pass(CaptureGate& gate) : gate_(&gate) {
  std::lock_guard lock(gate.mutex_);
  if (gate.captures_ > 0)
    gate_ = nullptr;
  else
    ++gate.operations_;
}

CaptureGate::Pass::Pass(Pass&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}

void CaptureGate::Pass::end() {
  CaptureGate* gate = std::exchange(gate_, nullptr);
  if (gate == nullptr) return;
  std::lock_guard lock(gate->mutex_);
  --gate->operations_;
  gate->changed_.notify_all();
}

}  // namespace memsaver
