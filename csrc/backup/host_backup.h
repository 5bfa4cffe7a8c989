// Contents in pinned host memory: the parts end to end, copied directly from and to the device.
#pragma once

#include <vector>

#include "backup/backup.h"
#include "backup/pinned_memory.h"

namespace memsaver {

class HostBackup final : public Backup {
 public:
  struct Piece {
    std::size_t offset;
    std::size_t size;
    std::byte* host;
    std::size_t end() const { return offset + size; }
  };

  // Takes no memory yet.
  HostBackup(HostArena& arena, Ranges parts);
  ~HostBackup() override;

  bool must_grow(std::size_t end) const;  // whether place() has to make pinned memory
  void place(std::size_t end);            // takes memory for all contents before this offset. Throws BackupError
  std::vector<Piece> pieces(const Ranges& ranges) const;  // contiguous on both sides, and each within a slab

  std::unique_ptr<Saver> saver(Driver& driver, Address base, Ranges batches, Progress& progress) override;
  std::unique_ptr<Loader> loader(Driver& driver, Address base, Ranges wanted, Progress& progress) override;
  std::byte* view(Range range) override;
  void read(Range range, std::byte* to) override;

 private:
  using Placed = std::vector<Piece>::iterator;

  Placed piece_at(std::size_t offset);  // the piece that holds this byte
  // Moves the contents of a part, which lie in these pieces, to one extent.
  void move_to_one(Range part, Placed begin, Placed end);

  HostArena& arena_;
  std::vector<HostArena::Extent> extents_;
  HostArena::Extent free_{nullptr, 0};  // the unused rest of the last extent
  std::vector<Piece> placed_;           // by offset
  std::size_t next_run_ = 0;            // the next run to be placed,
  std::size_t within_run_ = 0;          // from this offset in it
  std::size_t left_;                    // bytes still to be placed
};

}  // namespace memsaver
