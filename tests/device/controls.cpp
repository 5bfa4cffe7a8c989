#include "controls.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/files.h"

namespace memsaver::controls {
namespace {

using namespace cuda;

constexpr Result kUnknownError = 999;
constexpr Result kOutOfMemory = 2;
constexpr Result kIllegalAddress = 700;
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr auto kLook = std::chrono::milliseconds(1);  // a virtual clock and a dead context notify no thread

host::Calls* table = nullptr;  // of the host devices
host::Calls device;            // its entries before they were replaced

// Time

std::atomic<bool> is_virtual = false;
std::atomic<Clock::rep> passed = 0;  // virtual time since use_virtual_clock(true)
std::atomic<Clock::rep> began = 0;

Deadline time_now() { return is_virtual ? Deadline(Clock::duration(began + passed)) : Clock::now(); }

void time_sleep(Clock::duration duration) {
  if (is_virtual)
    passed += duration.count();
  else
    std::this_thread::sleep_for(duration);
}

// Work. A kernel is a function on its stream, which waits until it is due and then acts through a stream of its own.

struct Kernel {
  Stream stream;
  Deadline due;
  bool cancelled = false;
  std::function<void()> act;  // may be null: it only waits
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
std::map<Stream, Stream> streams;  // of tests, and the streams through which their kernels act
std::map<Event, Mark> marks;
Deadline last_mark = {};  // when all marks so far have passed
std::atomic<Clock::rep> marks_delay = 0, copies_delay = 0, busy = 0;
int captures = 0;
bool capture_is_whole = true;
Result (*record_event)(Context, Event) = nullptr;  // the replaced entry, which support_record() takes away

Deadline later(const std::atomic<Clock::rep>& delay) { return time_now() + Clock::duration(delay); }

// The context of the host device that the driver opened first.
class Current {
 public:
  Current() {
    Context context = nullptr;
    device.cuDevicePrimaryCtxRetain(&context, 0);
    device.cuCtxPushCurrent(context);
  }
  ~Current() {
    Context context = nullptr;
    device.cuCtxPopCurrent(&context);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

bool is_lost() {
  const Current current;
  return device.cuMemAddressFree(0, 0) == kIllegalAddress;  // which is refused in a living context
}

void run(void* data) {
  const auto number = reinterpret_cast<std::uintptr_t>(data);
  std::unique_lock lock(mutex);
  Kernel& kernel = kernels.at(number);
  while (!kernel.cancelled && kernel.due > time_now()) {
    lock.unlock();
    const bool lost = is_lost();
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

void launch(Stream stream, Deadline due, std::function<void()> act) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex);
    number = ++last_kernel;
    kernels[number] = {stream, due, false, std::move(act)};
  }
  const Current current;
  if (device.cuLaunchHostFunc(stream, &run, reinterpret_cast<void*>(number)) == kSuccess) return;
  const std::lock_guard lock(mutex);
  kernels.erase(number);
}

// Makes calls on the stream through which a stream's kernels act, and waits for their end.
template <typename Calls>
std::function<void()> acting_on(Stream stream, Calls make_calls) {
  Stream through = nullptr;
  {
    const std::lock_guard lock(mutex);
    through = streams.at(stream);
  }
  return [=] {
    const Current current;
    make_calls(through);
    device.cuStreamSynchronize(through);
  };
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

Mark everything() {
  const std::lock_guard lock(mutex);
  return {nullptr, last_kernel, {}};
}

void wait_until(Deadline when) {
  if (const Clock::duration left = when - time_now(); left > Clock::duration::zero()) time_sleep(left);
}

bool breaks_a_capture() {
  const std::lock_guard lock(mutex);
  if (captures == 0) return false;
  capture_is_whole = false;
  return true;
}

void note(Event event, Stream stream, Deadline due) {
  const std::lock_guard lock(mutex);
  marks[event] = {stream, last_kernel, due};
  last_mark = std::max(last_mark, due);
}

Mark mark_of(Event event) {
  const std::lock_guard lock(mutex);
  const auto found = marks.find(event);
  return found == marks.end() ? Mark{nullptr, 0, {}} : found->second;
}

void delay_on(Stream stream) {
  if (copies_delay > 0) launch(stream, later(copies_delay), nullptr);
}

void replace_by_work(host::Calls& calls) {
  calls.cuCtxSynchronize = []() -> Result {
    if (breaks_a_capture()) return kStreamIsCapturing;
    Deadline until = later(busy);
    {
      const std::lock_guard lock(mutex);
      until = std::max(until, last_mark);
    }
    advance_to(everything());
    if (const Result code = device.cuCtxSynchronize(); code != kSuccess) return code;
    wait_until(until);
    return is_lost() ? kIllegalAddress : kSuccess;
  };
  calls.cuCtxRecordEvent = [](Context context, Event event) -> Result {
    if (breaks_a_capture()) return kStreamIsCapturing;
    const Result code = device.cuCtxRecordEvent(context, event);
    if (code == kSuccess) note(event, nullptr, std::max(later(marks_delay), later(busy)));
    return code;
  };
  calls.cuEventRecord = [](Event event, Stream stream) -> Result {
    const Result code = device.cuEventRecord(event, stream);
    if (code == kSuccess) note(event, stream, later(marks_delay));
    return code;
  };
  calls.cuEventQuery = [](Event event) -> Result {
    const Mark mark = mark_of(event);
    if (is_virtual) {
      if (!all_that_are_due(mark)) return kNotReady;
      if (const Result code = device.cuEventSynchronize(event); code != kSuccess) return code;
    }
    const Result code = device.cuEventQuery(event);
    return code == kSuccess && time_now() < mark.due ? kNotReady : code;
  };
  calls.cuEventSynchronize = [](Event event) -> Result {
    const Mark mark = mark_of(event);
    advance_to(mark);
    const Result code = device.cuEventSynchronize(event);
    if (code == kSuccess) wait_until(mark.due);
    return code == kSuccess ? device.cuEventSynchronize(event) : code;
  };
  calls.cuStreamSynchronize = [](Stream stream) -> Result {
    Mark mark = everything();
    mark.stream = stream;
    advance_to(mark);
    return device.cuStreamSynchronize(stream);
  };
  calls.cuMemcpyDtoHAsync = [](void* to, DevicePointer from, std::size_t size, Stream stream) -> Result {
    delay_on(stream);
    return device.cuMemcpyDtoHAsync(to, from, size, stream);
  };
  calls.cuMemcpyHtoDAsync = [](DevicePointer to, const void* from, std::size_t size, Stream stream) -> Result {
    delay_on(stream);
    return device.cuMemcpyHtoDAsync(to, from, size, stream);
  };
  calls.cuMemcpyDtoDAsync = [](DevicePointer to, DevicePointer from, std::size_t size, Stream stream) -> Result {
    delay_on(stream);
    return device.cuMemcpyDtoDAsync(to, from, size, stream);
  };
  calls.cuMemsetD8Async = [](DevicePointer to, unsigned char byte, std::size_t size, Stream stream) -> Result {
    delay_on(stream);
    return device.cuMemsetD8Async(to, byte, size, stream);
  };
}

// Failures

struct Faults {
  std::mutex mutex;
  std::atomic<std::uint64_t> calls = 0;
  std::uint64_t fail_at = 0;  // 0: disarmed
  Kind kind = Kind::error;
  std::string only;
};

Faults& faults() {
  static auto* all = new Faults;
  return *all;
}

// Whether this call fails.
bool fails(const char* name, Kind& kind) {
  Faults& all = faults();
  const std::lock_guard lock(all.mutex);
  if (!all.only.empty() && all.only != name) return false;
  if (++all.calls != all.fail_at) return false;
  all.fail_at = 0;
  kind = all.kind;
  return true;
}

// Calls that can fail: those that change the device or wait for it.
bool is_counted(const char* name) {
  static constexpr const char* kNames[] = {"cuCtxRecordEvent",
                                           "cuCtxSynchronize",
                                           "cuEventRecord",
                                           "cuEventSynchronize",
                                           "cuMemAddressFree",
                                           "cuMemAddressReserve",
                                           "cuMemCreate",
                                           "cuMemExportToShareableHandle",
                                           "cuMemHostRegister",
                                           "cuMemHostUnregister",
                                           "cuMemImportFromShareableHandle",
                                           "cuMemMap",
                                           "cuMemRelease",
                                           "cuMemSetAccess",
                                           "cuMemUnmap",
                                           "cuMemcpyDtoDAsync",
                                           "cuMemcpyDtoHAsync",
                                           "cuMemcpyHtoDAsync",
                                           "cuMemsetD8Async",
                                           "cuStreamSynchronize"};
  return std::any_of(std::begin(kNames), std::end(kNames),
                     [name](const char* each) { return !std::strcmp(name, each); });
}

struct Injected {
  Result code = kSuccess;
  const char* text = nullptr;
};
thread_local Injected last;                       // of this thread, for cuGetErrorString
thread_local AllocationHandle only_retained = 0;  // by cuMemRetainAllocationHandle, which asks whether memory is mapped

template <typename Calls>
struct Before {
  static inline Calls calls;
};

template <typename Calls, typename... Arguments>
Result make(const char* name, Result (*call)(Arguments...), std::type_identity_t<Arguments>... arguments) {
  Kind kind = Kind::error;
  const std::string_view which = name;
  const auto all = std::make_tuple(arguments...);
  if constexpr (sizeof...(Arguments) == 1 && (std::is_same_v<Arguments, AllocationHandle> && ...)) {
    if (which == "cuMemRelease" && std::exchange(only_retained, 0) == std::get<0>(all)) return call(arguments...);
  }
  if (!is_counted(name) || !fails(name, kind)) return call(arguments...);
  if (kind == Kind::lost) kill_context();
  const bool is_full = kind == Kind::memory && which == "cuMemCreate";
  last = {kind == Kind::lost ? kIllegalAddress : is_full ? kOutOfMemory : kUnknownError, "injected"};
  if (kind != Kind::after) return last.code;
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
  calls.cuMemRetainAllocationHandle = [](AllocationHandle* handle, void* address) -> Result {
    const Result code = Before<Calls>::calls.cuMemRetainAllocationHandle(handle, address);
    if (code == kSuccess) only_retained = *handle;
    return code;
  };
}

FileCalls files;  // before they were replaced

bool fails_with_an_error(const char* name) {
  Kind kind = Kind::error;
  return fails(name, kind);
}

}  // namespace

void install(FindTable find_table) {
  static std::once_flag once;
  std::call_once(once, [=] {
    table = static_cast<host::Calls*>(find_table("host"));
    device = *table;
    replace_by_work(*table);
    replace_by_failing(*table);
    record_event = table->cuCtxRecordEvent;
    auto& file_calls = *static_cast<FileCalls*>(find_table("files"));
    files = file_calls;
    file_calls = {[](char* path, int flags) {
                    if (!fails_with_an_error("open")) return files.mkostemp(path, flags);
                    errno = EIO;
                    return -1;
                  },
                  [](int file, off_t begin, off_t size) {
                    return fails_with_an_error("posix_fallocate") ? EIO : files.posix_fallocate(file, begin, size);
                  },
                  [](int file, const void* data, std::size_t size, off_t offset) -> ssize_t {
                    if (!fails_with_an_error("pwrite")) return files.pwrite(file, data, size, offset);
                    errno = EIO;
                    return -1;
                  },
                  [](int file, void* data, std::size_t size, off_t offset) -> ssize_t {
                    if (!fails_with_an_error("pread")) return files.pread(file, data, size, offset);
                    errno = EIO;
                    return -1;
                  }};
    *static_cast<ClockCalls*>(find_table("clock")) = {&time_now, &time_sleep, [] { return is_virtual.load(); }};
  });
}

bool install_cuda(FindTable find_table) {
  static const bool done = [=] {
    auto* cuda = static_cast<Api*>(find_table("cuda"));
    if (cuda != nullptr) replace_by_failing(*cuda);
    return cuda != nullptr;
  }();
  return done;
}

void arm(std::uint64_t nth, Kind kind, const char* only) {
  Faults& all = faults();
  const std::lock_guard lock(all.mutex);
  all.calls = 0;
  all.fail_at = nth;
  all.kind = kind;
  all.only = only;
}

void disarm() { arm(0, Kind::error, ""); }

std::uint64_t calls() { return faults().calls; }

Stream new_stream() {
  const Current current;
  Stream made = nullptr, through = nullptr;
  device.cuStreamCreate(&made, kStreamNonBlocking);
  device.cuStreamCreate(&through, kStreamNonBlocking);
  const std::lock_guard lock(mutex);
  streams[made] = through;
  return made;
}

void launch_write(Stream stream, DevicePointer address, std::size_t size, unsigned char byte, Deadline due) {
  launch(stream, due, acting_on(stream, [=](Stream through) {
           if (size > 0) device.cuMemsetD8Async(address, byte, size, through);
         }));
}

void launch_touch(Stream stream, DevicePointer address, std::size_t size, Deadline due) {
  launch(stream, due, acting_on(stream, [=](Stream through) {
           thread_local char byte;
           for (std::size_t at = 0; at < size; at += kPage) device.cuMemcpyDtoHAsync(&byte, address + at, 1, through);
           if (size > 0) device.cuMemcpyDtoHAsync(&byte, address + size - 1, 1, through);
         }));
}

void launch_read(Stream stream, DevicePointer address, std::size_t size, Deadline due, void* found, int* is_there) {
  launch(stream, due, [=, act = acting_on(stream, [=](Stream through) {
                            if (size > 0) device.cuMemcpyDtoHAsync(found, address, size, through);
                          })] {
    act();
    if (!is_lost()) __atomic_store_n(is_there, 1, __ATOMIC_RELEASE);
  });
}

void release_stream(Stream stream) {
  {
    const std::lock_guard lock(mutex);
    for (auto& [number, kernel] : kernels)
      if (kernel.stream == stream) kernel.due = {};
    changed.notify_all();
  }
  const Current current;
  device.cuStreamSynchronize(stream);
}

void release_streams() {
  std::vector<Stream> all;
  {
    const std::lock_guard lock(mutex);
    for (auto& [number, kernel] : kernels) kernel.due = {};
    changed.notify_all();
    for (const auto& [stream, through] : streams) all.push_back(stream);
  }
  for (Stream each : all) release_stream(each);
}

void delay_marks(Clock::duration time) { marks_delay = time.count(); }
void delay_copies(Clock::duration time) { copies_delay = time.count(); }
void keep_busy(Clock::duration time) { busy = time.count(); }
void support_record(bool on) { table->cuCtxRecordEvent = on ? record_event : nullptr; }

void begin_capture() {
  const std::lock_guard lock(mutex);
  if (captures++ == 0) capture_is_whole = true;
}

bool end_capture() {
  const std::lock_guard lock(mutex);
  --captures;
  return capture_is_whole;
}

void kill_context() {
  const Current current;
  Stream stream = nullptr;
  if (device.cuStreamCreate(&stream, kStreamNonBlocking) != kSuccess) return;
  device.cuMemsetD8Async(0, 0, 1, stream);  // an illegal access
  device.cuStreamSynchronize(stream);
  device.cuStreamDestroy(stream);
  const std::lock_guard lock(mutex);
  changed.notify_all();
}

bool context_lost() { return is_lost(); }

void reset() {
  std::map<Stream, Stream> gone;
  {
    const std::lock_guard lock(mutex);
    for (auto& [number, kernel] : kernels) kernel.cancelled = true;
    gone.swap(streams);
    marks.clear();
    last_mark = {};
    captures = 0;
    changed.notify_all();
  }
  marks_delay = copies_delay = busy = 0;
  support_record(true);
  const Current current;
  for (const auto& [stream, through] : gone) {
    device.cuStreamDestroy(stream);
    device.cuStreamDestroy(through);
  }
  if (!is_lost()) return;
  device.cuDevicePrimaryCtxReset(0);
  const std::lock_guard lock(mutex);
  kernels.clear();  // those that were abandoned
}

void use_virtual_clock(bool on) {
  if (on && !is_virtual) {
    began = Clock::now().time_since_epoch().count();
    passed = 0;
  }
  is_virtual = on;
}

namespace {

Deadline due_in(double seconds) {  // negative: never
  return seconds < 0 ? kNever
                     : time_now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Clock::duration ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace
}  // namespace memsaver::controls

// For Python (tests/controls.py).
using namespace memsaver::controls;

extern "C" {
void controls_install(void* find_table) { install(reinterpret_cast<FindTable>(find_table)); }
int controls_install_cuda(void* find_table) { return install_cuda(reinterpret_cast<FindTable>(find_table)); }
void controls_arm(std::uint64_t nth, int kind, const char* only) { arm(nth, static_cast<Kind>(kind), only); }
void controls_disarm() { disarm(); }
std::uint64_t controls_calls() { return calls(); }
void* controls_new_stream() { return new_stream(); }
void controls_write(void* stream, DevicePointer address, std::size_t size, int byte, double hold) {
  launch_write(stream, address, size, static_cast<unsigned char>(byte), due_in(hold));
}
void controls_touch(void* stream, DevicePointer address, std::size_t size, double hold) {
  launch_touch(stream, address, size, due_in(hold));
}
void controls_read(void* stream, DevicePointer address, std::size_t size, double hold, void* found, int* is_there) {
  launch_read(stream, address, size, due_in(hold), found, is_there);
}
void controls_release_stream(void* stream) { release_stream(stream); }
void controls_release_streams() { release_streams(); }
void controls_delay_marks(double seconds) { delay_marks(ticks(seconds)); }
void controls_delay_copies(double seconds) { delay_copies(ticks(seconds)); }
void controls_keep_busy(double seconds) { keep_busy(ticks(seconds)); }
void controls_support_record(int on) { support_record(on != 0); }
void controls_begin_capture() { begin_capture(); }
int controls_end_capture() { return end_capture(); }
void controls_kill_context() { kill_context(); }
int controls_context_lost() { return context_lost(); }
void controls_reset() { reset(); }
void controls_use_virtual_clock(int on) { use_virtual_clock(on != 0); }
double controls_now() { return std::chrono::duration<double>(time_now().time_since_epoch()).count(); }
void controls_pass(double seconds) { time_sleep(ticks(seconds)); }
}
