// Contents that are equal in several processes, in memory that these have in common. Each process copies a share out.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backup/backup.h"
#include "backup/blocks.h"
#include "backup/common_memory.h"

namespace memsaver {

class CommonBackup final : public PinnedBackup, public std::enable_shared_from_this<CommonBackup> {
 public:
  // Throws as CommonMemory::rely().
  CommonBackup(std::shared_ptr<CommonMemory> memory, Ranges parts, const std::vector<CommonMemory::Sum>& sums,
               Deadline deadline);
  ~CommonBackup() override { memory_->release(); }

  std::size_t copied_bytes() const override { return copied_; }
  // The saver waits for the blocks of other processes, and copies those of processes that do not.
  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;
  std::vector<Piece> pieces(const Ranges& ranges) const override;
  std::byte* view(Range range) override;

 private:
  friend class CommonSaver;
  const std::shared_ptr<CommonMemory> memory_;
  const Blocks blocks_;
  std::atomic<std::size_t> copied_ = 0;
};

}  // namespace memsaver
