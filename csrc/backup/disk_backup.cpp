#include "backup/disk_backup.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "backup/blocks.h"
#include "backup/pinned_memory.h"

namespace memsaver {
namespace {

// Each with a block of pinned memory. Few read, so that the disk reads nearly in order.
constexpr std::size_t kWriters = 6, kReaders = 3;

// 64-bit FNV-1a over words. Sizes are whole pages.
std::uint64_t checksum(const std::byte* data, std::size_t size) {
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const std::byte* end = data + size; data < end; data += sizeof sum) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    sum = (sum ^ word) * 0x100000001b3;
  }
  return sum;
}

// A block of pinned memory, on loan from the arena.
class Staging : Immovable {
 public:
  explicit Staging(HostArena& arena) : arena_(arena), extent_(arena.take_whole(Blocks::kSize)) {}
  ~Staging() { arena_.put(extent_); }
  std::byte* data() const { return extent_.data; }

  // Calls `copy` for the parts of a piece, cut at the borders of the arena's slabs.
  template <typename Copy>
  void each(std::size_t at, std::size_t size, Copy copy) const {
    for (std::size_t done = 0; done < size;) {
      std::byte* host = data() + at + done;
      const std::size_t part = std::min(size - done, static_cast<std::size_t>(arena_.slab_end(host) - host));
      copy(host, done, part);
      done += part;
    }
  }

 private:
  HostArena& arena_;
  HostArena::Extent extent_;
};

Ranges ranges_of(const std::vector<Blocks::Piece>& pieces) {
  Ranges ranges;
  for (const Blocks::Piece& piece : pieces) ranges.push_back({piece.offset, piece.size});
  return ranges;
}

class DiskBackup final : public Backup {
 public:
  DiskBackup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts)
      : Backup(std::move(parts)), blocks(runs()), staging_(staging), store_(store), directory_(directory) {
    checksums_.resize(blocks.count());
    file_ = store_.take(directory_, round_up(bytes(), kFileAlignment));
  }
  ~DiskBackup() override { store_.put(std::move(file_), round_up(bytes(), kFileAlignment)); }

  const Blocks blocks;  // end to end in the file
  HostArena& staging() const { return staging_; }

  // Callable from any thread, one block each. `memory`: Blocks::kSize bytes, page-aligned. They throw Error, load()
  // also if the checksum differs.
  void save(std::size_t block, std::byte* memory) {
    const std::size_t used = blocks.bytes(block), size = size_of(block);
    std::memset(memory + used, 0, size - used);
    checksums_[block] = checksum(memory, size);
    try {
      file_->write(memory, size, block * Blocks::kSize);
    } catch (const Error& failure) {
      throw error(failure.what());
    }
  }

  void load(std::size_t block, std::byte* memory) const {
    try {
      file_->read(memory, size_of(block), block * Blocks::kSize);
    } catch (const Error& failure) {
      throw error(failure.what());
    }
    if (checksum(memory, size_of(block)) != checksums_[block])
      throw error("the checksum of the file's block at byte " + std::to_string(block * Blocks::kSize) +
                  " differs from the one that was written");
  }

  std::unique_ptr<Saver> saver(Driver& driver, Ranges batches) override;
  std::unique_ptr<Loader> loader(Driver& driver, Ranges wanted) override;
  std::byte* view(Range) override { throw error("the contents are in a file: use clone=True"); }

  // Through memory that is not pinned, which needs no driver call: the context may be dead.
  void read(Range range, std::byte* to) override {
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kFileAlignment, Blocks::kSize),
                                                             &std::free);
    if (memory == nullptr) throw error("the system has no memory for a block of it");
    auto* const data = static_cast<std::byte*>(memory.get());
    for (std::size_t block = 0; block < blocks.count(); ++block) {
      const auto pieces = blocks.pieces(block);
      if (intersect(ranges_of(pieces), {range}).empty()) continue;
      load(block, data);
      for (const Blocks::Piece& piece : pieces)
        for (const Range& part : intersect({{piece.offset, piece.size}}, {range}))
          std::memcpy(to + (part.offset - range.offset), data + piece.in_block + (part.offset - piece.offset),
                      part.size);
    }
  }

 private:
  // In the file: whole pages.
  std::size_t size_of(std::size_t block) const { return round_up(blocks.bytes(block), kFileAlignment); }
  BackupError error(const std::string& what) const {
    return BackupError("a backup of " + std::to_string(bytes()) + " bytes in " + directory_ + ": " + what, bytes(),
                       store_.held_bytes(), 0);
  }

  HostArena& staging_;
  DiskStore& store_;
  const std::string directory_;
  std::vector<std::uint64_t> checksums_;
  std::unique_ptr<ScratchFile> file_;
};

// The copies of one transfer, in one of both directions. Threads process the blocks; the first error stops all of them.
class DiskCopies final : public Saver, public Loader {
 public:
  // `ranges`: the batches to save, or the contents to load.
  DiskCopies(DiskBackup& backup, Driver& driver, Direction direction, Ranges ranges)
      : backup_(backup), driver_(driver), direction_(direction), ranges_(std::move(ranges)) {
    for (std::size_t block = 0; block < backup.blocks.count(); ++block) {
      const Ranges here = ranges_of(backup.blocks.pieces(block));
      if (direction == Direction::out ? !backup.saved.covers(here) : !intersect(ranges_, here).empty())
        blocks_.push_back(block);
    }
  }
  ~DiskCopies() override {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  // Reserves the memory, before any thread starts. With fewer blocks or threads than wanted it is slower.
  void start(const Saved&) override {
    const std::size_t wanted = std::min(direction_ == Direction::out ? kWriters : kReaders, blocks_.size());
    threads_.reserve(wanted);
    try {
      while (staging_.size() < wanted) staging_.push_back(std::make_unique<Staging>(backup_.staging()));
    } catch (const BackupError&) {
      if (staging_.empty()) throw;
    }
    try {
      for (const auto& staging : staging_) threads_.emplace_back([this, memory = staging.get()] { run(*memory); });
    } catch (const std::system_error& error) {
      if (threads_.empty()) throw Error(std::string("no thread for the files of a backup: ") + error.what());
    }
  }

  void wait(std::size_t batch) override {
    const Ranges contents = intersect(backup_.parts(), {ranges_[batch]});
    await([&] { return backup_.saved.covers(contents); });
  }

  void add(Range memory) override {
    std::lock_guard lock(mutex_);
    there_.add(memory);
    changed_.notify_all();
  }

  std::size_t arrived(bool waits) override {
    if (waits) await([&] { return arrived_ > 0 || finished_ == blocks_.size(); });
    std::lock_guard lock(mutex_);
    return std::exchange(arrived_, 0);
  }

 private:
  template <typename Ready>
  void await(Ready ready) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || ready(); });
    if (!ready()) std::rethrow_exception(error_);
  }

  void run(const Staging& staging) {
    std::unique_lock lock(mutex_);
    while (!stopped_ && next_ < blocks_.size()) {
      const std::size_t block = blocks_[next_++];
      lock.unlock();
      std::exception_ptr error;
      try {
        direction_ == Direction::out ? save(block, staging) : load(block, staging);
      } catch (...) {
        error = std::current_exception();
        drain_copies(driver_);  // no copy may access the staging block after this
      }
      lock.lock();
      if (error) {
        if (!error_) error_ = error;
        stopped_ = true;
      } else {
        ++finished_;
      }
      changed_.notify_all();
    }
  }

  void save(std::size_t block, const Staging& staging) {
    const auto pieces = backup_.blocks.pieces(block);
    for (const Blocks::Piece& piece : pieces)
      staging.each(piece.in_block, piece.size, [&](std::byte* host, std::size_t done, std::size_t size) {
        driver_.copy_out(host, piece.offset + done, size);
      });
    driver_.wait(driver_.mark(Direction::out));
    backup_.save(block, staging.data());
    std::lock_guard lock(mutex_);
    backup_.saved.add(ranges_of(pieces));
  }

  void load(std::size_t block, const Staging& staging) {
    backup_.load(block, staging.data());
    const auto pieces = backup_.blocks.pieces(block);
    const Ranges here = intersect(ranges_, ranges_of(pieces));
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || there_.covers(here); });
      if (stopped_) return;
    }
    for (const Blocks::Piece& piece : pieces)
      for (const Range& part : intersect(here, {{piece.offset, piece.size}}))
        staging.each(piece.in_block + (part.offset - piece.offset), part.size,
                     [&](const std::byte* host, std::size_t done, std::size_t size) {
                       driver_.copy_in(part.offset + done, host, size);
                     });
    driver_.wait(driver_.mark(Direction::in));
    std::lock_guard lock(mutex_);
    arrived_ += bytes_of(here);
  }

  DiskBackup& backup_;
  Driver& driver_;
  const Direction direction_;
  const Ranges ranges_;
  std::vector<std::size_t> blocks_;
  std::vector<std::unique_ptr<Staging>> staging_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards the following, and `saved` of the backup
  std::condition_variable changed_;
  std::size_t next_ = 0, finished_ = 0;  // blocks
  std::size_t arrived_ = 0;              // bytes that were loaded since the last arrived()
  RangeSet there_;                       // memory that is accessible
  std::exception_ptr error_;
  bool stopped_ = false;
};

std::unique_ptr<Saver> DiskBackup::saver(Driver& driver, Ranges batches) {
  return std::make_unique<DiskCopies>(*this, driver, Direction::out, std::move(batches));
}

std::unique_ptr<Loader> DiskBackup::loader(Driver& driver, Ranges wanted) {
  auto copies = std::make_unique<DiskCopies>(*this, driver, Direction::in, std::move(wanted));
  copies->start({});
  return copies;
}

}  // namespace

std::shared_ptr<Backup> disk_backup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts) {
  return std::make_shared<DiskBackup>(staging, store, directory, std::move(parts));
}

std::unique_ptr<ScratchFile> DiskStore::take(const std::string& directory, std::size_t bytes) {
  std::unique_ptr<ScratchFile> file = take_idle(directory, bytes);
  for (bool again = true; file == nullptr || file->size() < bytes; again = false) {
    try {
      if (file == nullptr) file = std::make_unique<ScratchFile>(directory);
      file->reserve(bytes);
    } catch (const Error& failure) {
      file = nullptr;  // it may hold a part of the space, which is freed with it
      if (again && release_idle() > 0) continue;
      struct statvfs status{};
      const std::size_t free = ::statvfs(directory.c_str(), &status) == 0 ? status.f_bavail * status.f_frsize : 0;
      const std::size_t held = held_bytes();
      throw BackupError("a backup needs " + std::to_string(bytes) + " bytes in " + directory + ", which has " +
                            std::to_string(free) + " bytes free; this process holds " + std::to_string(held) +
                            " in files: " + failure.what(),
                        bytes, held, free);
    }
  }
  std::lock_guard lock(mutex_);
  held_bytes_ += file->size();
  used_bytes_ += bytes;
  return file;
}

// The smallest file that is large enough, else the largest, for the caller to grow. The caller counts it again.
std::unique_ptr<ScratchFile> DiskStore::take_idle(const std::string& directory, std::size_t bytes) {
  const auto rank = [&](const std::unique_ptr<ScratchFile>& file) {
    const bool fits = file->size() >= bytes;
    return std::tuple(file->directory != directory, !fits, fits ? file->size() : bytes - file->size());
  };
  std::lock_guard lock(mutex_);
  const auto best = std::min_element(idle_.begin(), idle_.end(),
                                     [&](const auto& one, const auto& other) { return rank(one) < rank(other); });
  if (best == idle_.end() || (*best)->directory != directory) return nullptr;
  std::unique_ptr<ScratchFile> found = std::move(*best);
  idle_.erase(best);
  held_bytes_ -= found->size();
  return found;
}

void DiskStore::put(std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  used_bytes_ -= bytes;
  const std::size_t size = file->size();
  try {
    idle_.push_back(std::move(file));
  } catch (const std::exception&) {
    held_bytes_ -= size;  // the file is closed instead
  }
}

std::size_t DiskStore::release_idle() {
  std::vector<std::unique_ptr<ScratchFile>> closed;  // outside the lock: closing takes long
  std::lock_guard lock(mutex_);
  closed.swap(idle_);
  std::size_t bytes = 0;
  for (const auto& file : closed) bytes += file->size();
  held_bytes_ -= bytes;
  return bytes;
}

}  // namespace memsaver
