// Contents that are equal in several processes, in memory that these have in common. Each process copies a share out.
#include <algorithm>
#include <atomic>
#include <list>
#include <utility>

#include "backup/backup.h"
#include "backup/common_memory.h"

namespace memsaver {
namespace {

constexpr std::size_t kBatchesAhead = 3;
constexpr auto kPatience = std::chrono::seconds(5);  // with a living process that does not copy its share
constexpr auto kLook = std::chrono::microseconds(200);

class CommonBackup final : public PinnedBackup {
 public:
  CommonBackup(std::shared_ptr<CommonMemory> memory, Ranges parts, const std::vector<CommonMemory::Sum>& sums,
               Deadline deadline)
      : PinnedBackup(std::move(parts)), memory_(std::move(memory)), blocks_(runs()) {
    if (sums.size() != blocks_.count()) throw BadArgument("there are sums of other contents");
    memory_->rely(bytes(), sums, deadline);
    bool done = true;
    for (std::size_t block = 0; block < blocks_.count(); ++block) done &= memory_->is_done(block);
    if (!done) return;
    saved.add(this->parts());
  }
  ~CommonBackup() override { memory_->release(); }

  std::size_t copied_bytes() const override { return copied_; }
  // The saver waits for the blocks of other processes, and copies those of processes that do not.
  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;

  std::vector<Piece> pieces(const Ranges& ranges) const override {
    std::vector<Piece> found;
    for (const Blocks::Piece& piece : blocks_.cut(ranges))
      found.push_back({piece.offset, piece.size, memory_->at(piece.block) + piece.in_block});
    return found;
  }

  std::byte* view(Range range) override {
    throw BackupError("other processes use the same memory: use clone=True", range.size, bytes(), 0);
  }

 private:
  friend class CommonSaver;
  const std::shared_ptr<CommonMemory> memory_;
  const Blocks blocks_;
  std::atomic<std::size_t> copied_ = 0;
};

class CommonSaver final : public Saver {
 public:
  CommonSaver(CommonBackup& backup, Driver& driver, Ranges batches)
      : backup_(backup), memory_(*backup.memory_), driver_(driver), batches_(std::move(batches)) {
    for (const Range& batch : batches_) {
      auto& here = blocks_.emplace_back();
      for (const Blocks::Piece& piece : backup_.blocks_.cut({batch}))
        if (here.empty() || here.back() != piece.block) here.push_back(piece.block);
    }
    queued_.resize(backup_.blocks_.count());
  }

  // Before the commit, only the own share: other processes may still prepare.
  void start(const Saved&) override {
    for (std::size_t batch = 0; batch < std::min(kBatchesAhead, batches_.size()); ++batch)
      queue(batch, CommonMemory::Members().set());
  }

  void wait(std::size_t batch) override {
    const CommonMemory::Members present = memory_.present() & ~late_;
    for (std::size_t ahead = batch; ahead < std::min(batch + kBatchesAhead, batches_.size()); ++ahead)
      queue(ahead, present);
    for (auto next = copies_.begin(); next != copies_.end();) {
      if (next->batch > batch) {
        ++next;
        continue;
      }
      const Copy queued = *next;
      next = copies_.erase(next);
      finish(queued);
    }
    for (const std::size_t block : blocks_[batch]) await(block);
    backup_.saved.add(intersect(backup_.parts(), {batches_[batch]}));
  }

 private:
  struct Copy {
    std::size_t batch, block;
    Driver::Ticket ticket;
  };

  // Copies the blocks of a batch that are the own share, or that of processes that are not present.
  void queue(std::size_t batch, const CommonMemory::Members& present) {
    for (const std::size_t block : blocks_[batch]) {
      if (queued_[block] || memory_.is_done(block)) continue;
      const std::size_t writer = memory_.writer(block);
      if ((writer != memory_.own() && present[writer]) || !memory_.claim(block)) continue;
      copies_.push_back({batch, block, copy(block)});
      queued_[block] = true;
    }
  }

  Driver::Ticket copy(std::size_t block) {
    for (const Blocks::Piece& piece : backup_.blocks_.pieces(block))
      driver_.copy_out(memory_.at(block) + piece.in_block, piece.offset, piece.size);
    return driver_.mark(Direction::out);
  }

  void finish(const Copy& queued) {
    driver_.wait(queued.ticket);
    memory_.set_done(queued.block);
    backup_.copied_ += backup_.blocks_.bytes(queued.block);
  }

  void await(std::size_t block) {
    for (Deadline until = now() + kPatience; !memory_.is_done(block);) {
      const std::size_t writer = memory_.writer(block);
      if (writer != memory_.own() && now() >= until) late_.set(writer);
      if (writer != memory_.own() && !late_[writer] && memory_.present()[writer]) {
        sleep_for(kLook);
      } else if (memory_.claim(block)) {
        finish({0, block, copy(block)});
      }
    }
  }

  CommonBackup& backup_;
  CommonMemory& memory_;
  Driver& driver_;
  const Ranges batches_;
  std::vector<std::vector<std::size_t>> blocks_;  // by batch. A block may lie in two
  std::vector<bool> queued_;                      // by block
  std::list<Copy> copies_;                        // under way
  CommonMemory::Members late_;                    // whose shares this process copies
};

std::unique_ptr<Saver> CommonBackup::saver(Driver& driver, Ranges batches) {
  return std::make_unique<CommonSaver>(*this, driver, std::move(batches));
}

}  // namespace

std::shared_ptr<Backup> common_backup(std::shared_ptr<CommonMemory> memory, Ranges parts,
                                      const std::vector<CommonMemory::Sum>& sums, Deadline deadline) {
  return std::make_shared<CommonBackup>(std::move(memory), std::move(parts), sums, deadline);
}

}  // namespace memsaver
