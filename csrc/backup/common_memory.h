// Host memory that processes of one job have in common, for one copy of contents that are equal in all of them.
//
// A file in memory has a table and the contents, in blocks. It has no name: a process that joins opens it through
// /proc/PID/fd of a member. A lock file in the directory of the job tells the members: each holds the lock of one byte
// until its process ends. The lock of byte 0 guards the table. The system drops the locks of a dead process.
//
// A member relies on the contents from the preparation of a pause until its resume. They do not change while a living
// member relies on them. So all copies to a block write the same bytes, and a copy that is made twice or late does no
// harm. Without such a member the next pause begins an epoch. Blocks that are equal in both epochs stay.
#pragma once

#include <sys/types.h>

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backup/blocks.h"
#include "backup/pinned_memory.h"
#include "base/clock.h"
#include "base/files.h"

namespace memsaver {

class Backup;

class CommonMemory : public std::enable_shared_from_this<CommonMemory>, Immovable {
 public:
  static constexpr std::size_t kMostMembers = 128;
  using Members = std::bitset<kMostMembers>;
  struct Sum {
    std::uint64_t first = 0, second = 0;
    bool operator==(const Sum&) const = default;
  };

  // The only one of the process for this lock file and arena: threads of one process have all locks of a file together,
  // and the end of one descriptor drops them. Joins. `what`: the region and the name, for errors. Throws Error.
  static std::shared_ptr<CommonMemory> of(HostArena& arena, const std::string& path, const std::string& what, int rank);
  CommonMemory(HostArena& arena, std::string path, std::string what, int rank);
  ~CommonMemory() { leave(); }

  // Relies on contents with these sums of blocks, and has memory for them, pinned. Throws SameError if members rely on
  // other contents, WaitTimeoutError, and BackupError. Nothing has changed then. One thread at a time.
  void rely(std::size_t bytes, const std::vector<Sum>& sums, Deadline deadline);
  void release() noexcept;
  // Gives the memory up, unless it relies on it. The next rely() joins again. Returns the bytes that it had pinned.
  std::size_t leave() noexcept;

  // While it relies on the contents:
  std::byte* at(std::size_t block) const;
  bool is_done(std::size_t block) const;
  void set_done(std::size_t block) const;
  std::size_t writer(std::size_t block) const;  // the member that has claimed it; without one, whose share it is
  bool claim(std::size_t block) const;          // false: done, or another member was faster
  Members present() const;                      // living members that rely on the contents
  std::size_t own() const { return own_; }

 private:
  struct Head;
  struct Row;
  class Guard;

  bool try_lock(std::size_t byte) const;
  pid_t holder(std::size_t byte) const;  // 0: none; negative: a process in another pid namespace
  bool is_alive(std::size_t member) const { return member == own_ || holder(member + 1) != 0; }
  void open_lock();
  void join();
  int open_memory(pid_t pid) const;  // -1: the process has none
  void map_table();
  std::optional<std::size_t> first_difference(std::size_t bytes, const std::vector<Sum>& sums) const;
  void begin_epoch(std::size_t bytes, const std::vector<Sum>& sums) const;
  [[noreturn]] void refuse(std::size_t block, Sum sum, std::uint64_t epoch, Deadline deadline);
  Error error(const std::string& why) const;

  HostArena& arena_;
  const std::string path_, what_;
  const int rank_;
  const pid_t pid_;   // a forked child leaves all as it is
  std::mutex mutex_;  // with the lock of byte 0, which the threads of a process have together
  std::optional<File> lock_, memory_;
  std::size_t own_ = 0;
  Head* head_ = nullptr;  // null: not a member
  Row* rows_ = nullptr;
  std::map<std::size_t, HostArena::Extent> slabs_;  // by position in the contents
  std::size_t mapped_ = 0, reserved_ = 0;           // bytes pinned here, and added to the system's memory from here
};

// A backup in this memory, which relies on it until its end. Throws as CommonMemory::rely().
std::shared_ptr<Backup> common_backup(std::shared_ptr<CommonMemory> memory, Ranges parts,
                                      const std::vector<CommonMemory::Sum>& sums, Deadline deadline);

}  // namespace memsaver
