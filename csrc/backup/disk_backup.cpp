#include "backup/disk_backup.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <semaphore>
#include <system_error>
#include <thread>
#include <utility>

namespace memsaver {
namespace {

constexpr std::size_t kThreads = 6;     // each with a block of pinned memory
constexpr std::ptrdiff_t kReaders = 2;  // of them, at a time: enough to keep the disk busy, with reads nearly in order
constexpr int kAttempts = 2;            // a failed file call is tried once more

std::uint64_t word(const std::byte* data) {
  std::uint64_t found = 0;
  std::memcpy(&found, data, sizeof found);
  return found;
}

// 64-bit FNV-1a over words, in four lanes whose multiplications overlap: faster than a disk. Sizes are whole pages.
std::uint64_t checksum(const std::byte* data, std::size_t size) {
  constexpr std::uint64_t kBasis = 0xcbf29ce484222325, kPrime = 0x100000001b3;
  std::uint64_t a = kBasis, b = kBasis + 1, c = kBasis + 2, d = kBasis + 3;
  for (const std::byte* end = data + size; data < end; data += 32) {
    a = (a ^ word(data)) * kPrime;
    b = (b ^ word(data + 8)) * kPrime;
    c = (c ^ word(data + 16)) * kPrime;
    d = (d ^ word(data + 24)) * kPrime;
  }
  std::uint64_t sum = kBasis;
  for (const std::uint64_t lane : {a, b, c, d}) {
    sum = (sum ^ (lane & 0xffffffff)) * kPrime;
    sum = (sum ^ (lane >> 32)) * kPrime;
  }
  return sum;
}

// A block of pinned memory, on loan from the arena.
class Staging {
 public:
  explicit Staging(HostArena& arena) : arena_(arena), extent_(arena.take_whole(DiskBackup::kBlock)) {}
  ~Staging() { arena_.put(extent_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
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

// A block of memory that is not pinned: it needs no driver call.
struct Free {
  void operator()(std::byte* block) const { ::operator delete(block, std::align_val_t{kFileAlignment}); }
};
using PlainBlock = std::unique_ptr<std::byte, Free>;

PlainBlock plain_block() {
  return PlainBlock(
      static_cast<std::byte*>(::operator new(DiskBackup::kBlock, std::align_val_t{kFileAlignment}, std::nothrow)));
}

// Threads that process blocks. The first error stops all of them.
class Crew {
 public:
  virtual ~Crew() = default;

 protected:
  Crew(DiskBackup& backup, Driver& driver, Address base, Progress& progress)
      : backup_(backup), driver_(driver), base_(base), progress_(progress) {}

  // Reserves the memory, before any thread starts.
  void begin() {
    threads_.reserve(kThreads);
    for (std::size_t i = 0; i < std::min(kThreads, blocks_.size()); ++i) {
      try {
        staging_.push_back(std::make_unique<Staging>(backup_.staging()));
      } catch (const BackupError&) {
        if (staging_.empty()) throw;
        break;  // fewer do as well
      }
    }
    for (const auto& staging : staging_) {
      try {
        threads_.emplace_back([this, memory = staging.get()] { run(*memory); });
      } catch (const std::system_error& error) {
        if (threads_.empty()) throw Error(std::string("no thread for the files of a backup: ") + error.what());
        return;  // fewer do as well
      }
    }
  }

  void stop() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  virtual void work(std::size_t block, Staging& staging) = 0;

  DiskBackup& backup_;
  Driver& driver_;
  const Address base_;
  Progress& progress_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::size_t finished_ = 0;  // blocks
  std::vector<std::size_t> blocks_;

 private:
  void run(Staging& staging) {
    std::unique_lock lock(mutex_);
    while (!stopped_ && next_ < blocks_.size()) {
      const std::size_t block = blocks_[next_++];
      lock.unlock();
      std::exception_ptr error;
      try {
        work(block, staging);
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

  std::size_t next_ = 0;
  std::vector<std::unique_ptr<Staging>> staging_;
  std::vector<std::thread> threads_;
};

class DiskSaver final : public Saver, private Crew {
 public:
  DiskSaver(DiskBackup& backup, Driver& driver, Address base, Ranges batches, Progress& progress)
      : Crew(backup, driver, base, progress), batches_(std::move(batches)) {
    for (std::size_t block = 0; block < backup.blocks(); ++block)
      if (!backup.saved.covers(backup.ranges(block))) blocks_.push_back(block);
  }
  ~DiskSaver() override { stop(); }

  void start() override { begin(); }

  void wait(std::size_t batch) override {
    const Ranges contents = intersect(backup_.parts(), {batches_[batch]});
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || backup_.saved.covers(contents); });
    if (!backup_.saved.covers(contents)) std::rethrow_exception(error_);
  }

 private:
  void work(std::size_t block, Staging& staging) override {
    const auto pieces = backup_.pieces(block);
    for (int attempt = 1;; ++attempt) {
      try {
        for (const DiskBackup::Piece& piece : pieces)
          staging.each(piece.in_block, piece.size, [&](std::byte* host, std::size_t done, std::size_t size) {
            driver_.copy_out(host, base_ + piece.offset + done, size);
          });
        driver_.wait(driver_.mark(Direction::out));
        backup_.write(block, staging.data());
        break;
      } catch (const Error&) {
        drain_copies(driver_);
        if (attempt == kAttempts) throw;
      }
    }
    const Ranges ranges = backup_.ranges(block);
    {
      std::lock_guard lock(mutex_);
      for (const Range& range : ranges) backup_.saved.add(range);
    }
    progress_.add(bytes_of(ranges));
  }

  const Ranges batches_;
};

// Holds one of the permits of a semaphore while it lives.
class Turn {
 public:
  explicit Turn(std::counting_semaphore<>& allowed) : allowed_(allowed) { allowed_.acquire(); }
  ~Turn() { allowed_.release(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::counting_semaphore<>& allowed_;
};

class DiskLoader final : public Loader, private Crew {
 public:
  DiskLoader(DiskBackup& backup, Driver& driver, Address base, Ranges wanted, Progress& progress)
      : Crew(backup, driver, base, progress), wanted_(std::move(wanted)) {
    for (std::size_t block = 0; block < backup.blocks(); ++block)
      if (!intersect(wanted_, backup.ranges(block)).empty()) blocks_.push_back(block);
    begin();
  }
  ~DiskLoader() override { stop(); }

  void add(Range memory) override {
    std::lock_guard lock(mutex_);
    there_.add(memory);
    changed_.notify_all();
  }

  void finish() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ || finished_ == blocks_.size(); });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work(std::size_t block, Staging& staging) override {
    for (int attempt = 1;; ++attempt) {
      try {
        {
          const Turn turn(readers_);
          backup_.read(block, staging.data());
        }
        backup_.check(block, staging.data());
        break;
      } catch (const Error&) {
        if (attempt == kAttempts) throw;
      }
    }
    const Ranges here = intersect(wanted_, backup_.ranges(block));
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || there_.covers(here); });
      if (stopped_) return;
    }
    for (const DiskBackup::Piece& piece : backup_.pieces(block))
      for (const Range& part : intersect(here, {{piece.offset, piece.size}}))
        staging.each(piece.in_block + (part.offset - piece.offset), part.size,
                     [&](const std::byte* host, std::size_t done, std::size_t size) {
                       driver_.copy_in(base_ + part.offset + done, host, size);
                     });
    driver_.wait(driver_.mark(Direction::in));
    progress_.add(bytes_of(here));
  }

  const Ranges wanted_;
  std::counting_semaphore<> readers_{kReaders};
  RangeSet there_;  // memory that is accessible
};

}  // namespace

DiskBackup::DiskBackup(HostArena& staging, DiskStore& store, const std::string& directory, Ranges parts)
    : Backup(std::move(parts)), staging_(staging), store_(store), directory_(directory) {
  std::size_t position = 0;
  for (const Range& run : runs()) {
    positions_.push_back(position);
    position += run.size;
  }
  checksums_.resize((bytes() + kBlock - 1) / kBlock);
  file_ = store_.take(directory_, round_up(bytes(), kFileAlignment));
}

DiskBackup::~DiskBackup() { store_.put(directory_, std::move(file_), round_up(bytes(), kFileAlignment)); }

BackupError DiskBackup::error(const std::string& what) const {
  return BackupError("a backup of " + std::to_string(bytes()) + " bytes in " + directory_ + ": " + what, bytes(),
                     store_.held_bytes(), 0);
}

std::size_t DiskBackup::size_of(std::size_t block) const {
  return round_up(std::min(kBlock, bytes() - block * kBlock), kFileAlignment);
}

std::vector<DiskBackup::Piece> DiskBackup::pieces(std::size_t block) const {
  const std::size_t begin = block * kBlock, end = std::min(bytes(), begin + kBlock);
  auto run =
      static_cast<std::size_t>(std::upper_bound(positions_.begin(), positions_.end(), begin) - positions_.begin());
  std::vector<Piece> found;
  for (--run; run < positions_.size() && positions_[run] < end; ++run) {
    const std::size_t from = std::max(begin, positions_[run]);
    const std::size_t to = std::min(end, positions_[run] + runs()[run].size);
    found.push_back({runs()[run].offset + (from - positions_[run]), to - from, from - begin});
  }
  return found;
}

Ranges DiskBackup::ranges(std::size_t block) const {
  Ranges found;
  for (const Piece& piece : pieces(block)) found.push_back({piece.offset, piece.size});
  return found;
}

void DiskBackup::write(std::size_t block, std::byte* memory) {
  const std::size_t used = std::min(kBlock, bytes() - block * kBlock), size = size_of(block);
  std::memset(memory + used, 0, size - used);
  checksums_[block] = checksum(memory, size);
  try {
    file_->write(memory, size, block * kBlock);
  } catch (const Error& failure) {
    throw error(failure.what());
  }
}

void DiskBackup::read(std::size_t block, std::byte* memory) {
  try {
    file_->read(memory, size_of(block), block * kBlock);
  } catch (const Error& failure) {
    throw error(failure.what());
  }
}

void DiskBackup::check(std::size_t block, const std::byte* memory) const {
  if (checksum(memory, size_of(block)) != checksums_[block])
    throw error("the checksum of the file's block at byte " + std::to_string(block * kBlock) +
                " differs from the one that was written");
}

std::unique_ptr<Saver> DiskBackup::saver(Driver& driver, Address base, Ranges batches, Progress& progress) {
  return std::make_unique<DiskSaver>(*this, driver, base, std::move(batches), progress);
}

std::unique_ptr<Loader> DiskBackup::loader(Driver& driver, Address base, Ranges wanted, Progress& progress) {
  return std::make_unique<DiskLoader>(*this, driver, base, std::move(wanted), progress);
}

std::byte* DiskBackup::view(Range) { throw error("the contents are in a file: use clone=True"); }

void DiskBackup::read(Range range, std::byte* to) {
  const PlainBlock memory = plain_block();
  if (memory == nullptr) throw error("the system has no memory for a block of it");
  for (std::size_t block = 0; block < blocks(); ++block) {
    const Ranges here = intersect(ranges(block), {range});
    if (here.empty()) continue;
    read(block, memory.get());
    check(block, memory.get());
    for (const Piece& piece : pieces(block))
      for (const Range& part : intersect(here, {{piece.offset, piece.size}}))
        std::memcpy(to + (part.offset - range.offset), memory.get() + piece.in_block + (part.offset - piece.offset),
                    part.size);
  }
}

std::unique_ptr<ScratchFile> DiskStore::take(const std::string& directory, std::size_t bytes) {
  std::unique_ptr<ScratchFile> file;
  {
    std::lock_guard lock(mutex_);
    file = take_idle_locked(directory, bytes);
  }
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
                            " there: " + failure.what(),
                        bytes, held, free);
    }
  }
  std::lock_guard lock(mutex_);
  lent_bytes_ += file->size();
  used_bytes_ += bytes;
  return file;
}

// The smallest file that is large enough, else the largest, for the caller to grow.
std::unique_ptr<ScratchFile> DiskStore::take_idle_locked(const std::string& directory, std::size_t bytes) {
  auto& files = idle_[directory];
  auto best = files.end();
  for (auto file = files.begin(); file != files.end(); ++file) {
    const bool fits = (*file)->size() >= bytes, best_fits = best != files.end() && (*best)->size() >= bytes;
    const bool smaller = best != files.end() && (*file)->size() < (*best)->size();
    if (best == files.end() || (fits ? !best_fits || smaller : !best_fits && !smaller)) best = file;
  }
  if (best == files.end()) return nullptr;
  std::unique_ptr<ScratchFile> found = std::move(*best);
  files.erase(best);
  idle_bytes_ -= found->size();
  return found;
}

void DiskStore::put(const std::string& directory, std::unique_ptr<ScratchFile> file, std::size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  const std::size_t size = file->size();
  lent_bytes_ -= size;
  used_bytes_ -= bytes;
  try {
    idle_[directory].push_back(std::move(file));
    idle_bytes_ += size;
  } catch (const std::exception&) {
    // The file is closed instead.
  }
}

std::size_t DiskStore::release_idle() {
  std::map<std::string, std::vector<std::unique_ptr<ScratchFile>>> closed;  // outside the lock: closing takes long
  std::lock_guard lock(mutex_);
  closed.swap(idle_);
  return std::exchange(idle_bytes_, 0);
}

std::size_t DiskStore::held_bytes() const {
  std::lock_guard lock(mutex_);
  return idle_bytes_ + lent_bytes_;
}

std::size_t DiskStore::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace memsaver
