// The memory use of a host device by process: a table in shared memory, written by all processes of a user.
//
// Crash safety: each process locks a byte of the file as long as it lives. A process that runs out of memory removes
// the entries of processes without a lock, and the last process removes the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/errors.h"
#include "base/scoped.h"
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

// A call cannot be made. The entry points return its code (calls.cpp).
struct Refused : DriverError {
  Refused(cuda::Result result, const std::string& why) : DriverError("a call of the host device", result, why) {}
};
[[noreturn]] void refuse_by_errno(const char* call);  // for the current `errno`

class Ledger : Immovable {
 public:
  // Opens or makes the table of the device of this size. Processes that name the same size share one device.
  explicit Ledger(std::size_t capacity);

  std::size_t capacity() const { return capacity_; }
  // Adds an entry for a new chunk; false when the device is full. `inode` identifies the chunk across processes.
  bool charge(std::uint64_t inode, std::size_t size);
  void charge_imported(std::uint64_t inode, std::size_t size);  // the memory exists already: never refused
  void discharge(std::uint64_t inode);                          // removes one entry of this process
  std::size_t free_bytes();
  // Each chunk counts for one process: its maker, else the first that imported it.
  std::vector<cuda::Holding> holdings();

 private:
  struct Entry {
    std::uint64_t inode;
    std::uint64_t size;
    std::uint32_t is_owner;  // it has made the chunk
    std::uint32_t pid;       // 0: free. Written last, cleared first: an entry that a crash interrupts is free.
  };
  struct Header {
    std::uint64_t high_water;  // entries beyond it were never used
  };
  class Lock;

  std::size_t used_locked() const;
  std::unordered_map<std::uint64_t, const Entry*> owners_locked() const;  // by the chunk
  void strike_dead_locked();
  void enter_locked(std::uint64_t inode, std::size_t size, bool is_owner);
  Entry* begin() const { return reinterpret_cast<Entry*>(header_ + 1); }
  Entry* end() const { return begin() + header_->high_water; }

  const std::size_t capacity_;
  const std::size_t entry_count_;
  int file_ = -1;
  Header* header_ = nullptr;
  std::mutex mutex_;  // excludes other threads; the file lock excludes other processes
};

}  // namespace memsaver::host
