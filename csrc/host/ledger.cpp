#include "host/ledger.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "base/files.h"

namespace memsaver::host {
namespace {

constexpr std::size_t kSpareEntries = 1024;  // for imports beyond one per chunk

std::string folder_of_tables() {
  const char* folder = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::getenv("TMPDIR");
  return folder != nullptr ? folder : "/tmp";
}

// The first number is the version of the layout.
std::string names_of_tables() { return "memsaver.2." + std::to_string(::getuid()) + "."; }

// Locks of bytes, which belong to a process: a forked child has none of them, and the kernel releases those of a
// process that dies. They also end when the process closes any descriptor of the file.

constexpr off_t kOpening = 0;  // held while a process opens or removes the table
constexpr off_t kTable = 1;    // held while the table is read or changes
constexpr off_t kAlive = 2;    // and `pid` more bytes: held by this process while it uses the table

void set_lock(int file, short type, off_t at) {
  struct flock byte = of_bytes(type, at, 1);
  while (::fcntl(file, F_SETLKW, &byte) != 0)
    if (errno != EINTR) refuse_by_errno("fcntl");
}

// Whether another process holds a lock of these bytes.
bool is_locked(int file, off_t begin, off_t count) {
  struct flock bytes = of_bytes(F_WRLCK, begin, count);
  return ::fcntl(file, F_GETLK, &bytes) != 0 || bytes.l_type != F_UNLCK;
}

struct stat status_of(int file) {
  struct stat status{};
  if (::fstat(file, &status) != 0) refuse_by_errno("fstat");
  return status;
}

// Removes a table that no other process uses. This process uses it no more.
void remove_unused(int file, const std::string& path) {
  try {
    set_lock(file, F_WRLCK, kOpening);
    if (!is_locked(file, kAlive, 0) && status_of(file).st_nlink > 0) ::unlink(path.c_str());
    set_lock(file, F_UNLCK, kOpening);
  } catch (const Refused&) {
    // The next process that opens a table removes it.
  }
}

// A killed process removes no table: the next one that opens any table does it.
void remove_left() {
  const std::string folder = folder_of_tables(), names = names_of_tables();
  DIR* listed = ::opendir(folder.c_str());
  if (listed == nullptr) return;
  while (const dirent* entry = ::readdir(listed)) {
    if (!std::string_view(entry->d_name).starts_with(names)) continue;
    const std::string path = folder + "/" + entry->d_name;
    const File file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (file.get() >= 0) remove_unused(file.get(), path);
  }
  ::closedir(listed);
}

// Opens a table, which stays in use until the process ends.
int open_in_use(const std::string& path) {
  for (;;) {
    File file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) refuse_by_errno("open");
    set_lock(file.get(), F_WRLCK, kOpening);
    const struct stat status = status_of(file.get());
    if (status.st_uid != ::getuid())
      throw Refused(kOperatingSystem, path + " belongs to user " + std::to_string(status.st_uid));
    if (status.st_nlink == 0) continue;  // a process that ended has removed it meanwhile
    if (is_locked(file.get(), kAlive + ::getpid(), 1))
      throw Refused(kOperatingSystem, "a process in another pid namespace uses " + path);
    set_lock(file.get(), F_WRLCK, kAlive + ::getpid());
    set_lock(file.get(), F_UNLCK, kOpening);
    return file.keep();
  }
}

// The tables of this process, to be removed at its exit: ledgers are never destroyed.
struct Tables {
  std::mutex mutex;
  std::map<int, std::string> paths;  // by descriptor
};

Tables& tables() {
  static auto* all = [] {
    remove_left();  // before this process has a table, whose locks would end
    std::atexit([] {
      const std::lock_guard lock(tables().mutex);
      for (const auto& [file, path] : tables().paths) remove_unused(file, path);
    });
    return new Tables;
  }();
  return *all;
}

}  // namespace

void refuse_by_errno(const char* call) {
  const int error = errno;
  throw Refused(error == ENOMEM ? kOutOfMemory : kOperatingSystem, std::string(call) + ": " + std::strerror(error));
}

class Ledger::Lock {
 public:
  explicit Lock(Ledger& ledger) : ledger_(ledger), guard_(ledger.mutex_) { set_lock(ledger_.file_, F_WRLCK, kTable); }
  ~Lock() { set_lock(ledger_.file_, F_UNLCK, kTable); }

 private:
  Ledger& ledger_;
  std::lock_guard<std::mutex> guard_;
};

Ledger::Ledger(std::size_t capacity)
    : capacity_(capacity), entry_count_(2 * (capacity / kGranularity) + kSpareEntries) {
  const std::string path = folder_of_tables() + "/" + names_of_tables() + std::to_string(capacity);
  {
    const std::lock_guard lock(tables().mutex);
    file_ = open_in_use(path);
    tables().paths[file_] = path;
  }
  const std::size_t size = sizeof(Header) + entry_count_ * sizeof(Entry);
  // Reserves the space: on a full file system a write to the mapping would end the process.
  while (static_cast<std::size_t>(status_of(file_).st_size) < size) {
    errno = ::posix_fallocate(file_, 0, static_cast<off_t>(size));
    if (errno != 0 && errno != EINTR) refuse_by_errno("posix_fallocate");
  }
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) refuse_by_errno("mmap");
  header_ = static_cast<Header*>(memory);
  const Lock lock(*this);
  for (Entry& each : *this)
    if (each.pid == static_cast<std::uint32_t>(::getpid())) each.pid = 0;  // of a dead process of this number
}

bool Ledger::charge(std::uint64_t inode, std::size_t size) {
  const Lock lock(*this);
  if (used_locked() + size > capacity_) {
    strike_dead_locked();
    if (used_locked() + size > capacity_) return false;
  }
  enter_locked(inode, size, true);
  return true;
}

void Ledger::charge_imported(std::uint64_t inode, std::size_t size) {
  const Lock lock(*this);
  enter_locked(inode, size, false);
}

void Ledger::enter_locked(std::uint64_t inode, std::size_t size, bool is_owner) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (Entry* each = begin(); each != begin() + entry_count_; ++each) {
      if (each->pid != 0) continue;
      each->inode = inode;
      each->size = size;
      each->is_owner = is_owner;
      __atomic_store_n(&each->pid, static_cast<std::uint32_t>(::getpid()), __ATOMIC_RELEASE);
      if (each >= end()) header_->high_water = static_cast<std::uint64_t>(each - begin()) + 1;
      return;
    }
    strike_dead_locked();
  }
  throw Refused(kOperatingSystem, "the host device's ledger has no free entry");
}

void Ledger::discharge(std::uint64_t inode) {
  const Lock lock(*this);
  Entry* own = std::find_if(begin(), end(), [&](const Entry& each) {
    return each.pid == static_cast<std::uint32_t>(::getpid()) && each.inode == inode;
  });
  if (own != end()) own->pid = 0;
  while (header_->high_water > 0 && (end() - 1)->pid == 0) --header_->high_water;
}

std::size_t Ledger::free_bytes() {
  const Lock lock(*this);
  strike_dead_locked();
  return capacity_ - std::min(used_locked(), capacity_);
}

std::unordered_map<std::uint64_t, const Ledger::Entry*> Ledger::owners_locked() const {
  std::unordered_map<std::uint64_t, const Entry*> owners;
  for (const Entry& each : *this) {
    if (each.pid == 0) continue;
    const Entry*& owner = owners[each.inode];
    if (owner == nullptr || each.is_owner > owner->is_owner) owner = &each;
  }
  return owners;
}

std::size_t Ledger::used_locked() const {
  std::size_t bytes = 0;
  for (const auto& [inode, entry] : owners_locked()) bytes += entry->size;
  return bytes;
}

void Ledger::strike_dead_locked() {
  std::map<std::uint32_t, bool> lives = {{static_cast<std::uint32_t>(::getpid()), true}};
  for (Entry& each : *this) {
    if (each.pid == 0) continue;
    const auto [found, is_new] = lives.try_emplace(each.pid, false);
    if (is_new) found->second = is_locked(file_, kAlive + static_cast<off_t>(each.pid), 1);
    if (!found->second) each.pid = 0;
  }
}

std::vector<cuda::Holding> Ledger::holdings() {
  const Lock lock(*this);
  strike_dead_locked();
  std::map<int, cuda::Holding> found;
  for (const auto& [inode, entry] : owners_locked()) {
    const int pid = static_cast<int>(entry->pid);
    cuda::Holding& holding = found.try_emplace(pid, cuda::Holding{pid, 0, 0}).first->second;
    holding.bytes += entry->size;
    if (entry->is_owner == 0) *holding.imported += entry->size;  // its owner has ended
  }
  std::vector<cuda::Holding> rows;
  for (const auto& [pid, holding] : found) rows.push_back(holding);
  return rows;
}

}  // namespace memsaver::host
