#include "host/ledger.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/files.h"

namespace memsaver::host {
namespace {

constexpr std::uint64_t kMagic = 0x6d656d7361766531;  // also the version of the layout
constexpr std::size_t kSpareEntries = 1024;           // for imports beyond one per chunk

// The start time of a living process in clock ticks since boot, or 0 for a process that has ended or is a zombie.
// nullopt if /proc cannot be read now, for example without a free descriptor: the process must not count as dead then,
// since its memory would be given to others.
std::optional<std::uint64_t> start_time_of(int pid) {
  const std::optional<std::string> text = read_text("/proc/" + std::to_string(pid) + "/stat");
  if (!text) return errno == ENOENT || errno == ESRCH ? std::optional<std::uint64_t>(0) : std::nullopt;
  constexpr int kState = 3, kStartTime = 22;  // fields of /proc/PID/stat, counted from 1; the name is the second
  std::size_t at = text->rfind(')');          // the name may hold spaces and brackets
  for (int field = kState; field <= kStartTime && at != std::string::npos; ++field) {
    at = text->find(' ', at + 1);
    if (field != kState || at == std::string::npos) continue;
    const char state = (*text)[at + 1];
    if (state == 'Z' || state == 'X') return 0;
  }
  return at == std::string::npos ? 0 : std::strtoull(text->c_str() + at + 1, nullptr, 10);
}

std::string ledger_folder() {
  const char* folder = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::getenv("TMPDIR");
  return folder != nullptr ? folder : "/tmp";
}

std::string ledger_names() { return "memsaver." + std::to_string(::getuid()) + "."; }

// A process locks the tables that it uses, so that the last one removes a table. A killed process removes none: the
// next one that opens any table does it.

int lock(int file, int how) {
  int code = 0;
  do code = ::flock(file, how);
  while (code != 0 && errno == EINTR);
  return code;
}

// Opens a file and locks it. A process that ends may have removed it meanwhile.
int open_in_use(const std::string& path) {
  for (;;) {
    File file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.get() < 0) refuse_by_errno("open");
    if (lock(file.get(), LOCK_SH) != 0) refuse_by_errno("flock");
    struct stat status{};
    if (::fstat(file.get(), &status) != 0) refuse_by_errno("fstat");
    if (status.st_uid != ::getuid())
      throw Refused(kOperatingSystem, path + " belongs to user " + std::to_string(status.st_uid));
    if (status.st_nlink > 0) return file.keep();
  }
}

// Removes a file that no process uses. This process uses it no more.
void remove_unused(int file, const std::string& path) {
  struct stat status{};
  if (lock(file, LOCK_EX | LOCK_NB) == 0 && ::fstat(file, &status) == 0 && status.st_nlink > 0) ::unlink(path.c_str());
}

void remove_left() {
  const std::string folder = ledger_folder(), names = ledger_names();
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

// The tables in use, for the exit of the process: their objects are never destroyed.
struct InUse {
  std::mutex mutex;
  std::map<int, std::string> paths;  // by descriptor
  const int pid = ::getpid();        // a forked child shares the locks of its parent
};

InUse& in_use() {
  static auto* all = [] {
    std::atexit([] {
      InUse& left = in_use();
      const std::lock_guard lock(left.mutex);
      if (::getpid() != left.pid) return;
      for (const auto& [file, path] : left.paths) remove_unused(file, path);
    });
    return new InUse;
  }();
  return *all;
}

}  // namespace

void refuse_by_errno(const char* call) {
  const int error = errno;
  throw Refused(error == ENOMEM ? kOutOfMemory : kOperatingSystem, std::string(call) + ": " + std::strerror(error));
}

struct Ledger::Header {
  std::uint64_t magic;
  std::uint64_t high_water;  // entries beyond it were never used
};

struct Ledger::Entry {
  std::uint64_t inode;
  std::uint64_t size;
  std::uint64_t start_time;
  Origin origin;
  std::uint32_t pid;  // 0: free. Written last, cleared first: an entry that a crash interrupts is free.
};

class Ledger::Lock {
 public:
  explicit Lock(Ledger& ledger) : ledger_(ledger), guard_(ledger.mutex_) {
    while (set(F_WRLCK) != 0)
      if (errno != EINTR) refuse_by_errno("fcntl");
  }
  ~Lock() { set(F_UNLCK); }

 private:
  // Not flock(): its lock belongs to the open file, so a forked child keeps it after the death of its parent.
  int set(short type) {
    struct flock whole_file{};
    whole_file.l_type = type;
    whole_file.l_whence = SEEK_SET;
    return ::fcntl(ledger_.file_, F_SETLKW, &whole_file);
  }

  Ledger& ledger_;
  std::lock_guard<std::mutex> guard_;
};

Ledger::Ledger(std::size_t capacity)
    : capacity_(capacity),
      entry_count_(2 * (capacity / kGranularity) + kSpareEntries),
      file_size_(sizeof(Header) + entry_count_ * sizeof(Entry)),
      start_time_(start_time_of(::getpid()).value_or(0)) {
  if (start_time_ == 0) throw Refused(kOperatingSystem, "/proc has no start time of this process");
  const auto boot = read_text("/proc/sys/kernel/random/boot_id");
  if (!boot) refuse_by_errno("open");
  name_ = boot->substr(0, boot->find('\n')) + "-" + std::to_string(::getuid()) + "-" + std::to_string(capacity_);
  static const bool once = (remove_left(), true);
  static_cast<void>(once);
  path_ = ledger_folder() + "/" + ledger_names() + std::to_string(capacity);
  file_ = open_in_use(path_);
  {
    InUse& all = in_use();
    const std::lock_guard lock(all.mutex);
    all.paths[file_] = path_;
  }
  struct stat status{};
  if (::fstat(file_, &status) != 0) refuse_by_errno("fstat");
  if (static_cast<std::size_t>(status.st_size) < file_size_ && ::ftruncate(file_, static_cast<off_t>(file_size_)) != 0)
    refuse_by_errno("ftruncate");
  void* memory = ::mmap(nullptr, file_size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) refuse_by_errno("mmap");
  header_ = static_cast<Header*>(memory);
  Lock lock(*this);
  if (header_->magic != kMagic) {
    std::memset(memory, 0, sizeof(Header));
    header_->magic = kMagic;
  }
}

Ledger::~Ledger() {
  if (header_ != nullptr) ::munmap(header_, file_size_);
  InUse& all = in_use();
  const std::lock_guard lock(all.mutex);
  all.paths.erase(file_);
  if (::getpid() == all.pid) remove_unused(file_, path_);
  ::close(file_);
}

Ledger::Entry* Ledger::entries() const { return reinterpret_cast<Entry*>(header_ + 1); }

bool Ledger::charge(std::uint64_t inode, std::size_t size) {
  Lock lock(*this);
  if (used_locked() + size > capacity_) {
    strike_dead_locked();
    if (used_locked() + size > capacity_) return false;
  }
  enter_locked(inode, size, Origin::made);
  return true;
}

void Ledger::charge_imported(std::uint64_t inode, std::size_t size) {
  Lock lock(*this);
  enter_locked(inode, size, Origin::imported);
}

void Ledger::adopt(std::uint64_t inode) {
  Lock lock(*this);
  Entry* table = entries();
  for (std::size_t i = 0; i < header_->high_water; ++i)
    if (table[i].pid == static_cast<std::uint32_t>(::getpid()) && table[i].inode == inode)
      table[i].origin = Origin::adopted;
}

void Ledger::enter_locked(std::uint64_t inode, std::size_t size, Origin origin) {
  Entry* table = entries();
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (std::size_t i = 0; i < entry_count_; ++i) {
      if (table[i].pid != 0) continue;
      table[i].inode = inode;
      table[i].size = size;
      table[i].start_time = start_time_;
      table[i].origin = origin;
      __atomic_store_n(&table[i].pid, static_cast<std::uint32_t>(::getpid()), __ATOMIC_RELEASE);
      if (i >= header_->high_water) header_->high_water = i + 1;
      return;
    }
    strike_dead_locked();
  }
  throw Refused(kOperatingSystem, "the host device's ledger has no free entry");
}

void Ledger::discharge(std::uint64_t inode) {
  Lock lock(*this);
  Entry* table = entries();
  const auto pid = static_cast<std::uint32_t>(::getpid());
  for (std::size_t i = 0; i < header_->high_water; ++i) {
    if (table[i].pid != pid || table[i].inode != inode) continue;
    table[i].pid = 0;
    break;
  }
  while (header_->high_water > 0 && table[header_->high_water - 1].pid == 0) --header_->high_water;
}

std::size_t Ledger::used() {
  Lock lock(*this);
  strike_dead_locked();
  return used_locked();
}

std::size_t Ledger::used_locked() const {
  const Entry* table = entries();
  std::size_t bytes = 0;
  bool any_imported = false;
  for (std::size_t i = 0; i < header_->high_water; ++i) {
    if (table[i].pid == 0) continue;
    if (table[i].origin == Origin::made) bytes += table[i].size;
    any_imported = any_imported || table[i].origin != Origin::made;
  }
  if (!any_imported) return bytes;
  // A chunk that several processes hold counts once, as long as one of them holds it.
  std::unordered_set<std::uint64_t> seen;
  bytes = 0;
  for (std::size_t i = 0; i < header_->high_water; ++i)
    if (table[i].pid != 0 && seen.insert(table[i].inode).second) bytes += table[i].size;
  return bytes;
}

void Ledger::strike_dead_locked() {
  Entry* table = entries();
  std::map<std::uint32_t, std::optional<std::uint64_t>> alive;  // pid -> start time
  for (std::size_t i = 0; i < header_->high_water; ++i) {
    const std::uint32_t pid = table[i].pid;
    if (pid == 0) continue;
    auto [found, inserted] = alive.try_emplace(pid, 0);
    if (inserted) found->second = start_time_of(static_cast<int>(pid));
    const bool dead = found->second && *found->second != table[i].start_time;
    if (dead) table[i].pid = 0;
  }
}

std::vector<cuda::Process> Ledger::processes() {
  Lock lock(*this);
  strike_dead_locked();
  std::map<int, std::size_t> bytes;
  const Entry* table = entries();
  for (std::size_t i = 0; i < header_->high_water; ++i)
    if (table[i].pid != 0) bytes[static_cast<int>(table[i].pid)] += table[i].size;
  std::vector<cuda::Process> found;
  for (const auto& [pid, held] : bytes) found.push_back({pid, held});
  return found;
}

std::vector<cuda::Holding> Ledger::holdings() {
  Lock lock(*this);
  strike_dead_locked();
  const auto rank = [](const Entry& entry) {
    return entry.origin == Origin::made ? 0 : entry.origin == Origin::adopted ? 1 : 2;
  };
  std::unordered_map<std::uint64_t, const Entry*> owners;  // by the chunk
  const Entry* table = entries();
  for (std::size_t i = 0; i < header_->high_water; ++i) {
    if (table[i].pid == 0) continue;
    const Entry*& owner = owners[table[i].inode];
    const bool is_owner = owner == nullptr || rank(table[i]) < rank(*owner);
    if (is_owner) owner = &table[i];
  }
  std::map<int, cuda::Holding> found;
  for (const auto& [inode, entry] : owners) {
    const int pid = static_cast<int>(entry->pid);
    cuda::Holding& holding = found.try_emplace(pid, cuda::Holding{pid, 0, 0}).first->second;
    holding.bytes += entry->size;
    if (entry->origin == Origin::imported) *holding.imported += entry->size;  // its owner has ended
  }
  std::vector<cuda::Holding> rows;
  for (const auto& [pid, holding] : found) rows.push_back(holding);
  return rows;
}

}  // namespace memsaver::host
