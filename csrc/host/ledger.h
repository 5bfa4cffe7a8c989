// The memory use of the host device by process: a table in shared memory, written by all processes of a user.
//
// Crash safety: an entry names its process by pid and start time. A process that runs out of memory removes the entries
// of dead processes. The kernel releases the file lock of a process that dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/cuda_api.h"

namespace memsaver::host {

constexpr std::size_t kGranularity = std::size_t{2} << 20;  // of mappings and of chunks

// CUDA's codes for the errors of the host device.
constexpr cuda::Result kInvalidValue = 1;
constexpr cuda::Result kOutOfMemory = 2;
constexpr cuda::Result kInvalidDevice = 101;
constexpr cuda::Result kInvalidContext = 201;
constexpr cuda::Result kOperatingSystem = 304;
constexpr cuda::Result kIllegalAddress = 700;
constexpr cuda::Result kAlreadyRegistered = 712;
constexpr cuda::Result kNotRegistered = 713;

// A call cannot be made. The entry points return its code (device.cpp).
struct Refused : std::runtime_error {
  Refused(cuda::Result result, const std::string& why) : std::runtime_error(why), code(result) {}
  cuda::Result code;
};
[[noreturn]] void refuse_by_errno(const char* call);  // for the current `errno`

class Ledger {
 public:
  // Opens or makes the table of the device of this size. Processes that name the same size share one device.
  explicit Ledger(std::size_t capacity);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  std::size_t capacity() const { return capacity_; }
  const std::string& name() const { return name_; }  // of the device, the same in every process
  // Adds an entry for a new chunk; false when the device is full. `inode` identifies the chunk across processes.
  bool charge(std::uint64_t inode, std::size_t size);
  void charge_imported(std::uint64_t inode, std::size_t size);  // the memory exists already: never refused
  void adopt(std::uint64_t inode);      // this process is the owner of imported memory from now on
  void discharge(std::uint64_t inode);  // removes one entry of this process
  std::size_t used();
  std::vector<cuda::Process> processes();
  // Each chunk counts for one process: its owner (the maker, else an adopter), else the first that imported it.
  std::vector<cuda::Holding> holdings();

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
  std::string name_;
  std::size_t entry_count_;
  std::size_t file_size_;
  std::uint64_t start_time_;
  std::string path_;
  int file_ = -1;
  Header* header_ = nullptr;
  std::mutex mutex_;  // excludes other threads; the file lock excludes other processes
};

}  // namespace memsaver::host
