// The contents of a region that was paused lazily. Nothing is taken at first. Each copy out makes a backup, a piece,
// for the contents that it copies: so it reads and reserves nothing else.
#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "backup/backup.h"

namespace memsaver {
namespace {

// A piece without memory for its loader waits for the end of the others.
class PiecesLoader final : public Loader {
 public:
  explicit PiecesLoader(Driver& driver) : driver_(driver) {}
  void open(Backup& piece, Ranges wanted) {
    try {
      loaders_.push_back(piece.loader(driver_, wanted));
    } catch (const BackupError&) {
      if (loaders_.empty()) throw;
      later_.emplace_back(&piece, std::move(wanted));
    }
  }
  void add(Range memory) override {
    for (const auto& each : loaders_) each->add(memory);
    if (!later_.empty()) there_.push_back(memory);
  }
  std::size_t arrived(bool waits) override {
    std::size_t bytes = 0;
    for (const auto& each : loaders_)
      if (!waits) bytes += each->arrived(false);
    while (waits && bytes == 0 && !(loaders_.empty() && later_.empty())) {
      if (loaders_.empty()) {
        loaders_.push_back(later_.front().first->loader(driver_, std::move(later_.front().second)));
        later_.pop_front();
        for (const Range& memory : there_) loaders_.back()->add(memory);
      }
      bytes = loaders_.front()->arrived(true);
      if (bytes == 0) loaders_.pop_front();
    }
    return bytes;
  }

 private:
  Driver& driver_;
  std::deque<std::unique_ptr<Loader>> loaders_;
  std::deque<std::pair<Backup*, Ranges>> later_;
  Ranges there_;
};

class PiecedBackup final : public Backup {
 public:
  PiecedBackup(Ranges parts, MakePiece make) : Backup(std::move(parts)), make_(std::move(make)) {}

  std::size_t kept_bytes() const override { return kept_; }
  // The saver copies the contents within the batches that were not copied before. Its destructor adds them to `saved`.
  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;

  std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) override {
    auto all = std::make_unique<PiecesLoader>(driver);
    for (const auto& piece : pieces_)
      if (Ranges part = intersect(piece->saved.within(kEverywhere), wanted); !part.empty())
        all->open(*piece, std::move(part));
    return all;
  }

  std::byte* view(Range range) override {
    for (const auto& piece : pieces_)
      if (piece->saved.covers(range)) return piece->view(range);
    throw BackupError("these " + std::to_string(range.size) + " bytes were copied in several parts: use clone=True",
                      range.size, kept_, 0);
  }

  void read(Range range, std::byte* to) override {
    for (const auto& piece : pieces_)
      for (const Range& part : piece->saved.within(range)) piece->read(part, to + (part.offset - range.offset));
  }

 private:
  friend class PieceSaver;
  const MakePiece make_;
  std::vector<std::shared_ptr<Backup>> pieces_;  // whose saved ranges do not overlap
  std::atomic<std::size_t> kept_ = 0;
};

class PieceSaver final : public Saver {
 public:
  PieceSaver(PiecedBackup& whole, Driver& driver, std::shared_ptr<Backup> piece, std::unique_ptr<Saver> saver)
      : whole_(whole), driver_(driver), piece_(std::move(piece)), saver_(std::move(saver)) {}
  ~PieceSaver() override {
    saver_.reset();                                  // its threads write to `saved` of the piece
    if (!piece_->complete()) drain_copies(driver_);  // its memory may return to the arena
    const Ranges saved = piece_->saved.within(kEverywhere);
    if (saved.empty()) return;
    whole_.saved.add(saved);
    if (std::find(whole_.pieces_.begin(), whole_.pieces_.end(), piece_) != whole_.pieces_.end()) return;
    whole_.kept_ += piece_->bytes();
    whole_.pieces_.push_back(std::move(piece_));
  }
  void start(const Saved& saved) override { saver_->start(saved); }
  void wait(std::size_t batch) override { saver_->wait(batch); }

 private:
  PiecedBackup& whole_;
  Driver& driver_;
  std::shared_ptr<Backup> piece_;
  std::unique_ptr<Saver> saver_;
};

std::unique_ptr<Saver> PiecedBackup::saver(Driver& driver, Ranges batches) {
  pieces_.reserve(pieces_.size() + 1);  // so that the end of the saver cannot fail
  const Ranges lacking = saved.missing_from(intersect(parts(), joined(batches)));
  // A piece whose saver ended before its time has memory for the rest.
  const auto same = std::find_if(pieces_.begin(), pieces_.end(), [&](const std::shared_ptr<Backup>& each) {
    const Ranges rest = each->saved.missing_from(each->parts());
    return bytes_of(rest) == bytes_of(lacking) && bytes_of(intersect(rest, lacking)) == bytes_of(rest);
  });
  std::shared_ptr<Backup> piece = same != pieces_.end() ? *same : make_(lacking);
  std::unique_ptr<Saver> saver = piece->saver(driver, std::move(batches));
  return std::make_unique<PieceSaver>(*this, driver, std::move(piece), std::move(saver));
}

}  // namespace

std::shared_ptr<Backup> pieced_backup(Ranges parts, MakePiece make) {
  return std::make_shared<PiecedBackup>(std::move(parts), std::move(make));
}

}  // namespace memsaver
