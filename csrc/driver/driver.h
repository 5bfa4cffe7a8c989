// A device: a GPU, or a host device. The same code drives both, by the calls of a table (cuda_api.h).
//
// One Driver is one device. Calls throw DriverError; `create` throws ChunkUnavailable when the device is full. No call
// takes a lock of the core. All calls are thread-safe and need no current CUDA context. The driver uses the device's
// primary context, as torch does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/errors.h"
#include "driver/contexts.h"
#include "driver/cuda_api.h"

namespace memsaver {

using Address = std::uintptr_t;
using Handle = std::uint64_t;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPage = 2 * kMiB;  // the granularity of mappings, on CUDA and on the host driver alike

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr std::size_t round_down(std::size_t bytes, std::size_t unit) { return bytes / unit * unit; }

enum class Direction { out, in };  // of a copy: from the device to the host, and back

class Driver : Immovable {
 public:
  struct Memory {
    std::size_t free;
    std::size_t total;
  };
  using Holding = cuda::Holding;
  // A mark: covers all work that was submitted before it. Its end makes no call of the device. Drivers outlive marks.
  using Ticket = std::shared_ptr<const std::vector<cuda::Mark>>;

  Driver(const cuda::Platform& platform, cuda::Device device, std::string device_name);

  const std::string name;  // as torch spells it: "cuda:0", "cpu"

  int ordinal() const { return platform_.is_gpu ? device_ : -1; }   // of a CUDA device, among the visible ones
  std::string uuid() const { return uuid_of(platform_, device_); }  // the same in every process
  Memory memory();
  std::vector<Holding> holdings() const;                // those with known bytes, for memsaver/ledger
  bool lists_all() const { return !platform_.is_gpu; }  // a process without a row in holdings() holds nothing
  // The nearest NUMA node; -1 if unknown.
  int host_node() const {
    int node = -1;
    const cuda::Result code = api_.cuDeviceGetAttribute(&node, cuda::kAttributeHostNode, device_);
    return code == cuda::kSuccess ? node : -1;  // drivers before 12.2 lack the attribute
  }
  // Whether a NUMA node of the system is memory of a GPU. Backups must not be placed there.
  bool gpu_memory_is_host_memory() const { return any_is_numa_node(api_); }

  // Addresses. Sizes and addresses are multiples of kPage.
  Address reserve(std::size_t size) {
    cuda::DevicePointer address = 0;
    make("cuMemAddressReserve", api_.cuMemAddressReserve, &address, size, kPage, 0, 0);
    return static_cast<Address>(address);
  }
  void unreserve(Address address, std::size_t size) { make("cuMemAddressFree", api_.cuMemAddressFree, address, size); }

  // Physical memory. It is freed when its handle is released and its last mapping is gone, in either order.
  Handle create(std::size_t size, bool whole = false);  // `whole`: with all handle types for export
  void release(Handle handle) { make("cuMemRelease", api_.cuMemRelease, handle); }
  int export_fd(Handle handle);  // the caller closes it
  // False: chunks cannot be exported, so there is no shared pool.
  bool exports() const {
    return attribute_of(api_, device_, cuda::kAttributePosixFd) != 0 && makes(cuda::kHandlePosixFd, has_posix_);
  }
  Handle import_fd(int fd) {  // memory of another process; the caller closes the file
    cuda::AllocationHandle handle = 0;
    void* as_pointer = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
    make("cuMemImportFromShareableHandle", api_.cuMemImportFromShareableHandle, &handle, as_pointer,
         cuda::kHandlePosixFd);
    return handle;
  }
  // Memory with its address, as cudaMalloc makes it.
  Address allocate(std::size_t size) {
    cuda::DevicePointer address = 0;
    make("cuMemAlloc", api_.cuMemAlloc, &address, size);
    return static_cast<Address>(address);
  }
  // Waits for the device's work.
  void free(Address address) { make("cuMemFree", api_.cuMemFree, address); }

  // Mappings. Access to a mapped range faults until allow(). One call may allow or unmap several whole chunks.
  void map(Address address, std::size_t size, Handle handle) {
    make("cuMemMap", api_.cuMemMap, address, size, 0, handle, 0);
  }
  void allow(Address address, std::size_t size) {
    const std::vector<cuda::AccessDesc> access = peers_.access();
    make("cuMemSetAccess", api_.cuMemSetAccess, address, size, access.data(), access.size());
  }
  void unmap(Address address, std::size_t size) { make("cuMemUnmap", api_.cuMemUnmap, address, size); }
  // Whether a chunk is mapped at this address. Independent of the results of the calls above, which may report errors
  // of other work. True if it cannot be known.
  bool is_mapped(Address address) noexcept;

  // Peers: other devices with access to this device's mappings. peer_candidates(): devices on which the process has an
  // active context now. use_peers(): from here on allow() gives these candidates access too, and record() and
  // synchronize() cover their work. Earlier mappings need another allow().
  std::vector<int> peer_candidates() { return peers_.candidates(); }
  void use_peers(const std::vector<int>& ordinals) { peers_.use(ordinals); }

  // Work. record() marks all work on the device; null if the driver cannot set such marks. record() and synchronize()
  // break a capture that is under way.
  void synchronize() {
    for (cuda::Context context : peers_.contexts())
      within(context, [&] { check("cuCtxSynchronize", api_.cuCtxSynchronize()); });
  }
  Ticket record();
  bool done(const Ticket& ticket);

  // Copies. Asynchronous. Copies of one direction run in the order of their calls; the two directions run concurrently.
  // A copy does not wait for other work: synchronise first. mark() covers the copies of one direction so far.
  void copy_out(void* host, Address address, std::size_t size) {
    make("cuMemcpyDtoHAsync", api_.cuMemcpyDtoHAsync, host, address, size, out_.get());
  }
  void copy_in(Address address, const void* host, std::size_t size) {
    make("cuMemcpyHtoDAsync", api_.cuMemcpyHtoDAsync, address, host, size, in_.get());
  }
  void fill(Address address, std::size_t size, unsigned char byte) {  // queued with the copies in
    make("cuMemsetD8Async", api_.cuMemsetD8Async, address, byte, size, in_.get());
  }
  void copy_within(Address to, Address from, std::size_t size) {  // queued with the copies in
    make("cuMemcpyDtoDAsync", api_.cuMemcpyDtoDAsync, to, from, size, in_.get());
  }
  Ticket mark(Direction direction);
  void wait(const Ticket& ticket) {
    for (const cuda::Mark& mark : *ticket)
      within(mark.context, [&] { check("cuEventSynchronize", api_.cuEventSynchronize(mark.event)); });
  }
  void finish_copies(Direction direction) {  // waits for all that are queued
    make("cuStreamSynchronize", api_.cuStreamSynchronize, (direction == Direction::out ? out_ : in_).get());
  }
  void pin(void* host, std::size_t size) {
    make("cuMemHostRegister", api_.cuMemHostRegister, host, size, cuda::kHostRegisterPortable);
  }
  void unpin(void* host) { make("cuMemHostUnregister", api_.cuMemHostUnregister, host); }

 private:
  void check(const char* call, cuda::Result code) const { cuda::check(api_, call, code); }
  // Makes a call in the device's context.
  template <typename... Arguments>
  void make(const char* which, cuda::Result (*call)(Arguments...), std::type_identity_t<Arguments>... arguments) const {
    const cuda::Scope scope(api_, context_);
    check(which, call(arguments...));
  }
  // Acts in the context of the device or of a peer. Errors of a peer with a dead context are ignored: it has no work
  // left to wait for.
  template <typename Act>
  void within(cuda::Context context, Act act) const {
    try {
      const cuda::Scope scope(api_, context);
      act();
    } catch (const DriverError& error) {
      if (context == context_ || !error.context_lost) throw;
    }
  }
  std::shared_ptr<std::vector<cuda::Mark>> new_marks() const;
  cuda::AllocationProp with(int handle_types) const {
    cuda::AllocationProp properties = plain_;
    properties.handle_types = handle_types;
    return properties;
  }
  bool makes(int handle_type, std::optional<bool>& known) const;

  const cuda::Platform& platform_;
  const cuda::Api& api_;
  const cuda::Device device_;
  const cuda::AllocationProp plain_;
  mutable std::mutex probing_;
  mutable std::optional<bool> has_posix_, has_fabric_;  // not known before the first use
  const std::shared_ptr<void> primary_;
  const cuda::Context context_;
  cuda::Peers peers_;
  const std::shared_ptr<void> out_, in_;  // streams
  mutable cuda::Events events_;
};

int cuda_device_count();  // 0 without libcuda or without a visible device; never throws
std::unique_ptr<Driver> open_cuda_driver(int ordinal);

}  // namespace memsaver
