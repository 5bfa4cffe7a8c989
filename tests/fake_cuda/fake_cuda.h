// The state of a CUDA driver without a GPU, for tests: see fake_cuda.cpp.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../csrc/driver/cuda_api.h"

namespace fake_cuda {

using namespace memsaver::cuda;

constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr int kMostDevices = 64;
constexpr int kLocationHostNode = 3;

namespace codes {

constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kIllegalState = 401;
constexpr Result kNotFound = 500;
constexpr Result kIllegalAddress = 700;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureInvalidated = 901;
constexpr Result kCaptureMerge = 902;
constexpr Result kCaptureUnmatched = 903;
constexpr Result kCaptureUnjoined = 904;
constexpr Result kCapturedEvent = 907;
constexpr Result kCaptureWrongThread = 908;

}  // namespace codes

const char* text_of(const char* name, const char* otherwise);
long number_of(const char* name, long otherwise);
std::size_t bytes_of(const char* name, const char* otherwise);
std::vector<std::string> split(std::string text, const char* separators);  // cut at each of these characters

using Lock = std::unique_lock<std::mutex>;

struct FakeStream;

struct Primary {  // a device's primary context
  int device = 0;
  int retained = 0;
  bool held_by_others = false;
  Result dead = kSuccess;  // else the code that every call returns
  std::set<std::uint64_t> running;
  int waiting = 0;                     // threads within cuCtxSynchronize
  std::shared_ptr<FakeStream> legacy;  // the default stream
};

// The state of the queues at one moment. It has passed when these operations and kernels have ended.
struct Point {
  std::vector<std::pair<std::shared_ptr<FakeStream>, std::uint64_t>> streams;  // the number of its last operation
  Primary* context = nullptr;
  std::vector<std::uint64_t> kernels;
};

using Act = std::function<Result(Lock&)>;  // without the lock while it copies

struct Operation {
  std::shared_ptr<const Point> after;  // null: after the operation before it alone
  Act act;                             // null: it only waits
};

struct Capture {
  std::uint64_t id;
  int mode;
  std::thread::id thread;
  FakeStream* origin;
  bool invalid = false;
  std::set<FakeStream*> unjoined;  // streams other than the origin with work that no stream of the capture waits for
  std::vector<Act> nodes;
};

struct FakeStream {
  Primary* context = nullptr;
  bool blocking = false;  // with the default stream
  int priority = 0;
  std::deque<Operation> queue;
  std::uint64_t queued = 0, ended = 0;
  bool busy = false;  // a thread runs the first operation
  std::shared_ptr<Capture> capture;
};

struct FakeEvent {
  Primary* context;
  Point point;
  std::weak_ptr<Capture> capture;  // it was recorded there last
  bool captured = false;
  FakeStream* stream = nullptr;  // of the capture
};

struct FakeGraph {
  std::vector<Act> nodes;
};

struct Kernel {
  Primary* context;
  DevicePointer address;
  std::size_t size;  // 0: it touches nothing
  unsigned char byte;
};

struct Memory {  // one allocation handle, or several of one file
  int device;
  std::size_t size;
  int file;  // its own file, if it was exported or imported. -1: a range of the device's file
  off_t offset;
  int handle_types;
  ino_t inode = 0;
  std::size_t handles = 0;
  std::size_t mappings = 0;
  AllocationHandle maker = 0;  // the handle of cuMemCreate, until its last release
  std::size_t retained = 0;    // references of that handle beside the first one
  bool counted = true;         // in the used bytes of the device: chunks of another process are counted there
};

struct Mapping {
  std::size_t size;
  std::shared_ptr<Memory> memory;
  std::uint64_t access = 0;  // a bit for each device
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;

  // How it behaves.
  const int devices = static_cast<int>(std::clamp(number_of("FAKE_CUDA_DEVICES", 1), 0L, long{kMostDevices}));
  const std::size_t total = bytes_of("FAKE_CUDA_MEMORY", "80GiB") / kGranularity * kGranularity;
  const bool late = number_of("FAKE_CUDA_LATE", 0) != 0;
  const bool adjacent = number_of("FAKE_CUDA_ADJACENT", 0) != 0;
  const bool record_event = number_of("FAKE_CUDA_NO_RECORD_EVENT", 0) == 0;
  const bool export_attribute = number_of("FAKE_CUDA_NO_EXPORT", 0) == 0;
  const bool fabric = number_of("FAKE_CUDA_FABRIC", 0) != 0;
  const Result fabric_refusal = static_cast<Result>(number_of("FAKE_CUDA_FABRIC_REFUSAL", kNotSupported));
  const Result export_refusal =
      static_cast<Result>(number_of("FAKE_CUDA_EXPORT_REFUSAL", export_attribute ? kSuccess : kNotSupported));
  const bool virtual_memory = number_of("FAKE_CUDA_NO_VIRTUAL_MEMORY", 0) == 0;
  const bool pointers_by_version = number_of("FAKE_CUDA_POINTERS_BY_VERSION", 0) != 0;
  const bool dies_whole = number_of("FAKE_CUDA_DIES_WHOLE", 0) != 0;
  const bool mig = number_of("FAKE_CUDA_MIG", 0) != 0;
  const std::size_t granularity = bytes_of("FAKE_CUDA_GRANULARITY", "2MiB");  // that it reports
  const bool nvml = number_of("FAKE_CUDA_NO_NVML", 0) == 0;
  const long own_pid = number_of("FAKE_CUDA_OWN_PID", 0);
  const std::size_t occupied = bytes_of("FAKE_CUDA_OCCUPIED", "0");  // on each device, by others
  const std::size_t context_bytes = bytes_of("FAKE_CUDA_CONTEXT", "0");
  const std::size_t page_table = bytes_of("FAKE_CUDA_PAGE_TABLE", "0");
  const long freed_late = number_of("FAKE_CUDA_FREED_LATE", 0);
  const long numa = number_of("FAKE_CUDA_NUMA", -1);  // the node of device 0's memory; the next ones follow
  const long numa_first = number_of("FAKE_CUDA_NUMA_FIRST", 0);
  const std::string peers = text_of("FAKE_CUDA_PEERS", "all");
  const std::string processes = text_of("FAKE_CUDA_PROCESSES", "");
  std::map<std::string, long> delays;  // microseconds

  Primary contexts[kMostDevices];
  std::size_t used[kMostDevices] = {};   // of handles
  std::size_t taken[kMostDevices] = {};  // of this process without handles, as of cudaMalloc and of modules
  std::map<std::pair<int, DevicePointer>, std::size_t> page_tables;  // mappings in each GiB of addresses
  struct Scrubbed {
    int device;
    std::size_t bytes;
    long looks;  // at free memory until it is
  };
  std::vector<Scrubbed> scrubbed;
  int files[kMostDevices];
  off_t next_offset[kMostDevices] = {};
  std::size_t most_unmapped = 0;  // chunks by the next cuMemUnmap() of more; 0: all
  bool makers_ended = false;      // of all memory of other processes

  std::size_t reserved_bytes = 0;
  std::map<DevicePointer, std::size_t> reserved;
  DevicePointer next_adjacent = 0;
  std::map<DevicePointer, Mapping> mapped;
  std::size_t mapped_bytes = 0;
  std::unordered_map<AllocationHandle, std::shared_ptr<Memory>> handles;
  AllocationHandle last_handle = 0;
  std::map<DevicePointer, AllocationHandle> allocated;  // by cuMemAlloc
  std::map<const std::byte*, std::size_t> registered;
  std::set<const void*> host_allocated;
  std::size_t registered_bytes = 0;
  std::map<FakeStream*, std::shared_ptr<FakeStream>> streams;
  std::set<FakeEvent*> events;
  std::map<FakeGraph*, std::shared_ptr<FakeGraph>> graphs;  // also executable ones
  std::vector<std::shared_ptr<Capture>> captures;           // under way
  std::uint64_t last_capture = 0;
  std::vector<std::string> broken;  // the calls that broke captures
  std::map<std::uint64_t, Kernel> kernels;
  std::uint64_t last_kernel = 0;

  struct Failure {
    Result code;
    int times;
    int after;     // calls that succeed first
    bool happens;  // the call takes effect and reports a failure
  };
  std::map<std::string, Failure> failures;
  std::map<std::string, std::uint64_t> calls;
  std::set<std::string> held;
  std::map<std::string, int> waiting;

  Fake();

  bool exists(int device) const { return device >= 0 && device < devices; }
  std::size_t context_of(int device) const { return contexts[device].retained > 0 ? context_bytes : 0; }
  std::size_t all_used(int device) const;
  std::size_t listed(int device) const;  // the bytes that NVML lists for this process
  // NVML lists memory for its maker alone, also if that imports it too, and for an importer after the maker's end.
  bool is_listed(const Memory& memory) const;
  bool can_access(int device, int other) const;
  int file_of(int device);
  void drop_if_unused(const std::shared_ptr<Memory>& memory);
  void look_at_free_memory();
  // The mappings that make up a range of one reservation exactly; empty where they do not.
  std::vector<std::map<DevicePointer, Mapping>::iterator> whole(DevicePointer address, std::size_t size);
  bool accessible(int device, DevicePointer address, std::size_t size);
  bool is_device_memory(DevicePointer address);
  // Whether a copy may touch this host memory: one registration of pinned memory, or none.
  bool one_registration(const void* host, std::size_t size);
  bool is_registered(const void* host);
  void kill(Primary& context, Result code);
};

Fake& fake();

inline thread_local std::vector<Primary*> stack;  // of current contexts
inline thread_local int capture_mode = 0;

// Each call passes here first: tests stop it, delay it or make it fail.
class Call {
 public:
  explicit Call(const char* name);

  // Nothing, or the code with which the call ends before it did anything.
  Result refusal() const { return early_; }
  // The same, also for a current context that is dead, and where there is none.
  Result refusal_in_context(bool required = true) const {
    if (early_ != kSuccess) return early_;
    if (stack.empty()) return required ? codes::kInvalidContext : kSuccess;
    return stack.back()->dead;
  }
  // The same for calls that may break a capture, as of CUDA's rules for the modes of captures and threads.
  Result refusal_in_capture() const;
  Result end(Result code = kSuccess) const { return code == kSuccess ? late_ : code; }

 private:
  const char* name_;
  Result early_ = kSuccess;
  Result late_ = kSuccess;

 public:
  Lock lock;
};

#define FAKE_ENTER(name) \
  Fake& all = fake();    \
  Call call(name);       \
  if (const Result code = call.refusal(); code != kSuccess) return code

#define FAKE_ENTER_CONTEXT(name) \
  Fake& all = fake();            \
  Call call(name);               \
  if (const Result code = call.refusal_in_context(); code != kSuccess) return code

// Calls that need no context, and fail if it is dead.
#define FAKE_ENTER_ANY(name) \
  Fake& all = fake();        \
  Call call(name);           \
  if (const Result code = call.refusal_in_context(false); code != kSuccess) return code

// Calls with a context that captures can forbid.
#define FAKE_ENTER_UNSAFE(name) \
  FAKE_ENTER_CONTEXT(name);     \
  if (const Result code = call.refusal_in_capture(); code != kSuccess) return code

inline void* at(DevicePointer address) { return reinterpret_cast<void*>(address); }

// Queues (fake_streams.cpp). All need the lock.
Point everything_on(Primary& context);
bool passed(const Point& point);
// Runs queued operations up to a point, and waits for kernels that tests hold.
void run_to(const Point& point, Lock& lock);
// Ends captures of the context that a mark or a wait has met. Returns whether there were any.
bool break_captures_of(const Primary& context, const char* call);
void* find_stream_call(const char* name);  // null: there is none

}  // namespace fake_cuda

extern "C" {
#define FAKE_DECLARE(name, version, ...) memsaver::cuda::Result name(__VA_ARGS__);
using memsaver::cuda::AccessDesc;
using memsaver::cuda::AllocationHandle;
using memsaver::cuda::AllocationProp;
using memsaver::cuda::Context;
using memsaver::cuda::Device;
using memsaver::cuda::DevicePointer;
using memsaver::cuda::Event;
using memsaver::cuda::Result;
using memsaver::cuda::Stream;
using memsaver::cuda::Uuid;
MEMSAVER_CUDA_CALLS(FAKE_DECLARE, FAKE_DECLARE)
#undef FAKE_DECLARE
}
