#include "backup/common_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/waits.h"

namespace memsaver {
namespace {

constexpr std::uint64_t kVersion = 1;  // of the table and of the sums
constexpr std::size_t kMostBlocks = std::size_t{1} << 17;
constexpr std::size_t kTable = 4 * kMiB;  // of the file. Its pages have memory from their first use on
constexpr std::uint32_t kAbsent = 0, kDone = 1, kClaimed = 2;  // the number of the member is added to the last
constexpr auto kJoin = std::chrono::seconds(10);
constexpr auto kLockRetry = std::chrono::milliseconds(1);
constexpr auto kVotes = std::chrono::seconds(2);  // the longest wait for the other members' sums, if some differ

std::string position(std::size_t block) {
  return "block " + std::to_string(block) + " (from byte " + std::to_string(block * Blocks::kSize) +
         " of the contents)";
}

}  // namespace

struct CommonMemory::Head {
  struct Member {
    std::atomic<std::uint64_t> relies;  // on the contents of this epoch; 0: on none
    std::uint64_t differs;              // from the contents of this epoch, at `block`, where it has `sum`
    std::uint64_t block;
    Sum sum;
    std::int32_t pid, rank;  // pid 0: never used
  };
  std::uint64_t version;
  std::atomic<std::uint64_t> epoch;
  std::uint64_t bytes;    // of contents
  std::uint64_t made;     // bytes for blocks that processes have counted as their own
  std::uint64_t sharers;  // members at the begin of the epoch, in `order`: each writes a share
  std::array<std::uint8_t, kMostMembers> order;
  std::array<Member, kMostMembers> members;
};

// A row of the table: the sum of a block's memory, also beyond the end of the contents, and the state of its copy.
struct CommonMemory::Row {
  Sum sum;
  std::atomic<std::uint32_t> state;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// The right to read and change the table. Joins first.
class CommonMemory::Guard : Immovable {
 public:
  Guard(CommonMemory& memory, Deadline deadline) : memory_(memory) {
    for (;;) {
      if (memory.mutex_.try_lock()) {
        try {
          memory.open_lock();
          if (memory.try_lock(0)) break;
        } catch (...) {
          memory.mutex_.unlock();
          throw;
        }
        memory.mutex_.unlock();
      }
      if (now() >= deadline)
        throw WaitTimeoutError("another process holds the lock " + memory.path_ + " of " + memory.what_, "backup", 0);
      if (waiting_is_over()) throw memory.error("the interpreter exits, and another process holds " + memory.path_);
      WaitsEndWith::look();
      sleep_for(kLockRetry);
    }
    try {
      if (memory.head_ == nullptr) memory.join();
    } catch (...) {
      unlock();
      throw;
    }
  }
  ~Guard() { unlock(); }

 private:
  void unlock() {
    struct flock none = of_bytes(F_UNLCK, 0, 1);
    if (memory_.lock_) ::fcntl(memory_.lock_->get(), F_SETLK, &none);
    memory_.mutex_.unlock();
  }

  CommonMemory& memory_;
};

std::shared_ptr<CommonMemory> CommonMemory::of(HostArena& arena, const std::string& path, const std::string& what,
                                               int rank) {
  static std::mutex mutex;
  static std::map<std::pair<const HostArena*, std::string>, std::weak_ptr<CommonMemory>> known;
  const std::lock_guard lock(mutex);
  std::weak_ptr<CommonMemory>& entry = known[{&arena, path}];
  std::shared_ptr<CommonMemory> found = entry.lock();
  if (found == nullptr) entry = found = std::make_shared<CommonMemory>(arena, path, what, rank);
  return found;
}

CommonMemory::CommonMemory(HostArena& arena, std::string path, std::string what, int rank)
    : arena_(arena), path_(std::move(path)), what_(std::move(what)), rank_(rank), pid_(::getpid()) {
  const Guard joins(*this, now() + kJoin);
}

Error CommonMemory::error(const std::string& why) const { return Error(what_ + ": " + why); }

// Members

void CommonMemory::open_lock() {
  if (lock_) return;
  File file(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  if (file.get() < 0) throw error("cannot open " + path_ + ": " + std::strerror(errno));
  lock_.emplace(std::move(file));
}

bool CommonMemory::try_lock(std::size_t byte) const {
  struct flock wanted = of_bytes(F_WRLCK, static_cast<off_t>(byte), 1);
  if (::fcntl(lock_->get(), F_SETLK, &wanted) == 0) return true;
  if (errno == EACCES || errno == EAGAIN || errno == EINTR) return false;
  throw error("cannot lock " + path_ + ": " + std::strerror(errno));
}

pid_t CommonMemory::holder(std::size_t byte) const {
  struct flock found = of_bytes(F_WRLCK, static_cast<off_t>(byte), 1);
  if (::fcntl(lock_->get(), F_GETLK, &found) != 0 || found.l_type == F_UNLCK) return 0;
  return found.l_pid > 0 ? found.l_pid : -1;
}

void CommonMemory::join() {
  std::optional<std::size_t> unused;
  std::optional<File> found;
  for (std::size_t member = 0; member < kMostMembers; ++member) {
    const pid_t pid = holder(member + 1);
    if (pid == 0) {
      if (!unused) unused = member;
    } else if (pid < 0) {
      throw error(
          "a process in another pid namespace has it: run both in one, or give each a job of its own "
          "(MEMSAVER_JOB)");
    } else if (!found) {
      if (File file(open_memory(pid)); file.get() >= 0)
        found.emplace(std::move(file));
      else if (holder(member + 1) != 0)
        throw error("the memory of process " + std::to_string(pid) + " cannot be opened: " + std::strerror(errno));
    }
  }
  if (!unused) throw error("there are " + std::to_string(kMostMembers) + " processes, which is the most");
  const bool is_new = !found;
  if (is_new) {
    const std::string name = path_.substr(path_.rfind('/') + 1);
    found.emplace(::memfd_create(name.c_str(), MFD_CLOEXEC));
    if (found->get() < 0 || ::ftruncate(found->get(), static_cast<off_t>(kTable)) != 0)
      throw error(std::string("cannot make a file in memory: ") + std::strerror(errno));
  }
  memory_.emplace(std::move(*found));
  map_table();
  if (is_new) head_->version = kVersion;
  own_ = *unused;
  const bool is_known = head_->version == kVersion;
  if (!is_known || !try_lock(own_ + 1)) {
    ::munmap(std::exchange(head_, nullptr), kTable);
    memory_.reset();
    throw error(is_known ? "its lock was taken meanwhile" : "other processes have another version of memsaver");
  }
  Head::Member& row = head_->members[own_];
  row.relies = 0;
  row.differs = 0;
  row.pid = pid_;
  row.rank = rank_;
}

int CommonMemory::open_memory(pid_t pid) const {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd/";
  const std::string link = "/memfd:" + path_.substr(path_.rfind('/') + 1) + " ";  // " (deleted)" follows
  const std::unique_ptr<DIR, int (*)(DIR*)> names(::opendir(folder.c_str()), &::closedir);
  while (const dirent* entry = names ? ::readdir(names.get()) : nullptr) {
    std::array<char, 256> target{};
    const std::string path = folder + entry->d_name;
    const ssize_t size = ::readlink(path.c_str(), target.data(), target.size());
    if (size > 0 && std::string(target.data(), static_cast<std::size_t>(size)).starts_with(link))
      return ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  return -1;
}

void CommonMemory::map_table() {
  void* data = ::mmap(nullptr, kTable, PROT_READ | PROT_WRITE, MAP_SHARED, memory_->get(), 0);
  if (data == MAP_FAILED) throw error(std::string("cannot map the table: ") + std::strerror(errno));
  constexpr std::size_t kRows = (sizeof(Head) + 63) / 64 * 64;
  static_assert(kRows + kMostBlocks * sizeof(Row) <= kTable);
  head_ = static_cast<Head*>(data);  // zeros are the begin of all of it
  rows_ = reinterpret_cast<Row*>(static_cast<std::byte*>(data) + kRows);
}

// It needs no lock of the table. Memory that the driver does not let go stays pinned.
std::size_t CommonMemory::leave() noexcept {
  if (::getpid() != pid_) return 0;
  const std::lock_guard lock(mutex_);
  if (head_ == nullptr || head_->members[own_].relies != 0) return 0;
  std::size_t released = 0;
  for (const auto& [position, extent] : std::exchange(slabs_, {}))
    if (arena_.unmap_file(extent)) released += extent.size;
  mapped_ = 0;
  ::munmap(std::exchange(head_, nullptr), kTable);
  // Other processes open the memory of a process that has a lock here. The release of the memory may take long.
  lock_.reset();
  memory_.reset();
  arena_.unreserve(std::exchange(reserved_, 0));
  return released;
}

// Contents

void CommonMemory::rely(std::size_t bytes, const std::vector<Sum>& sums, Deadline deadline) {
  if (sums.size() > kMostBlocks)
    throw BackupError(what_ + ": the most is " + std::to_string(kMostBlocks * Blocks::kSize) + " bytes", bytes, 0, 0);
  const std::size_t needed = sums.size() * Blocks::kSize;
  std::optional<std::size_t> difference;
  std::uint64_t epoch = 0;
  {
    const Guard guard(*this, deadline);
    Members others = present();
    others.reset(own_);
    epoch = head_->epoch;
    Head::Member& row = head_->members[own_];
    if (others.any() && (difference = first_difference(bytes, sums))) {
      row.block = *difference;
      row.sum = *difference < sums.size() ? sums[*difference] : Sum();
      row.differs = epoch;
    } else {
      if (needed > head_->made) {
        const std::size_t more = needed - head_->made;
        arena_.reserve(more);
        if (::ftruncate(memory_->get(), static_cast<off_t>(kTable + needed)) != 0) {
          const int why = errno;
          arena_.unreserve(more);
          throw error(std::string("the file in memory cannot grow: ") + std::strerror(why));
        }
        reserved_ += more;
        head_->made = needed;  // after the file has grown: memory beyond its end ends a process that touches it
      }
      if (others.none()) begin_epoch(bytes, sums);
      row.relies = head_->epoch.load();
    }
  }
  if (difference) refuse(*difference, *difference < sums.size() ? sums[*difference] : Sum(), epoch, deadline);
  try {
    while (mapped_ < needed) {
      const std::size_t size = std::min(HostBudget::kLargestSlab, needed - mapped_);
      slabs_[mapped_] = {arena_.map_file(memory_->get(), kTable + mapped_, size), size};
      mapped_ += size;
    }
  } catch (...) {
    release();
    throw;
  }
}

std::optional<std::size_t> CommonMemory::first_difference(std::size_t bytes, const std::vector<Sum>& sums) const {
  const std::size_t others = (head_->bytes + Blocks::kSize - 1) / Blocks::kSize;
  const std::size_t least = std::min(others, sums.size());
  for (std::size_t block = 0; block < least; ++block)
    if (rows_[block].sum != sums[block]) return block;
  if (bytes == head_->bytes) return std::nullopt;
  return others == sums.size() ? others - 1 : least;
}

// If the process dies in this function, no member relies on the contents, and a row in state kDone has its block's sum.
void CommonMemory::begin_epoch(std::size_t bytes, const std::vector<Sum>& sums) const {
  for (std::size_t block = 0; block < sums.size(); ++block) {
    Row& row = rows_[block];
    if (row.state == kDone && row.sum == sums[block]) continue;
    row.state.exchange(kAbsent);  // the write of the sum comes after it
    row.sum = sums[block];
  }
  head_->bytes = bytes;
  head_->sharers = 0;
  for (std::size_t member = 0; member < kMostMembers; ++member)
    if (head_->members[member].pid != 0 && is_alive(member))
      head_->order[head_->sharers++] = static_cast<std::uint8_t>(member);
  ++head_->epoch;
}

// Waits for the sums of the other members, to find the processes that differ from most of them.
void CommonMemory::refuse(std::size_t block, Sum sum, std::uint64_t epoch, Deadline deadline) {
  struct Vote {
    Sum sum;
    std::pair<int, int> process;
  };
  std::vector<Vote> votes;
  const auto ask = [&](Deadline until) {  // returns whether no vote is missing
    const Guard guard(*this, until);
    if (head_->epoch != epoch) return true;
    votes.clear();
    bool all = true;
    const Sum common = block * Blocks::kSize < head_->bytes ? rows_[block].sum : Sum();
    for (std::size_t member = 0; member < kMostMembers; ++member) {
      const Head::Member& row = head_->members[member];
      if (row.pid == 0 || !is_alive(member)) continue;
      if (row.relies == epoch || (row.differs == epoch && row.block > block))
        votes.push_back({common, {row.pid, row.rank}});
      else if (row.differs == epoch && row.block == block)
        votes.push_back({row.sum, {row.pid, row.rank}});
      else
        all &= row.differs == epoch;
    }
    return all;
  };
  for (const Deadline end = std::min(deadline, now() + kVotes); !ask(end + kVotes) && now() < end;)
    sleep_for(kLockRetry);
  if (votes.empty()) votes.push_back({sum, {pid_, rank_}});
  const auto have = [&](const Vote& wanted) {
    return static_cast<std::size_t>(
        std::count_if(votes.begin(), votes.end(), [&](const Vote& vote) { return vote.sum == wanted.sum; }));
  };
  const Vote most = *std::max_element(votes.begin(), votes.end(),
                                      [&](const Vote& one, const Vote& other) { return have(one) < have(other); });
  const bool others_agree = 2 * have(most) > votes.size() && votes.size() > 1;
  std::vector<std::pair<int, int>> differing;
  for (const Vote& vote : votes)
    if (!others_agree || vote.sum != most.sum) differing.push_back(vote.process);
  throw SameError(what_ + ": the contents of processes differ in " + position(block), block, std::move(differing),
                  others_agree);
}

void CommonMemory::release() noexcept {
  if (::getpid() == pid_ && head_ != nullptr) head_->members[own_].relies = 0;
}

std::byte* CommonMemory::at(std::size_t block) const {
  const auto slab = entry_at(slabs_, block * Blocks::kSize);
  return slab->second.data + (block * Blocks::kSize - slab->first);
}

bool CommonMemory::is_done(std::size_t block) const { return rows_[block].state == kDone; }

void CommonMemory::set_done(std::size_t block) const { rows_[block].state = kDone; }

std::size_t CommonMemory::writer(std::size_t block) const {
  const std::uint32_t state = rows_[block].state;
  return state >= kClaimed ? state - kClaimed : head_->order[block % head_->sharers];
}

bool CommonMemory::claim(std::size_t block) const {
  const auto mine = static_cast<std::uint32_t>(kClaimed + own_);
  std::uint32_t found = rows_[block].state;
  return found != kDone && (found == mine || rows_[block].state.compare_exchange_strong(found, mine));
}

CommonMemory::Members CommonMemory::present() const {
  Members found;
  const std::uint64_t epoch = head_->epoch;
  for (std::size_t member = 0; member < kMostMembers; ++member)
    found[member] = epoch != 0 && head_->members[member].relies == epoch && is_alive(member);
  return found;
}

}  // namespace memsaver
