// The memory use of the host driver's device by process: a table in shared memory, written by all processes of a user.
//
// Crash safety: an entry names its process by pid and start time. A process that runs out of memory removes the entries
// of dead processes. The kernel releases the file lock of a process that dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "driver/driver.h"

namespace memsaver {

// Throws DriverError for the current `errno`.
[[noreturn]] void throw_errno(const char* call);

class HostLedger {
 public:
  // Opens or makes the table of the device of this size. Processes that name the same size share one device.
  explicit HostLedger(std::size_t capacity);
  ~HostLedger();
  HostLedger(const HostLedger&) = delete;
  HostLedger& operator=(const HostLedger&) = delete;

  std::size_t capacity() const { return capacity_; }
  const std::string& uuid() const { return uuid_; }  // of the device, the same in every process
  // Adds an entry for a new chunk; false when the device is full. `inode` identifies the chunk across processes.
  bool charge(std::uint64_t inode, std::size_t size);
  // The memory exists already: never refused. `adopted`: this process is its owner from now on.
  void charge_imported(std::uint64_t inode, std::size_t size, bool adopted = false);
  void discharge(std::uint64_t inode);  // removes one entry of this process
  std::size_t used();
  std::vector<Driver::Process> processes();
  // Each chunk counts for one process: its owner (the maker, else an adopter), else the first that imported it.
  std::vector<Driver::Holding> holdings();

 private:
  struct Header;
  struct Entry;
  class Lock;

  std::size_t used_locked() const;
  void strike_dead_locked();
  enum class Origin : std::uint32_t { made, imported, adopted };  // of an entry; in shared memory
  void enter_locked(std::uint64_t inode, std::size_t size, Origin origin);
  Entry* entries() const;

  std::size_t capacity_;
  std::string uuid_;
  std::size_t entry_count_;
  std::size_t file_size_;
  std::uint64_t start_time_;
  std::string path_;
  int file_ = -1;
  Header* header_ = nullptr;
  std::mutex mutex_;  // excludes other threads; the file lock excludes other processes
};

}  // namespace memsaver
