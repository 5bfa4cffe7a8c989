// The regions of one device for the thread of the shared pool: their figures, and requests to them.
#pragma once

#include "regions/core.h"

namespace memsaver {

class DeviceResidents final : public Residents {
 public:
  explicit DeviceResidents(Device& device) : device_(device) {}
  std::vector<Row> rows() override;
  void reclaim() override;
  void waits_long() override;
  bool queried() override;

 private:
  Device& device_;
};

// The shared pool of a device, made at first use. Core::mutex is held.
SharedPool& shared_pool(Device& device);

}  // namespace memsaver
