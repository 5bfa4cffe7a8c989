// One device of this process: its driver, its sources of chunks, its memory and files for backups, its freed segments.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backup/disk_backup.h"
#include "backup/pinned_memory.h"
#include "driver/driver.h"
#include "memory/address_index.h"
#include "memory/chunk.h"
#include "pool/queries.h"
#include "pool/shared_pool.h"
#include "regions/device_wait.h"
#include "regions/reclaimer.h"
#include "regions/resting.h"

namespace memsaver {

// The longest wait of an allocation or a resume for memory that was freed on its device and may still be in use.
constexpr auto kShortageWait = std::chrono::seconds(1);

// The parts of the process that all devices share.
struct ProcessParts {
  CaptureGate gate;
  AddressIndex addresses;
  RetainBudget retain;
  HostBudget host_budget;
  // The longest wait of allocations, and of resumes without a bound of their own, for memory that others hold.
  std::atomic<double> memory_timeout_s = 0;
};

struct Device {
  Device(std::unique_ptr<Driver> opened, ProcessParts& shared_parts)
      : driver(std::move(opened)),
        total_bytes(round_up(driver->memory().total, kPage)),
        parts(shared_parts),
        retained(*driver, parts.retain),
        arena(*driver, parts.host_budget),
        resting(*driver, parts.gate, mutex),
        reclaimer(*this) {}

  // The shared pool, made at first use. Core::mutex is held.
  SharedPool& shared_pool() {
    if (shared == nullptr)
      shared = std::make_unique<SharedPool>(
          *driver, [this](std::size_t bytes, std::uint64_t demand) { reclaimer.request(bytes, demand); });
    return *shared;
  }
  void tell_offers() {  // to the broker. Without a lock
    if (pooled) shared->send_offers(offered);
  }
  // The source of new chunks. Chunks of the other source return to it.
  ChunkSource& source() { return pooled ? static_cast<ChunkSource&>(*shared) : retained; }
  // The end of an allocation's wait for freed memory. A capture allows none but that for offered chunks.
  Deadline shortage_deadline() const { return parts.gate.capturing() ? now() : now() + kShortageWait; }
  // The end of an allocation's wait for memory that others hold.
  Deadline memory_deadline() const { return parts.gate.capturing() ? now() : deadline_in(parts.memory_timeout_s); }
  // See memsaver::wait_idle() for the errors.
  void wait_idle(Deadline deadline) { memsaver::wait_idle(*driver, parts.gate, deadline, true); }
  // For the caller to throw: `needed` bytes are not available. `more_free`: bytes that the call itself would free.
  OutOfMemoryError out_of_memory(std::size_t needed, std::size_t more_free, double waited_s = 0) {
    Supply supply{0};
    try {
      supply = source().look();
    } catch (const Error&) {
      // The shortage is reported also without figures.
    }
    std::lock_guard lock(mutex);
    if (offered > 0 && !not_copied.empty())
      supply.unused.push_back({getpid(), offered, "offers chunks whose contents cannot be copied: " + not_copied});
    return {driver->name, needed, supply.free + more_free, waited_s, std::move(supply.unused)};
  }

  const std::unique_ptr<Driver> driver;
  const std::size_t total_bytes;
  ProcessParts& parts;
  RetainedPool retained;
  std::unique_ptr<SharedPool> shared;  // made at first use, and kept
  std::atomic<bool> pooled = false;
  HostArena arena;
  DiskStore files;
  std::atomic<bool> lost = false;         // its context died
  std::atomic<std::size_t> offered = 0;   // bytes of chunks that lazy pauses offer
  std::atomic<std::size_t> evicting = 0;  // regions
  // A copy ahead of a demand ends between the reads: it lowers `offered` while it runs, and restores it before its end.
  bool may_offer() const { return offered > 0 || evicting > 0 || offered > 0; }
  std::string not_copied;  // why the last eviction has left chunks. Guarded by `mutex`
  // Notes copies of offered contents that end now, for a trace. Times are as time.monotonic_ns().
  void copied(Deadline began, std::size_t bytes) const {
    if (bytes == 0) return;
    const auto text = [](Deadline at) {
      return " " + std::to_string(std::chrono::nanoseconds(at.time_since_epoch()).count());
    };
    queries().note("copies", driver->name + text(began) + text(now()) + " " + std::to_string(bytes));
  }
  std::atomic<std::size_t> copying = 0;  // transfers and demands: meanwhile no copy ahead of a demand begins
  std::timed_mutex evictions;            // held by the thread that takes them. It never takes torch's mutex
  // While the holder of `evictions` looks for signals, other threads wait for the lock until this time. The holder may
  // wait for the GIL then, the thread with the GIL for torch's mutex, and the thread with torch's mutex for the lock.
  std::atomic<Deadline> evictions_end = kNever;

  // Guards the bookkeeping of all regions on this device: segments, addresses, the lists of chunks. Never held over a
  // call of the driver or of a source, since threads that hold the GIL take it.
  std::mutex mutex;
  Resting resting;
  Reclaimer reclaimer;
  // Allocations that wait for cached memory of others. Their threads may hold torch's allocator, so no thread may wait
  // for it with the GIL.
  std::atomic<std::size_t> waiting_allocations = 0;

  std::atomic<bool> has_stale = false;  // some mappings lack the access of a peer
  std::vector<int> peers;  // ordinals of the devices with access to this device's memory. Guarded by Core::mutex
};

}  // namespace memsaver
