// The interface to a device: CUDA or host. All code above it is the same for both.
//
// One Driver is one device. Calls throw DriverError; `create` throws ChunkUnavailable when the device is full. No call
// takes a lock of the core. All calls are thread-safe and need no current CUDA context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/faults.h"

namespace memsaver {

using Address = std::uintptr_t;
using Handle = std::uint64_t;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPage = 2 * kMiB;  // the granularity of mappings, on CUDA and on the host driver alike

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr std::size_t round_down(std::size_t bytes, std::size_t unit) { return bytes / unit * unit; }

enum class Direction { out, in };  // of a copy: from the device to the host, and back

class Driver {
 public:
  struct Memory {
    std::size_t free;
    std::size_t total;
  };
  struct Process {
    int pid;
    std::size_t bytes;
  };
  // The bytes that the system lists for a process. `imported`: the part of them that belongs to another process.
  // nullopt: unknown.
  struct Holding {
    int pid;
    std::size_t bytes;
    std::optional<std::size_t> imported;
  };
  // A mark: covers all work that was submitted before it. Its end makes no call of the device.
  using Ticket = std::shared_ptr<void>;

  explicit Driver(std::string device_name) : name(std::move(device_name)) {}
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const std::string name;  // as torch spells it: "cuda:0", "cpu"

  virtual int ordinal() const { return -1; }  // of a CUDA device, among the visible ones
  virtual std::string uuid() = 0;             // the same in every process
  virtual Memory memory() = 0;
  virtual std::vector<Process> processes() = 0;     // with memory on this device, if the system lists them
  virtual std::vector<Holding> holdings() = 0;      // for the ledger of the device: memsaver/ledger
  virtual bool lists_all() const { return false; }  // true: a process without a row in holdings() holds nothing
  virtual int host_node() = 0;                      // the nearest NUMA node; -1 if unknown
  // Whether a NUMA node of the system is memory of a GPU. Backups must not be placed there.
  virtual bool gpu_memory_is_host_memory() { return false; }

  // Addresses. Sizes and addresses are multiples of kPage.
  virtual Address reserve(std::size_t size) = 0;
  virtual void unreserve(Address address, std::size_t size) = 0;

  // Physical memory. It is freed when its handle is released and its last mapping is gone, in either order.
  virtual Handle create(std::size_t size) = 0;
  virtual Handle create_whole(std::size_t size) { return create(size); }  // with all handle types for export
  virtual void release(Handle handle) = 0;
  virtual int export_fd(Handle handle) = 0;      // the caller closes it
  virtual bool exports() const { return true; }  // false: chunks cannot be exported, so there is no shared pool
  virtual Handle import_fd(int fd, std::size_t size) = 0;  // memory of another process; the caller closes the file

  // Mappings. Access to a mapped range faults until allow(). One call may allow or unmap several whole chunks.
  virtual void map(Address address, std::size_t size, Handle handle) = 0;
  virtual void allow(Address address, std::size_t size) = 0;
  virtual void unmap(Address address, std::size_t size) = 0;
  // Whether a chunk is mapped at this address. Independent of the results of the calls above, which may report errors
  // of other work.
  virtual bool is_mapped(Address address) = 0;

  // Peers: other devices with access to this device's mappings. peer_candidates(): devices on which the process has an
  // active context now. use_peers(): from here on allow() gives them access too, and record() and synchronize() cover
  // their work. Earlier mappings need another allow().
  virtual std::vector<int> peer_candidates() { return {}; }
  virtual void use_peers(const std::vector<int>& ordinals) { static_cast<void>(ordinals); }

  // Work. record() marks all work on the device; null if the driver cannot set such marks. record() and synchronize()
  // break a capture that is under way.
  virtual void synchronize() = 0;
  virtual Ticket record() = 0;
  virtual bool done(const Ticket& ticket) = 0;

  // Copies. Asynchronous. Copies of one direction run in the order of their calls; the two directions run concurrently.
  // A copy does not wait for other work: synchronise first. mark() covers the copies of one direction so far.
  virtual void copy_out(void* host, Address address, std::size_t size) = 0;
  virtual void copy_in(Address address, const void* host, std::size_t size) = 0;
  virtual void fill(Address address, std::size_t size, unsigned char byte) = 0;  // queued with the copies in
  virtual void copy_within(Address to, Address from, std::size_t size) = 0;      // queued with the copies in
  virtual Ticket mark(Direction direction) = 0;
  virtual void wait(const Ticket& ticket) = 0;
  virtual void finish_copies() = 0;  // waits for all queued copies, in both directions
  virtual void pin(void* host, std::size_t size) = 0;
  virtual void unpin(void* host) = 0;
};

int cuda_device_count();  // 0 without libcuda or without a visible device; never throws
std::unique_ptr<Driver> open_cuda_driver(int ordinal);
// Memory that the CUDA driver allocates with its address, as cudaMalloc does. Throws DriverError.
Address allocate_whole(int ordinal, std::size_t size);
void free_whole(int ordinal, Address address);  // waits for the device's work
std::unique_ptr<Driver> open_host_driver(std::size_t capacity);

}  // namespace memsaver
