// A device made of host memory: mmap addresses over memfd chunks, with the semantics of CUDA's calls. With it all code
// above the driver interface runs on any Linux machine, failures and sharing between processes included.
//
// Tests can turn on the behaviour of a GPU under work: kernels that end later, late marks, captures, an illegal access
// after which the context is dead. All of it is off by default.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "driver/host_addresses.h"
#include "driver/host_ledger.h"
#include "driver/host_stream.h"

namespace memsaver {

class HostDriver final : public Driver {
 public:
  explicit HostDriver(std::size_t capacity) : Driver("cpu"), ledger_(capacity), addresses_(ledger_) {}

  std::string uuid() override { return ledger_.uuid(); }
  Memory memory() override;
  std::vector<Process> processes() override { return ledger_.processes(); }
  std::vector<Holding> holdings() override { return ledger_.holdings(); }
  bool lists_all() const override { return true; }
  int host_node() override { return -1; }

  Address reserve(std::size_t size) override;
  void unreserve(Address address, std::size_t size) override;
  Handle create(std::size_t size) override;
  void release(Handle handle) override;
  int export_fd(Handle handle) override;
  Handle import_fd(int fd, std::size_t size) override;
  void map(Address address, std::size_t size, Handle handle) override;
  void allow(Address address, std::size_t size) override;
  void unmap(Address address, std::size_t size) override;
  bool is_mapped(Address address) override { return addresses_.is_mapped(address); }

  void synchronize() override;
  Ticket record() override;
  bool done(const Ticket& ticket) override;

  void copy_out(void* host, Address address, std::size_t size) override;
  void copy_in(Address address, const void* host, std::size_t size) override;
  void fill(Address address, std::size_t size, unsigned char byte) override;
  void copy_within(Address to, Address from, std::size_t size) override;
  Ticket mark(Direction direction) override;
  void wait(const Ticket& ticket) override;
  void finish_copies() override;
  void pin(void* host, std::size_t size) override;
  void unpin(void* host) override;

  // For tests. Times are on the clock of clock.h.

  struct Found {
    std::atomic<bool> there = false;  // the kernel has run
    std::vector<std::byte> bytes;     // read by the kernel
  };
  // Launch a kernel on a stream. Kernels of a stream run in the order of their launches. A kernel runs `hold` seconds
  // after its launch, or when its stream is released (nullopt). Memory that is not mapped with access at that time is
  // an illegal access. A kernel of size 0 accesses nothing. Throw BadArgument if there is no such stream.
  std::size_t new_stream();
  void launch_write(std::size_t stream, Address address, std::size_t size, unsigned char byte,
                    std::optional<double> hold);
  void launch_touch(std::size_t stream, Address address, std::size_t size,
                    std::optional<double> hold);  // changes nothing
  std::shared_ptr<const Found> launch_read(std::size_t stream, Address address, std::size_t size,
                                           std::optional<double> hold);
  void release_stream(std::size_t stream);  // returns when its kernels have run
  void release_streams();

  void delay_marks(double seconds);   // a mark passes at least this long after it was set
  void delay_copies(double seconds);  // a copy begins this long after it was queued
  void keep_busy(double seconds);     // as if a kernel were always in flight that ends this much later
  void support_record(bool on) { supports_record_ = on; }  // false: record() is null, as before CUDA 12.5

  void begin_capture();
  bool end_capture();  // false: a record() or synchronize() broke it

  void kill_context();  // every later call fails, and work that has not begun never runs
  bool context_lost() const { return lost_; }
  void reset();  // restores the initial state: no streams, delays or captures, and a live context

 private:
  struct Mark;

  template <typename Act, typename Undo>
  auto guarded(const char* call, Act act, Undo undo);
  template <typename Act>
  auto guarded(const char* call, Act act);
  void check_alive(const char* call);
  void check_no_capture(const char* call);
  // Runs `act` as work of the device, unless the context is dead.
  template <typename Act>
  void at(Address address, std::size_t size, Act act);
  Deadline copy_due() const;
  Deadline later(const std::atomic<Clock::rep>& delay) const { return now() + Clock::duration(delay); }
  std::vector<HostStream*> streams();
  HostStream& stream(std::size_t number);
  void launch(std::size_t number, Address address, std::size_t size, std::optional<double> hold,
              std::function<void()> act);
  Ticket mark_of(const std::vector<HostStream*>& of, Deadline due);
  static void wait_until(Deadline when);

  HostLedger ledger_;
  HostAddresses addresses_;
  HostStream out_, in_;
  std::atomic<bool> lost_ = false;
  std::atomic<bool> supports_record_ = true;
  std::atomic<Clock::rep> marks_delay_ = 0, copies_delay_ = 0, busy_ = 0;

  std::mutex mutex_;
  std::map<void*, std::size_t> pinned_;
  std::vector<std::unique_ptr<HostStream>> streams_;  // never removed: a stream has a thread
  std::size_t streams_in_use_ = 0;
  std::size_t captures_ = 0;
  bool capture_whole_ = true;
  Deadline last_mark_ = {};  // when all marks so far have passed
};

}  // namespace memsaver
