#include "controls.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/files.h"
#include "base/ranges.h"

namespace memsaver::controls {

using namespace cuda;

bool (*may_access)(Device, DevicePointer, std::size_t) = [](Device, DevicePointer, std::size_t) { return true; };

namespace {

constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kIllegalAddress = 700, kAlreadyRegistered = 712,
                 kNotRegistered = 713, kUnknownError = 999;
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr auto kLook = std::chrono::milliseconds(1);  // a virtual clock and a dead context notify no thread
// In real time. A test that waits for a stopped call, with the GIL or a lock that the call needs, would never end.
constexpr auto kLongestStop = std::chrono::seconds(20);

host::Calls* table = nullptr;  // of the host devices
host::Calls device;            // its entries before they were replaced

// Time

std::atomic<bool> is_virtual = false;
std::atomic<Clock::rep> passed = 0;  // virtual time since it began
std::atomic<Clock::rep> began = 0;

Deadline time_now() { return is_virtual ? Deadline(Clock::duration(began + passed)) : Clock::now(); }

void time_sleep(Clock::duration duration) {
  if (is_virtual)
    passed += duration.count();
  else
    std::this_thread::sleep_for(duration);
}

Clock::duration ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Deadline due_in(double seconds) { return seconds < 0 ? kNever : time_now() + ticks(seconds); }

// Work. A kernel is a function on its stream, which waits until it is due and then acts through a stream of its own.

struct Kernel {
  Context context;
  Stream stream;
  Deadline due;
  bool cancelled = false;
  std::function<void()> act;  // may be null: it only waits
};

struct Origin {
  Device device;
  Stream through;  // the stream through which the kernels act
};

struct Mark {
  Stream stream;       // null: all streams
  std::uint64_t last;  // the kernel before it
  Deadline due;
};

std::mutex mutex;
std::condition_variable changed;
std::map<std::uint64_t, Kernel> kernels;  // that have not ended, by number
std::uint64_t last_kernel = 0;
std::map<Stream, Origin> streams;  // of tests
std::map<Event, Mark> marks;
Deadline last_mark = {};  // when all marks so far have passed
std::atomic<Clock::rep> marks_delay = 0, copies_delay = 0;
int captures = 0;
std::vector<std::string> broke_captures;  // the calls
bool capture_is_whole = true;
thread_local int capture_mode = 0;
std::map<std::size_t, std::size_t> pinned;         // host memory by address
Result (*record_event)(Context, Event) = nullptr;  // the replaced entry, which support_record() takes away

Deadline later(const std::atomic<Clock::rep>& delay) { return time_now() + Clock::duration(delay); }

Context context_of(Device number) {
  Context context = nullptr;
  device.cuDevicePrimaryCtxRetain(&context, number);
  return context;
}

class Current {
 public:
  explicit Current(Context context) { device.cuCtxPushCurrent(context); }
  ~Current() {
    Context context = nullptr;
    device.cuCtxPopCurrent(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

bool is_lost() { return device.cuMemAddressFree(0, 0) == kIllegalAddress; }  // refused in a current context that lives

bool is_lost(Context context) {
  const Current current(context);
  return is_lost();
}

void kill(Context context) {
  const Current current(context);
  Stream stream = nullptr;
  if (device.cuStreamCreate(&stream, kStreamNonBlocking) != kSuccess) return;
  device.cuMemsetD8Async(0, 0, 1, stream);  // an illegal access
  device.cuStreamSynchronize(stream);
  device.cuStreamDestroy(stream);
  const std::lock_guard lock(mutex);
  changed.notify_all();
}

void run(void* data) {
  const auto number = reinterpret_cast<std::uintptr_t>(data);
  std::unique_lock lock(mutex);
  Kernel& kernel = kernels.at(number);
  while (!kernel.cancelled && kernel.due > time_now()) {
    lock.unlock();
    const bool lost = is_lost(kernel.context);
    lock.lock();
    if (lost) break;
    if (!kernel.cancelled && kernel.due > time_now()) changed.wait_for(lock, kLook);
  }
  const bool acts = !kernel.cancelled && kernel.due <= time_now() && kernel.act != nullptr;
  lock.unlock();
  if (acts) kernel.act();
  lock.lock();
  kernels.erase(number);
  changed.notify_all();
}

// On a stream whose context is current.
void launch(Stream stream, Deadline due, std::function<void()> act) {
  Context context = nullptr;
  if (device.cuCtxPopCurrent(&context) != kSuccess) return;
  device.cuCtxPushCurrent(context);
  static std::mutex order;  // numbers are in the order of the stream: advance_to() waits for the lowest one
  const std::lock_guard in_order(order);
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex);
    number = ++last_kernel;
    kernels[number] = {context, stream, due, false, std::move(act)};
  }
  if (device.cuLaunchHostFunc(stream, &run, reinterpret_cast<void*>(number)) == kSuccess) return;
  const std::lock_guard lock(mutex);
  kernels.erase(number);
}

// A kernel that accesses a range of memory: it makes calls on the stream through which it acts, and waits for their
// end.
template <typename Calls>
void launch_on(Stream stream, DevicePointer address, std::size_t size, double hold, Calls make_calls) {
  Origin origin{};
  {
    const std::lock_guard lock(mutex);
    origin = streams.at(stream);
  }
  const Context context = context_of(origin.device);
  const Current current(context);
  launch(stream, due_in(hold), [=] {
    const Current acting(context);
    if (!may_access(origin.device, address, size)) return kill(context);
    make_calls(origin.through);
  });
}

// The first kernel of each stream that a mark covers.
std::vector<Deadline> first_due(const Mark& mark) {
  std::map<Stream, Deadline> first;
  for (const auto& [number, kernel] : kernels)
    if (number <= mark.last && (mark.stream == nullptr || mark.stream == kernel.stream))
      first.try_emplace(kernel.stream, kernel.due);
  std::vector<Deadline> found;
  for (const auto& [stream, due] : first) found.push_back(due);
  return found;
}

// On a virtual clock: advances the time until all kernels have run that a mark covers.
void advance_to(const Mark& mark) {
  while (is_virtual && !is_lost()) {
    std::unique_lock lock(mutex);
    const std::vector<Deadline> due = first_due(mark);
    if (due.empty()) return;
    const Deadline next = *std::min_element(due.begin(), due.end());
    const Clock::duration left = next - time_now();
    if (next == kNever || left <= Clock::duration::zero()) {
      changed.wait_for(lock, kLook);
      continue;
    }
    lock.unlock();
    time_sleep(left);
    changed.notify_all();
  }
}

// On a virtual clock: waits for the kernels that are due. Returns whether all have run that a mark covers.
bool all_that_are_due(const Mark& mark) {
  while (!is_lost()) {
    std::unique_lock lock(mutex);
    const std::vector<Deadline> due = first_due(mark);
    const Deadline time = time_now();
    if (due.empty()) return true;
    if (std::all_of(due.begin(), due.end(), [&](Deadline each) { return each > time; })) return false;
    changed.wait_for(lock, kLook);
  }
  return true;
}

Mark everything(Stream stream = nullptr) {
  const std::lock_guard lock(mutex);
  return {stream, last_kernel, {}};
}

void wait_until(Deadline when) {
  if (const Clock::duration left = when - time_now(); left > Clock::duration::zero()) time_sleep(left);
}

void note(Event event, Stream stream, Deadline due) {
  const std::lock_guard lock(mutex);
  marks[event] = {stream, last_kernel, due};
  last_mark = std::max(last_mark, due);
}

Deadline marks_end() {
  const std::lock_guard lock(mutex);
  return last_mark;
}

Mark mark_of(Event event) {
  const std::lock_guard lock(mutex);
  const auto found = marks.find(event);
  return found == marks.end() ? Mark{nullptr, 0, {}} : found->second;
}

// A copy between a stream's device and host memory. A GPU's driver refuses one over the border of two registrations.
template <typename Copy>
Result copied(Stream stream, const void* host, std::size_t size, Copy copy) {
  if (host != nullptr) {
    const Range range{reinterpret_cast<std::size_t>(host), size};
    const std::lock_guard lock(mutex);
    const auto found = overlapping(pinned, range);
    if (!found.empty() &&
        (found.front().first > range.offset || found.front().first + found.front().second < range.end()))
      return kInvalidValue;
  }
  if (copies_delay > 0) launch(stream, later(copies_delay), nullptr);
  return copy();
}

void replace_by_work(host::Calls& calls) {
  calls.cuCtxSynchronize = []() -> Result {
    if (controls_break_capture("cuCtxSynchronize") != 0) return kStreamIsCapturing;
    const Deadline until = marks_end();
    advance_to(everything());
    if (const Result code = device.cuCtxSynchronize(); code != kSuccess) return code;
    wait_until(until);
    return is_lost() ? kIllegalAddress : kSuccess;
  };
  calls.cuCtxRecordEvent = [](Context context, Event event) -> Result {
    if (controls_break_capture("cuCtxRecordEvent") != 0) return kStreamIsCapturing;
    const Result code = device.cuCtxRecordEvent(context, event);
    if (code == kSuccess) note(event, nullptr, later(marks_delay));
    return code;
  };
  calls.cuThreadExchangeStreamCaptureMode = [](int* mode) -> Result {
    std::swap(*mode, capture_mode);
    return kSuccess;
  };
  calls.cuEventRecord = [](Event event, Stream stream) -> Result {
    const Result code = device.cuEventRecord(event, stream);
    if (code == kSuccess) note(event, stream, later(marks_delay));
    return code;
  };
  calls.cuEventQuery = [](Event event) -> Result {
    if (controls_forbids("cuEventQuery") != 0) return kStreamIsCapturing;
    const Mark mark = mark_of(event);
    if (is_virtual) {
      if (!all_that_are_due(mark)) return kNotReady;
      if (const Result code = device.cuEventSynchronize(event); code != kSuccess) return code;
    }
    const Result code = device.cuEventQuery(event);
    return code == kSuccess && time_now() < mark.due ? kNotReady : code;
  };
  calls.cuEventSynchronize = [](Event event) -> Result {
    if (controls_forbids("cuEventSynchronize") != 0) return kStreamIsCapturing;
    const Mark mark = mark_of(event);
    advance_to(mark);
    const Result code = device.cuEventSynchronize(event);
    if (code == kSuccess) wait_until(mark.due);
    return code == kSuccess ? device.cuEventSynchronize(event) : code;
  };
  calls.cuStreamSynchronize = [](Stream stream) -> Result {
    if (controls_forbids("cuStreamSynchronize") != 0) return kStreamIsCapturing;
    advance_to(everything(stream));
    return device.cuStreamSynchronize(stream);
  };
  calls.cuMemHostRegister = [](void* host, std::size_t size, unsigned flags) -> Result {
    if (controls_forbids("cuMemHostRegister") != 0) return kStreamIsCapturing;
    if (const Result code = device.cuMemHostRegister(host, size, flags); code != kSuccess) return code;
    const std::lock_guard lock(mutex);
    const Range range{reinterpret_cast<std::size_t>(host), size};
    if (!overlapping(pinned, range).empty()) return kAlreadyRegistered;
    pinned[range.offset] = size;
    return kSuccess;
  };
  calls.cuMemHostUnregister = [](void* host) -> Result {
    if (controls_forbids("cuMemHostUnregister") != 0) return kStreamIsCapturing;
    if (const Result code = device.cuMemHostUnregister(host); code != kSuccess) return code;
    const std::lock_guard lock(mutex);
    return pinned.erase(reinterpret_cast<std::size_t>(host)) > 0 ? kSuccess : kNotRegistered;
  };
  calls.cuMemcpyDtoHAsync = [](void* to, DevicePointer from, std::size_t size, Stream stream) -> Result {
    return copied(stream, to, size, [=] { return device.cuMemcpyDtoHAsync(to, from, size, stream); });
  };
  calls.cuMemcpyHtoDAsync = [](DevicePointer to, const void* from, std::size_t size, Stream stream) -> Result {
    return copied(stream, from, size, [=] { return device.cuMemcpyHtoDAsync(to, from, size, stream); });
  };
  calls.cuMemcpyDtoDAsync = [](DevicePointer to, DevicePointer from, std::size_t size, Stream stream) -> Result {
    return copied(stream, nullptr, size, [=] { return device.cuMemcpyDtoDAsync(to, from, size, stream); });
  };
  calls.cuMemsetD8Async = [](DevicePointer to, unsigned char byte, std::size_t size, Stream stream) -> Result {
    return copied(stream, nullptr, size, [=] { return device.cuMemsetD8Async(to, byte, size, stream); });
  };
}

// Failures

enum Kind { kError, kMemory, kAfter };

struct Call {
  std::uint64_t count = 0;
  bool is_held = false;
  std::uint64_t passes = 0;  // calls that a hold lets pass first
  int stopped = 0;
  Result code = kSuccess;
  std::uint64_t after = 0, times = 0;  // of failures with this code
};

struct Faults {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Call, std::less<>> by_name;
  std::uint64_t calls = 0;
  std::uint64_t fail_at = 0;  // 0: disarmed
  Kind kind = kError;
  std::string only;
  std::string overdue;  // a call that was stopped for too long
};

Faults& faults() {
  static auto* all = new Faults;
  return *all;
}

Call& call_of(Faults& all, std::string_view name) {
  const auto found = all.by_name.find(name);
  return found != all.by_name.end() ? found->second : all.by_name[std::string(name)];
}

struct Failure {
  Kind kind = kError;
  Result code = kSuccess;  // success: the call does not fail
};

// Whether a call fails. `is_counted`: controls_arm() counts it.
Failure failure_of(const char* name, bool is_counted) {
  Faults& all = faults();
  std::unique_lock lock(all.mutex);
  Call& call = call_of(all, name);
  ++call.count;
  ++call.stopped;
  if (!all.changed.wait_for(lock, kLongestStop, [&] { return !call.is_held || call.passes > 0; })) {
    call.is_held = false;
    all.overdue = name;
    all.changed.notify_all();
  }
  --call.stopped;
  if (call.passes > 0) --call.passes;
  if (call.times > 0 && call.after == 0) {
    --call.times;
    return {kError, call.code};
  }
  if (call.after > 0) --call.after;
  if (!is_counted || (!all.only.empty() && all.only != name) || ++all.calls != all.fail_at) return {};
  all.fail_at = 0;
  const bool is_full = all.kind == kMemory && std::string_view(name) == "cuMemCreate";
  return {all.kind, is_full ? kOutOfMemory : kUnknownError};
}

// Calls that can fail: those that change the device or wait for it.
bool is_counted(std::string_view name) {
  static constexpr std::string_view kNames =
      " cuCtxRecordEvent cuCtxSynchronize cuEventRecord cuEventSynchronize cuMemAddressFree cuMemAddressReserve "
      "cuMemCreate cuMemExportToShareableHandle cuMemHostRegister cuMemHostUnregister cuMemImportFromShareableHandle "
      "cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuMemcpyDtoDAsync cuMemcpyDtoHAsync cuMemcpyHtoDAsync "
      "cuMemsetD8Async cuStreamSynchronize ";
  return kNames.find(" " + std::string(name) + " ") != std::string_view::npos;
}

struct Injected {
  Result code = kSuccess;
  const char* text = nullptr;
};
thread_local Injected last;  // of this thread, for cuGetErrorString

template <typename Calls>
struct Before {
  static inline Calls calls;
};

template <typename Calls, typename... Arguments>
Result make(const char* name, Result (*call)(Arguments...), std::type_identity_t<Arguments>... arguments) {
  const std::string_view which = name;
  const auto all = std::make_tuple(arguments...);
  const Failure failure = failure_of(name, is_counted(which));
  if (failure.code == kSuccess) return call(arguments...);
  last = {failure.code, "injected"};
  if (failure.kind != kAfter) return last.code;
  if (const Result code = call(arguments...); code != kSuccess) return code;
  // The caller has no result to give back.
  const Calls& before = Before<Calls>::calls;
  if constexpr (sizeof...(Arguments) > 0) {
    using First = std::tuple_element_t<0, std::tuple<Arguments...>>;
    if constexpr (std::is_same_v<First, AllocationHandle*>) before.cuMemRelease(*std::get<0>(all));
    if constexpr (std::is_same_v<First, void*>)
      if (which == "cuMemExportToShareableHandle") ::close(*static_cast<int*>(std::get<0>(all)));
    if constexpr (sizeof...(Arguments) == 5 && std::is_same_v<First, DevicePointer*>)
      before.cuMemAddressFree(*std::get<0>(all), std::get<1>(all));
  }
  last = {kUnknownError, "injected after the call was made"};
  return last.code;
}

template <typename Calls>
void replace_by_failing(Calls& calls) {
  Before<Calls>::calls = calls;
#define MEMSAVER_REPLACE(name, version, ...)                              \
  if (calls.name != nullptr)                                              \
    calls.name = [](auto... arguments) -> Result {                        \
      return make<Calls>(#name, Before<Calls>::calls.name, arguments...); \
    };
  MEMSAVER_CUDA_CALLS(MEMSAVER_REPLACE, MEMSAVER_REPLACE)
#undef MEMSAVER_REPLACE
  calls.cuGetErrorString = [](Result code, const char** text) -> Result {
    if (last.code != code) return Before<Calls>::calls.cuGetErrorString(code, text);
    *text = std::exchange(last, {}).text;
    return kSuccess;
  };
}

// Files

FileCalls files;  // before they were replaced
std::string system_files;

bool fails(const char* name) {
  errno = EIO;
  return failure_of(name, true).code != kSuccess;
}

void replace_files(FileCalls& calls) {
  files = calls;
  calls = {.open = [](const char* path, int flags) -> int {
             std::string folder;
             {
               const std::lock_guard lock(mutex);
               folder = system_files;
             }
             const int found = folder.empty() ? -1 : files.open((folder + path).c_str(), flags);
             return found >= 0 ? found : files.open(path, flags);
           },
           .mkostemp = [](char* path, int flags) { return fails("open") ? -1 : files.mkostemp(path, flags); },
           .posix_fallocate =
               [](int file, off_t begin, off_t size) {
                 if (fails("posix_fallocate")) return EIO;
                 // As on a file system without the call, where the C library writes single bytes.
                 return (::fcntl(file, F_GETFL) & O_DIRECT) != 0 ? EINVAL : files.posix_fallocate(file, begin, size);
               },
           .pwrite = [](int file, const void* data, std::size_t size, off_t offset) -> ssize_t {
             return fails("pwrite") ? -1 : files.pwrite(file, data, size, offset);
           },
           .pread = [](int file, void* data, std::size_t size, off_t offset) -> ssize_t {
             return fails("pread") ? -1 : files.pread(file, data, size, offset);
           }};
}

}  // namespace

host::Calls& install(FindTable find_table) {
  static std::once_flag once;
  std::call_once(once, [=] {
    table = static_cast<host::Calls*>(find_table("host"));
    device = *table;
    replace_by_work(*table);
    replace_by_failing(*table);
    record_event = table->cuCtxRecordEvent;
    replace_files(*static_cast<FileCalls*>(find_table("files")));
    *static_cast<ClockCalls*>(find_table("clock")) = {&time_now, &time_sleep, [] { return is_virtual.load(); }};
  });
  return *table;
}

}  // namespace memsaver::controls

using namespace memsaver;
using namespace memsaver::controls;

extern "C" {

void controls_install(void* find_table) { install(reinterpret_cast<FindTable>(find_table)); }

int controls_install_cuda(void* find_table) {
  static const bool done = [=] {
    auto* cuda = static_cast<Api*>(reinterpret_cast<FindTable>(find_table)("cuda"));
    if (cuda != nullptr) replace_by_failing(*cuda);
    return cuda != nullptr;
  }();
  return done;
}

void controls_arm(std::uint64_t nth, int kind, const char* only) {
  Faults& all = faults();
  const std::lock_guard lock(all.mutex);
  all.calls = 0;
  all.fail_at = nth;
  all.kind = static_cast<Kind>(kind);
  all.only = only;
}

std::uint64_t controls_calls() {
  const std::lock_guard lock(faults().mutex);
  return faults().calls;
}

void controls_fail(const char* name, int code, std::uint64_t times, std::uint64_t after) {
  const std::lock_guard lock(faults().mutex);
  Call& call = call_of(faults(), name);
  call.code = code, call.times = times, call.after = after;
}

void controls_hold(const char* name, int on, std::uint64_t after) {
  const std::lock_guard lock(faults().mutex);
  call_of(faults(), name).is_held = on != 0;
  call_of(faults(), name).passes = after;
  faults().changed.notify_all();
}

int controls_stopped(const char* name) {
  const std::lock_guard lock(faults().mutex);
  return call_of(faults(), name).stopped;
}

const char* controls_overdue() {
  static std::string found;
  const std::lock_guard lock(faults().mutex);
  found = std::exchange(faults().overdue, {});
  return found.c_str();
}

std::uint64_t controls_count(const char* name) {
  const std::lock_guard lock(faults().mutex);
  return call_of(faults(), name).count;
}

void controls_disarm() {
  controls_arm(0, kError, "");
  const std::lock_guard lock(faults().mutex);
  for (auto& [name, call] : faults().by_name) call.is_held = false, call.passes = call.times = call.after = 0;
  faults().changed.notify_all();
}

void controls_system_files(const char* folder) {
  const std::lock_guard lock(mutex);
  system_files = folder;
}

int controls_device(std::size_t bytes) { return device.open(bytes); }

void* controls_stream(int number) {
  const Current current(context_of(number));
  Stream made = nullptr, through = nullptr;
  device.cuStreamCreate(&made, kStreamNonBlocking);
  device.cuStreamCreate(&through, kStreamNonBlocking);
  const std::lock_guard lock(mutex);
  streams[made] = {number, through};
  return made;
}

void controls_write(void* stream, DevicePointer address, std::size_t size, int byte, double hold) {
  launch_on(stream, address, size, hold, [=](Stream through) {
    device.cuMemsetD8Async(address, static_cast<unsigned char>(byte), size, through);
    device.cuStreamSynchronize(through);
  });
}

void controls_touch(void* stream, DevicePointer address, std::size_t size, double hold) {
  launch_on(stream, address, size, hold, [=](Stream through) {
    thread_local char byte;
    for (std::size_t at = 0; at < size; at += kPage) device.cuMemcpyDtoHAsync(&byte, address + at, 1, through);
    if (size > 0) device.cuMemcpyDtoHAsync(&byte, address + size - 1, 1, through);
    device.cuStreamSynchronize(through);
  });
}

void controls_read(void* stream, DevicePointer address, std::size_t size, double hold, void* found, int* is_there) {
  launch_on(stream, address, size, hold, [=](Stream through) {
    device.cuMemcpyDtoHAsync(found, address, size, through);
    if (device.cuStreamSynchronize(through) == kSuccess) __atomic_store_n(is_there, 1, __ATOMIC_RELEASE);
  });
}

void controls_release(void* stream) {
  std::map<Stream, Origin> released;
  {
    const std::lock_guard lock(mutex);
    for (auto& [number, kernel] : kernels)
      if (stream == nullptr || kernel.stream == stream) kernel.due = {};
    for (const auto& [each, origin] : streams)
      if (stream == nullptr || each == stream) released[each] = origin;
    changed.notify_all();
  }
  for (const auto& [each, origin] : released) {
    const Current current(context_of(origin.device));
    device.cuStreamSynchronize(each);
  }
}

void controls_delay_marks(double seconds) { marks_delay = ticks(seconds).count(); }
void controls_delay_copies(double seconds) { copies_delay = ticks(seconds).count(); }
void controls_support_record(int on) { table->cuCtxRecordEvent = on != 0 ? record_event : nullptr; }

void controls_begin_capture() {
  const std::lock_guard lock(mutex);
  if (captures++ == 0) capture_is_whole = true;
}

int controls_end_capture() {
  const std::lock_guard lock(mutex);
  --captures;
  return capture_is_whole;
}

int controls_capture_is_whole() {
  const std::lock_guard lock(mutex);
  return capture_is_whole;
}

int controls_break_capture(const char* call) {
  const std::lock_guard lock(mutex);
  if (captures == 0) return 0;
  capture_is_whole = false;
  broke_captures.emplace_back(call);
  return 1;
}

int controls_forbids(const char* call) { return capture_mode != kCaptureRelaxed && controls_break_capture(call) != 0; }

const char* controls_broken() {
  thread_local std::string text;
  text.clear();
  const std::lock_guard lock(mutex);
  for (const std::string& each : broke_captures) text += each + " ";
  return text.c_str();
}

void controls_kill(int number) { kill(context_of(number)); }
int controls_is_lost(int number) { return is_lost(context_of(number)); }

void controls_reset() {
  std::map<Stream, Origin> gone;
  {
    const std::lock_guard lock(mutex);
    for (auto& [number, kernel] : kernels) kernel.cancelled = true;
    gone.swap(streams);
    marks.clear();
    last_mark = {};
    captures = 0;
    broke_captures.clear();
    changed.notify_all();
  }
  marks_delay = copies_delay = 0;
  controls_support_record(1);
  for (const auto& [stream, origin] : gone)
    for (Stream each : {stream, origin.through}) device.cuStreamDestroy(each);
  int count = 0;
  device.cuDeviceGetCount(&count);
  for (int number = 0; number < count; ++number) {
    const Context context = context_of(number);
    if (!is_lost(context)) continue;
    device.cuDevicePrimaryCtxReset(number);
    const std::lock_guard lock(mutex);
    std::erase_if(kernels, [=](const auto& each) { return each.second.context == context; });  // abandoned ones
  }
}

void controls_use_virtual_clock(int on) {
  if (on != 0 && !is_virtual) {
    began = Clock::now().time_since_epoch().count();
    passed = 0;
  }
  is_virtual = on != 0;
}

std::size_t controls_pinned() {
  const std::lock_guard lock(mutex);
  std::size_t bytes = 0;
  for (const auto& [address, size] : pinned) bytes += size;
  return bytes;
}

double controls_now() { return std::chrono::duration<double>(time_now().time_since_epoch()).count(); }
void controls_pass(double seconds) { time_sleep(ticks(seconds)); }
}
