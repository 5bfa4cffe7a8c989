#include "backup/backup.h"

#include <cstring>
#include <deque>
#include <utility>

namespace memsaver {
namespace {

// Sets a mark behind each kCopyBatch.
class PinnedLoader final : public Loader {
 public:
  PinnedLoader(const PinnedBackup& backup, Driver& driver, Ranges wanted)
      : backup_(backup), driver_(driver), wanted_(std::move(wanted)) {}

  void add(Range memory) override {
    for (const PinnedBackup::Piece& piece : backup_.pieces(intersect(wanted_, {memory}))) {
      driver_.copy_in(piece.offset, piece.host, piece.size);
      unmarked_ += piece.size;
      if (unmarked_ >= kCopyBatch) mark();
    }
  }

  std::size_t arrived(bool waits) override {
    if (waits && unmarked_ > 0) mark();
    if (waits && !marks_.empty()) driver_.wait(marks_.front().first);
    std::size_t bytes = 0;
    for (; !marks_.empty() && (waits ? bytes == 0 : driver_.done(marks_.front().first)); marks_.pop_front())
      bytes += marks_.front().second;
    return bytes;
  }

 private:
  void mark() {
    marks_.emplace_back(driver_.mark(Direction::in), unmarked_);
    unmarked_ = 0;
  }

  const PinnedBackup& backup_;
  Driver& driver_;
  const Ranges wanted_;
  std::size_t unmarked_ = 0;                                  // bytes that are queued behind the last mark
  std::deque<std::pair<Driver::Ticket, std::size_t>> marks_;  // and the bytes before each
};

}  // namespace

Backup::Backup(Ranges parts) : parts_(std::move(parts)), runs_(joined(parts_)), bytes_(bytes_of(parts_)) {}

std::unique_ptr<Loader> PinnedBackup::loader(Driver& driver, Ranges wanted) {
  return std::make_unique<PinnedLoader>(*this, driver, std::move(wanted));
}

void PinnedBackup::read(Range range, std::byte* to) {
  for (const Piece& piece : pieces({range})) std::memcpy(to + (piece.offset - range.offset), piece.host, piece.size);
}

bool drain_copies(Driver& driver) noexcept {
  constexpr int kAttempts = 3;  // a refused call is tried again; a dead context has no copies under way
  for (const Direction direction : {Direction::out, Direction::in})  // each has its attempts: the other may be refused
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      try {
        driver.finish_copies(direction);
        break;
      } catch (const DriverError& error) {
        if (error.context_lost) return false;
      } catch (const std::exception&) {
      }
    }
  return true;
}

}  // namespace memsaver
