#include "driver/host_driver.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "driver/host_chunk.h"

namespace memsaver {
namespace {

// CUDA's codes for the same errors.
constexpr int kIllegalAddress = 700;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr int kCaptureUnsupported = 900;

void check_size(const char* call, std::size_t size) {
  if (size == 0 || size % kPage != 0)
    throw DriverError(call, kInvalidValue, std::to_string(size) + " bytes is not a multiple of 2 MiB");
}

Clock::rep ticks(const char* control, double seconds) {
  if (!(seconds >= 0))
    throw BadArgument(std::string(control) + " is " + std::to_string(seconds) + ", expected 0 or more");
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)).count();
}

}  // namespace

// Work that was submitted to some streams, and the earliest time at which it counts as done.
struct HostDriver::Mark {
  std::vector<std::pair<HostStream*, std::uint64_t>> work;
  Deadline due;
};

template <typename Act, typename Undo>
auto HostDriver::guarded(const char* call, Act act, Undo undo) {
  try {
    return faults().around(
        call,
        [&] {
          check_alive(call);
          return act();
        },
        std::move(undo));
  } catch (const DriverError& error) {
    if (error.context_lost) kill_context();
    throw;
  }
}

template <typename Act>
auto HostDriver::guarded(const char* call, Act act) {
  return guarded(call, std::move(act), [](const auto&) {});
}

void HostDriver::check_alive(const char* call) {
  if (!lost_) return;
  // The caller may free memory after this error, so no copy may still access it. On a GPU no copy runs after the
  // context's death.
  for (HostStream* copies : {&out_, &in_}) copies->wait(copies->submitted());
  throw DriverError(call, kIllegalAddress, "an illegal memory access was encountered", true);
}

void HostDriver::check_no_capture(const char* call) {
  std::lock_guard lock(mutex_);
  if (captures_ == 0) return;
  capture_whole_ = false;
  throw DriverError(call, kCaptureUnsupported, "operation not permitted when stream is capturing");
}

Driver::Memory HostDriver::memory() {
  check_alive("memory");
  const std::size_t used = ledger_.used();
  return {ledger_.capacity() - std::min(used, ledger_.capacity()), ledger_.capacity()};
}

Address HostDriver::reserve(std::size_t size) {
  return guarded(
      "reserve",
      [&] {
        check_size("reserve", size);
        return addresses_.reserve(size);
      },
      [&](Address made) { addresses_.unreserve(made, size); });
}

void HostDriver::unreserve(Address address, std::size_t size) {
  guarded("unreserve", [&] { addresses_.unreserve(address, size); });
}

Handle HostDriver::create(std::size_t size) {
  return guarded(
      "create",
      [&] {
        check_size("create", size);
        return addresses_.enter(make_host_chunk(ledger_, size), size);
      },
      [&](Handle made) { addresses_.release(made); });
}

void HostDriver::release(Handle handle) {
  guarded("release", [&] { addresses_.release(handle); });
}

int HostDriver::export_fd(Handle handle) {
  return guarded("export_fd", [&] { return addresses_.export_fd(handle); }, [](int made) { ::close(made); });
}

Handle HostDriver::import_fd(int fd, std::size_t size) {
  return guarded(
      "import_fd", [&] { return addresses_.enter(import_host_chunk(ledger_, fd, size), size); },
      [&](Handle made) { addresses_.release(made); });
}

void HostDriver::map(Address address, std::size_t size, Handle handle) {
  guarded("map", [&] { addresses_.map(address, size, handle); });
}

void HostDriver::allow(Address address, std::size_t size) {
  guarded("allow", [&] { addresses_.allow(address, size); });
}

void HostDriver::unmap(Address address, std::size_t size) {
  guarded("unmap", [&] {
    if (!addresses_.unmap(address, size)) kill_context();
  });
}

void HostDriver::synchronize() {
  guarded("synchronize", [&] {
    check_no_capture("synchronize");
    Deadline until = later(busy_);
    {
      std::lock_guard lock(mutex_);
      until = std::max(until, last_mark_);
    }
    for (HostStream* each : streams()) each->wait(each->submitted());
    wait_until(until);
    check_alive("synchronize");
  });
}

Driver::Ticket HostDriver::record() {
  if (!supports_record_) return nullptr;
  return guarded("record", [&] {
    check_no_capture("record");
    return mark_of(streams(), std::max(later(marks_delay_), later(busy_)));
  });
}

bool HostDriver::done(const Ticket& ticket) {
  check_alive("done");
  const auto* mark = static_cast<const Mark*>(ticket.get());
  return now() >= mark->due && std::all_of(mark->work.begin(), mark->work.end(),
                                           [](const auto& part) { return part.first->done(part.second); });
}

void HostDriver::copy_out(void* host, Address address, std::size_t size) {
  guarded("copy_out", [&] {
    out_.submit([=, this] { at(address, size, [=] { std::memcpy(host, bytes_at(address), size); }); }, copy_due());
  });
}

void HostDriver::copy_in(Address address, const void* host, std::size_t size) {
  guarded("copy_in", [&] {
    in_.submit([=, this] { at(address, size, [=] { std::memcpy(bytes_at(address), host, size); }); }, copy_due());
  });
}

void HostDriver::fill(Address address, std::size_t size, unsigned char byte) {
  guarded("fill", [&] {
    in_.submit([=, this] { at(address, size, [=] { std::memset(bytes_at(address), byte, size); }); }, copy_due());
  });
}

void HostDriver::copy_within(Address to, Address from, std::size_t size) {
  guarded("copy_within", [&] {
    in_.submit(
        [=, this] {
          at(to, size, [=, this] { at(from, size, [=] { std::memcpy(bytes_at(to), bytes_at(from), size); }); });
        },
        copy_due());
  });
}

Driver::Ticket HostDriver::mark(Direction direction) {
  return guarded("mark", [&] { return mark_of({direction == Direction::out ? &out_ : &in_}, later(marks_delay_)); });
}

void HostDriver::wait(const Ticket& ticket) {
  guarded("wait", [&] {
    const auto* mark = static_cast<const Mark*>(ticket.get());
    for (const auto& [of, number] : mark->work) of->wait(number);
    wait_until(mark->due);
    check_alive("wait");
  });
}

void HostDriver::finish_copies() {
  guarded("finish_copies", [&] {
    for (HostStream* copies : {&out_, &in_}) copies->wait(copies->submitted());
    check_alive("finish_copies");
  });
}

void HostDriver::pin(void* host, std::size_t size) {
  guarded("pin", [&] {
    std::lock_guard lock(mutex_);
    const auto next = pinned_.lower_bound(host);
    const auto begin = [](const auto& entry) { return static_cast<std::byte*>(entry.first); };
    const bool meets_next = next != pinned_.end() && begin(*next) < static_cast<std::byte*>(host) + size;
    const bool meets_last = next != pinned_.begin() && begin(*std::prev(next)) + std::prev(next)->second > host;
    if (meets_next || meets_last)
      throw DriverError("pin", kAlreadyRegistered, "part or all of the range is registered already");
    pinned_[host] = size;
  });
}

void HostDriver::unpin(void* host) {
  guarded("unpin", [&] {
    std::lock_guard lock(mutex_);
    if (pinned_.erase(host) == 0) throw DriverError("unpin", kNotRegistered, "the range was not registered");
  });
}

template <typename Act>
void HostDriver::at(Address address, std::size_t size, Act act) {
  if (lost_) return;
  if (const auto access = addresses_.access(address, size))
    act();
  else
    kill_context();
}

Deadline HostDriver::copy_due() const { return copies_delay_ == 0 ? Deadline() : later(copies_delay_); }

std::vector<HostStream*> HostDriver::streams() {
  std::vector<HostStream*> found = {&out_, &in_};
  std::lock_guard lock(mutex_);
  for (const auto& each : streams_) found.push_back(each.get());
  return found;
}

Driver::Ticket HostDriver::mark_of(const std::vector<HostStream*>& of, Deadline due) {
  auto mark = std::make_shared<Mark>();
  for (HostStream* each : of) mark->work.emplace_back(each, each->submitted());
  mark->due = due;
  std::lock_guard lock(mutex_);
  last_mark_ = std::max(last_mark_, mark->due);
  return mark;
}

void HostDriver::wait_until(Deadline when) {
  if (const Clock::duration left = when - now(); left > Clock::duration::zero()) sleep_for(left);
}

std::size_t HostDriver::new_stream() {
  std::lock_guard lock(mutex_);
  if (streams_in_use_ == streams_.size()) streams_.push_back(std::make_unique<HostStream>());
  return streams_in_use_++;
}

HostStream& HostDriver::stream(std::size_t number) {
  std::lock_guard lock(mutex_);
  if (number >= streams_in_use_)
    throw BadArgument("stream is " + std::to_string(number) + ", expected less than " +
                      std::to_string(streams_in_use_));
  return *streams_[number];
}

void HostDriver::launch(std::size_t number, Address address, std::size_t size, std::optional<double> hold,
                        std::function<void()> act) {
  HostStream& on = stream(number);
  check_alive("launch");
  const Deadline due = hold ? now() + Clock::duration(ticks("hold", *hold)) : kNever;
  on.submit([=, this] { at(address, size, act); }, due);
}

void HostDriver::launch_write(std::size_t number, Address address, std::size_t size, unsigned char byte,
                              std::optional<double> hold) {
  launch(number, address, size, hold, [=] { std::memset(bytes_at(address), byte, size); });
}

void HostDriver::launch_touch(std::size_t number, Address address, std::size_t size, std::optional<double> hold) {
  launch(number, address, size, hold, [] {});
}

std::shared_ptr<const HostDriver::Found> HostDriver::launch_read(std::size_t number, Address address, std::size_t size,
                                                                 std::optional<double> hold) {
  auto found = std::make_shared<Found>();
  launch(number, address, size, hold, [=] {
    found->bytes.assign(bytes_at(address), bytes_at(address) + size);
    found->there = true;
  });
  return found;
}

void HostDriver::release_stream(std::size_t number) { stream(number).release(); }

void HostDriver::release_streams() {
  for (HostStream* each : streams()) each->release();
}

void HostDriver::delay_marks(double seconds) { marks_delay_ = ticks("seconds", seconds); }
void HostDriver::delay_copies(double seconds) { copies_delay_ = ticks("seconds", seconds); }
void HostDriver::keep_busy(double seconds) { busy_ = ticks("seconds", seconds); }

void HostDriver::begin_capture() {
  check_alive("begin_capture");
  std::lock_guard lock(mutex_);
  if (captures_++ == 0) capture_whole_ = true;
}

bool HostDriver::end_capture() {
  std::lock_guard lock(mutex_);
  if (captures_ == 0) throw BadArgument("no capture is under way");
  --captures_;
  return capture_whole_;
}

void HostDriver::kill_context() {
  lost_ = true;
  for (HostStream* each : streams()) each->abandon();
}

void HostDriver::reset() {
  std::lock_guard lock(mutex_);
  for (const auto& each : streams_) {
    each->abandon();
    each->wait(each->submitted());
  }
  streams_in_use_ = captures_ = 0;
  marks_delay_ = copies_delay_ = busy_ = 0;
  last_mark_ = {};
  supports_record_ = true;
  lost_ = false;
}

std::unique_ptr<Driver> open_host_driver(std::size_t capacity) { return std::make_unique<HostDriver>(capacity); }

}  // namespace memsaver
