// Contents in pinned host memory: the parts end to end, copied directly from and to the device.
#pragma once

#include <map>
#include <vector>

#include "backup/backup.h"
#include "backup/pinned_memory.h"

namespace memsaver {

class HostBackup final : public PinnedBackup {
 public:
  // Takes no memory yet.
  HostBackup(HostArena& arena, Ranges parts) : PinnedBackup(std::move(parts)), arena_(arena), left_(bytes()) {}
  ~HostBackup() override;

  bool must_grow(std::size_t end) const;  // whether place() has to make pinned memory
  void place(std::size_t end);            // takes memory for all contents before this offset. Throws BackupError
  std::vector<Piece> pieces(const Ranges& ranges) const override;

  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;
  std::byte* view(Range range) override;

 private:
  void move_to_one(Range part);

  HostArena& arena_;
  std::vector<HostArena::Extent> extents_;
  HostArena::Extent free_{nullptr, 0};               // the unused rest of the last extent
  std::map<std::size_t, HostArena::Extent> placed_;  // by offset in the region
  std::size_t placed_end_ = 0;                       // all contents before this offset are placed
  std::size_t left_;                                 // bytes still to be placed
};

}  // namespace memsaver
