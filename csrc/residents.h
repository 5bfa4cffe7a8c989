// The regions of one device, as the shared pool's thread asks for them: what is there, and who may attach to it.
#pragma once

#include "region.h"

namespace memsaver {

class DeviceResidents final : public Residents {
 public:
  explicit DeviceResidents(const Device& device) : device_(device) {}
  std::vector<Row> rows() override;
  std::vector<Placed> lend(const std::string& key, std::uint64_t residence, std::uint64_t lease, int pid) override;
  void returned(std::uint64_t lease) override;
  std::vector<Owed> owed() override;

 private:
  const Device& device_;
};

// The shared pool of a device, made when it is first wanted. Core::mutex is held.
SharedPool& shared_pool(Device& device);

}  // namespace memsaver
