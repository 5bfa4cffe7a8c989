// Contents in pinned host memory: the parts end to end, copied straight between there and the device.
#pragma once

#include <vector>

#include "arena.h"
#include "backup.h"

namespace memsaver {

class HostBackup final : public Backup {
 public:
  struct Piece {
    std::size_t offset;
    std::size_t size;
    std::byte* host;
  };

  // Takes no memory yet; throws BackupError where it could not be had.
  HostBackup(HostArena& arena, Ranges parts);
  ~HostBackup() override;

  bool must_grow(std::size_t end) const;  // whether place() has to wait for memory to be made
  void place(std::size_t end);            // takes memory for all parts before this offset. Throws BackupError
  std::vector<Piece> pieces(const Ranges& ranges) const;  // contiguous on both sides, and each within a slab

  std::unique_ptr<Saver> saver(Driver& driver, Address base, Ranges batches, Progress& progress) override;
  std::unique_ptr<Loader> loader(Driver& driver, Address base, Ranges wanted, Progress& progress) override;
  std::byte* view(Range range) override;
  void read(Range range, std::byte* to) override;

 private:
  HostArena& arena_;
  std::vector<HostArena::Extent> extents_;
  HostArena::Extent free_{nullptr, 0};  // of the last extent: not used yet
  std::vector<Piece> placed_;           // by offset
  std::size_t next_part_ = 0;           // to be placed,
  std::size_t within_part_ = 0;         // from here on
  std::size_t left_;                    // bytes to be placed
};

}  // namespace memsaver
