#include "backup/host_backup.h"

#include <algorithm>
#include <cstring>
#include <deque>

namespace memsaver {
namespace {

// Batches in the queue, the awaited one included: enough to keep the bus busy. With all of them queued, copies of the
// other direction are delayed.
constexpr std::size_t kAhead = 3;

class HostSaver final : public Saver {
 public:
  HostSaver(HostBackup& backup, Driver& driver, Address base, Ranges batches, Progress& progress)
      : backup_(backup), driver_(driver), base_(base), batches_(std::move(batches)), progress_(progress) {
    for (const Range& batch : batches_) todo_.push_back(backup_.saved.missing_from(intersect(backup_.runs(), {batch})));
  }

  // If host memory has to be made first, the copies to a slab run while the next slab is made.
  void start() override {
    for (std::size_t batch = 0; batch < batches_.size(); ++batch) {
      if (backup_.must_grow(batches_[batch].end())) queue_up_to(batch);
      backup_.place(batches_[batch].end());
    }
    queue_up_to(std::min(kAhead, batches_.size()));
  }

  void wait(std::size_t batch) override {
    try {
      queue_up_to(std::min(batch + kAhead, batches_.size()));
    } catch (const DriverError& error) {
      // A later batch is tried again in its own turn. This batch is tried again now: its contents are still in the
      // region.
      if (error.context_lost) throw;
      queue_up_to(batch + 1);
    }
    if (tickets_[batch] == nullptr) return;
    try {
      driver_.wait(tickets_[batch]);
    } catch (const DriverError& error) {
      if (error.context_lost) throw;
      driver_.wait(queue(batch));  // the contents are still in the region: copy again
    }
    for (const Range& range : todo_[batch]) backup_.saved.add(range);
    progress_.add(bytes_of(todo_[batch]));
  }

 private:
  void queue_up_to(std::size_t batches) {
    while (tickets_.size() < batches) tickets_.push_back(queue(tickets_.size()));
  }

  Driver::Ticket queue(std::size_t batch) {
    if (todo_[batch].empty()) return nullptr;
    for (const HostBackup::Piece& piece : backup_.pieces(todo_[batch]))
      driver_.copy_out(piece.host, base_ + piece.offset, piece.size);
    return driver_.mark(Direction::out);
  }

  HostBackup& backup_;
  Driver& driver_;
  const Address base_;
  const Ranges batches_;
  Progress& progress_;
  std::vector<Ranges> todo_;
  std::vector<Driver::Ticket> tickets_;  // null: nothing to copy
};

class HostLoader final : public Loader {
 public:
  HostLoader(HostBackup& backup, Driver& driver, Address base, Ranges wanted, Progress& progress)
      : backup_(backup), driver_(driver), base_(base), wanted_(std::move(wanted)), progress_(progress) {}

  void add(Range memory) override {
    const Ranges here = intersect(wanted_, {memory});
    if (here.empty()) return;
    for (const HostBackup::Piece& piece : backup_.pieces(here))
      driver_.copy_in(base_ + piece.offset, piece.host, piece.size);
    under_way_.push_back({driver_.mark(Direction::in), bytes_of(here)});
    while (!under_way_.empty() && driver_.done(under_way_.front().ticket)) settle();
  }

  void finish() override {
    while (!under_way_.empty()) {
      driver_.wait(under_way_.front().ticket);
      settle();
    }
  }

 private:
  struct Copy {
    Driver::Ticket ticket;
    std::size_t bytes;
  };

  void settle() {
    progress_.add(under_way_.front().bytes);
    under_way_.pop_front();
  }

  HostBackup& backup_;
  Driver& driver_;
  const Address base_;
  const Ranges wanted_;
  Progress& progress_;
  std::deque<Copy> under_way_;
};

}  // namespace

HostBackup::HostBackup(HostArena& arena, Ranges parts) : Backup(std::move(parts)), arena_(arena), left_(bytes()) {}

HostBackup::~HostBackup() {
  for (const HostArena::Extent& extent : extents_) arena_.put(extent);
}

bool HostBackup::must_grow(std::size_t end) const {
  return next_run_ < runs().size() && runs()[next_run_].offset + within_run_ < end && free_.size == 0 &&
         arena_.idle_bytes() == 0;
}

void HostBackup::place(std::size_t end) {
  while (next_run_ < runs().size()) {
    const Range& run = runs()[next_run_];
    const std::size_t begin = run.offset + within_run_;
    if (begin >= end) return;
    if (free_.size == 0) free_ = extents_.emplace_back(arena_.take_some(left_));
    const std::size_t size = std::min({run.end() - begin, end - begin, free_.size});
    placed_.push_back({begin, size, free_.data});
    free_ = {free_.data + size, free_.size - size};
    left_ -= size;
    within_run_ += size;
    if (within_run_ == run.size) {
      ++next_run_;
      within_run_ = 0;
    }
  }
}

std::vector<HostBackup::Piece> HostBackup::pieces(const Ranges& ranges) const {
  std::vector<Piece> found;
  const std::byte* border = nullptr;  // the end of the slab of the last piece
  for (const Range& range : ranges) {
    auto at = std::upper_bound(placed_.begin(), placed_.end(), range.offset,
                               [](std::size_t offset, const Piece& piece) { return offset < piece.offset; });
    if (at != placed_.begin()) --at;
    for (; at != placed_.end() && at->offset < range.end(); ++at) {
      std::size_t begin = std::max(range.offset, at->offset);
      const std::size_t end = std::min(range.end(), at->offset + at->size);
      while (begin < end) {
        std::byte* host = at->host + (begin - at->offset);
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

std::unique_ptr<Saver> HostBackup::saver(Driver& driver, Address base, Ranges batches, Progress& progress) {
  return std::make_unique<HostSaver>(*this, driver, base, std::move(batches), progress);
}

std::unique_ptr<Loader> HostBackup::loader(Driver& driver, Address base, Ranges wanted, Progress& progress) {
  return std::make_unique<HostLoader>(*this, driver, base, std::move(wanted), progress);
}

HostBackup::Placed HostBackup::piece_at(std::size_t offset) {
  const auto after = std::upper_bound(placed_.begin(), placed_.end(), offset,
                                      [](std::size_t at, const Piece& piece) { return at < piece.offset; });
  return std::prev(after);
}

std::byte* HostBackup::view(Range range) {
  const auto part = std::partition_point(parts().begin(), parts().end(),
                                         [&](const Range& each) { return each.end() <= range.offset; });
  if (part == parts().end() || part->offset > range.offset || part->end() < range.end())
    throw BackupError("these " + std::to_string(range.size) + " bytes span several allocations: use clone=True",
                      range.size, bytes(), 0);
  const auto begin = piece_at(part->offset);
  auto end = std::next(begin);
  bool split = false;
  for (; end != placed_.end() && end->offset < part->end(); ++end)
    split |= std::prev(end)->host + std::prev(end)->size != end->host;
  if (split) move_to_one(*part, begin, end);
  const auto piece = piece_at(part->offset);
  return piece->host + (range.offset - piece->offset);
}

// Moves a part that lies in several pieces to one extent. Existing views stay valid: a view is of a part that already
// lies in one piece.
void HostBackup::move_to_one(Range part, Placed begin, Placed end) {
  try {
    extents_.push_back(arena_.take_whole(part.size));
  } catch (const BackupError& error) {
    throw BackupError(std::string("the contents lie in several pieces: use clone=True; ") + error.what(), part.size,
                      bytes(), error.available_bytes, true);
  }
  const HostArena::Extent whole = extents_.back();
  std::vector<Piece> pieces;
  if (begin->offset < part.offset) pieces.push_back({begin->offset, part.offset - begin->offset, begin->host});
  pieces.push_back({part.offset, part.size, whole.data});
  for (auto piece = begin; piece != end; ++piece) {
    const std::size_t from = std::max(piece->offset, part.offset), to = std::min(piece->end(), part.end());
    std::memcpy(whole.data + (from - part.offset), piece->host + (from - piece->offset), to - from);
  }
  const Piece& last = *std::prev(end);
  if (last.end() > part.end())
    pieces.push_back({part.end(), last.end() - part.end(), last.host + (part.end() - last.offset)});
  placed_.insert(placed_.erase(begin, end), pieces.begin(), pieces.end());
}

void HostBackup::read(Range range, std::byte* to) {
  for (const Piece& piece : pieces({range})) std::memcpy(to + (piece.offset - range.offset), piece.host, piece.size);
}

}  // namespace memsaver
