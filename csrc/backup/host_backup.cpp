// Contents in pinned host memory: the parts end to end, copied directly from and to the device.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "backup/backup.h"
#include "backup/pinned_memory.h"

namespace memsaver {
namespace {

// Batches in the queue, the awaited one included: enough to keep the bus busy. With all of them queued, copies of the
// other direction are delayed.
constexpr std::size_t kAhead = 3;

class HostBackup final : public PinnedBackup {
 public:
  // Takes no memory yet.
  HostBackup(HostArena& arena, Ranges parts) : PinnedBackup(std::move(parts)), arena_(arena), left_(bytes()) {}
  ~HostBackup() override {
    for (const HostArena::Extent& extent : extents_) arena_.put(extent);
  }

  // Whether place() has to make pinned memory.
  bool must_grow(std::size_t end) const {
    return free_.size == 0 && end > placed_end_ && !intersect(runs(), {{placed_end_, end - placed_end_}}).empty() &&
           arena_.idle_bytes() == 0;
  }

  // Takes memory for all contents before this offset. Throws BackupError.
  void place(std::size_t end) {
    if (end <= placed_end_) return;
    for (const Range& range : intersect(runs(), {{placed_end_, end - placed_end_}})) {
      for (std::size_t begin = range.offset; begin < range.end(); begin = placed_end_) {
        if (free_.size == 0) free_ = extents_.emplace_back(arena_.take_some(left_));
        const std::size_t size = std::min(range.end() - begin, free_.size);
        placed_[begin] = {free_.data, size};
        free_ = {free_.data + size, free_.size - size};
        left_ -= size;
        placed_end_ = begin + size;
      }
    }
    placed_end_ = end;
  }

  std::vector<Piece> pieces(const Ranges& ranges) const override {
    std::vector<Piece> found;
    const std::byte* border = nullptr;  // the end of the slab of the last piece
    for (const Range& range : ranges) {
      for (const auto& [offset, extent] : overlapping(placed_, range)) {
        std::size_t begin = std::max(range.offset, offset);
        const std::size_t end = std::min(range.end(), offset + extent.size);
        while (begin < end) {
          std::byte* host = extent.data + (begin - offset);
          Piece* last = found.empty() ? nullptr : &found.back();
          const bool joins = last != nullptr && last->offset + last->size == begin && last->host + last->size == host;
          if (!joins || host == border) {
            if (host >= border || last == nullptr || host < last->host) border = arena_.slab_end(host);
            found.push_back({begin, 0, host});
          }
          const std::size_t size = std::min(end - begin, static_cast<std::size_t>(border - host));
          found.back().size += size;
          begin += size;
        }
      }
    }
    return found;
  }

  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;

  std::byte* view(Range range) override {
    const auto found = std::partition_point(parts().begin(), parts().end(),
                                            [&](const Range& each) { return each.end() <= range.offset; });
    if (found == parts().end() || found->offset > range.offset || found->end() < range.end())
      throw BackupError("these " + std::to_string(range.size) + " bytes span several allocations: use clone=True",
                        range.size, bytes(), 0);
    const Range part = *found;
    const std::byte* end = nullptr;
    bool is_split = false;
    for (const auto& [offset, extent] : overlapping(placed_, part)) {
      is_split |= end != nullptr && end != extent.data;
      end = extent.end();
    }
    if (is_split) move_to_one(part);
    const auto piece = entry_at(placed_, range.offset);
    return piece->second.data + (range.offset - piece->first);
  }

 private:
  // Moves a part that lies in several pieces to one extent. Existing views stay valid: a view is of a part that already
  // lies in one piece.
  void move_to_one(Range part) {
    try {
      extents_.push_back(arena_.take_whole(part.size));
    } catch (const BackupError& error) {
      throw BackupError(std::string("the contents lie in several pieces: use clone=True; ") + error.what(), part.size,
                        bytes(), error.available_bytes, true);
    }
    const HostArena::Extent whole = extents_.back();
    read(part, whole.data);
    const auto former = overlapping(placed_, part);
    const auto first = *former.begin(), last = *std::prev(former.end());
    placed_.erase(former.begin(), former.end());
    placed_[part.offset] = {whole.data, part.size};
    if (first.first < part.offset) placed_[first.first] = {first.second.data, part.offset - first.first};
    if (const std::size_t end = last.first + last.second.size; end > part.end())
      placed_[part.end()] = {last.second.end() - (end - part.end()), end - part.end()};
  }

  HostArena& arena_;
  std::vector<HostArena::Extent> extents_;
  HostArena::Extent free_{nullptr, 0};               // the unused rest of the last extent
  std::map<std::size_t, HostArena::Extent> placed_;  // by offset in the region
  std::size_t placed_end_ = 0;                       // all contents before this offset are placed
  std::size_t left_;                                 // bytes still to be placed
};

class HostSaver final : public Saver {
 public:
  HostSaver(HostBackup& backup, Driver& driver, Ranges batches)
      : backup_(backup), driver_(driver), batches_(std::move(batches)) {
    for (const Range& batch : batches_) todo_.push_back(backup_.saved.missing_from(intersect(backup_.runs(), {batch})));
  }

  // If host memory has to be made first, the copies to a slab run while the next slab is made.
  void start(const Saved& saved) override {
    for (std::size_t batch = 0, next = 0; batch < batches_.size(); ++batch) {
      if (backup_.must_grow(batches_[batch].end())) queue_up_to(batch);
      backup_.place(batches_[batch].end());
      for (; next < tickets_.size() && (tickets_[next] == nullptr || driver_.done(tickets_[next])); ++next) saved(next);
    }
    queue_up_to(std::min(kAhead, batches_.size()));
  }

  void wait(std::size_t batch) override {
    queue_up_to(std::min(batch + kAhead, batches_.size()));
    if (tickets_[batch] == nullptr) return;
    driver_.wait(tickets_[batch]);
    backup_.saved.add(todo_[batch]);
  }

 private:
  void queue_up_to(std::size_t batches) {
    while (tickets_.size() < batches) tickets_.push_back(queue(tickets_.size()));
  }

  Driver::Ticket queue(std::size_t batch) {
    if (todo_[batch].empty()) return nullptr;
    for (const HostBackup::Piece& piece : backup_.pieces(todo_[batch]))
      driver_.copy_out(piece.host, piece.offset, piece.size);
    return driver_.mark(Direction::out);
  }

  HostBackup& backup_;
  Driver& driver_;
  const Ranges batches_;
  std::vector<Ranges> todo_;
  std::vector<Driver::Ticket> tickets_;  // null: nothing to copy
};

std::unique_ptr<Saver> HostBackup::saver(Driver& driver, Ranges batches) {
  return std::make_unique<HostSaver>(*this, driver, std::move(batches));
}

}  // namespace

std::shared_ptr<Backup> host_backup(HostArena& arena, Ranges parts) {
  return std::make_shared<HostBackup>(arena, std::move(parts));
}

}  // namespace memsaver
