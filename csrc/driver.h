// The seam to CUDA or to the host: everything above it is one code for both.
//
// One Driver stands for one device. Calls throw DriverError; `create` throws ChunkUnavailable when the device is full.
// No call takes a lock of the core, and all may be made from any thread, with or without a CUDA context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"

namespace memsaver {

using Address = std::uintptr_t;
using Handle = std::uint64_t;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPage = 2 * kMiB;  // the granularity of mappings, on CUDA and on the host driver alike

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr std::size_t round_down(std::size_t bytes, std::size_t unit) { return bytes / unit * unit; }

// Fails a chosen driver or file call, so that tests can stand at every point of a transition. Disarmed unless a test
// arms it.
class Faults {
 public:
  // The `nth` call from now (1 is the next) throws, once. `kind`: "error", or "memory" for what a full device says.
  void arm(std::uint64_t nth, const std::string& kind);
  void disarm();
  std::uint64_t calls() const { return calls_; }  // since arm() or disarm()
  void check(const char* call);                   // every driver call passes here first

 private:
  std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::uint64_t fail_at_ = 0;  // 0: disarmed
  bool memory_ = false;
};
Faults& faults();

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
  using Ticket = std::shared_ptr<void>;  // stands for work submitted to the device before it was taken

  explicit Driver(std::string device_name) : name(std::move(device_name)) {}
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const std::string name;  // as torch spells it: "cuda:0", "cpu"

  virtual int ordinal() const { return -1; }  // of a CUDA device, among the visible ones
  virtual std::string uuid() = 0;             // the same for every process that means this device
  virtual Memory memory() = 0;
  virtual std::vector<Process> processes() = 0;  // who holds memory of this device, as far as the system tells
  virtual int host_node() = 0;                   // the NUMA node whose memory is nearest; -1 where that is not known

  // Addresses. Sizes and addresses are multiples of kPage.
  virtual Address reserve(std::size_t size) = 0;
  virtual void unreserve(Address address, std::size_t size) = 0;

  // Physical memory. A handle outlives its mappings and mappings outlive the handle: memory goes when both are gone.
  virtual Handle create(std::size_t size) = 0;
  virtual void release(Handle handle) = 0;
  virtual int export_fd(Handle handle) = 0;  // the caller closes it
  virtual Handle import_fd(int fd, std::size_t size) = 0;

  // Mappings. A mapped range faults until access is allowed; one call may allow or unmap several whole chunks.
  virtual void map(Address address, std::size_t size, Handle handle) = 0;
  virtual void allow(Address address, std::size_t size) = 0;
  virtual void unmap(Address address, std::size_t size) = 0;

  // Work. record() stands for everything on the device, is null where the driver cannot tell, and must not run beside a
  // capture; synchronize() breaks one.
  virtual void synchronize() = 0;
  virtual Ticket record() = 0;
  virtual bool done(const Ticket& ticket) = 0;

  // Copies. Asynchronous; those of one direction run in the order in which they were queued, the directions beside each
  // other, and none waits for other work: synchronise first. mark() stands for the copies queued so far one way.
  virtual void copy_out(void* host, Address address, std::size_t size) = 0;
  virtual void copy_in(Address address, const void* host, std::size_t size) = 0;
  virtual void fill(Address address, std::size_t size, unsigned char byte) = 0;  // queued with the copies in
  virtual Ticket mark(Direction direction) = 0;
  virtual void wait(const Ticket& ticket) = 0;
  virtual void finish_copies() = 0;  // waits for all that is queued, both ways
  virtual void pin(void* host, std::size_t size) = 0;
  virtual void unpin(void* host) = 0;
};

int cuda_device_count();  // 0 where there is no libcuda, no device, or none visible; never throws
std::unique_ptr<Driver> open_cuda_driver(int ordinal);
std::unique_ptr<Driver> open_host_driver(std::size_t capacity);

}  // namespace memsaver
