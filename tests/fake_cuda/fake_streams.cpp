// Streams, events, captures and graphs of the CUDA driver without a GPU.
//
// A stream is a queue of copies. They run at once, or with FAKE_CUDA_LATE when a thread waits for them or has asked for
// them once. Captures follow CUDA's rules: marks and waits of a context break those of its streams, unsafe calls fail
// by the modes of captures and threads, and a broken capture ends with an error.
#include <cstring>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

constexpr int kNonBlocking = 1;
constexpr Result kIsolation = 905;

bool has_passed(const FakeStream& stream, std::uint64_t number) {
  return stream.ended >= number || stream.context->dead != kSuccess;
}

// Runs the first operation of a stream, or one that it comes after. Returns whether any could run.
bool step(FakeStream& stream, Lock& lock) {
  if (stream.busy || stream.queue.empty()) return false;
  Fake& all = fake();
  if (stream.context->dead != kSuccess) {
    stream.ended = stream.queued;
    stream.queue.clear();
    all.changed.notify_all();
    return true;
  }
  const std::shared_ptr<const Point> after = stream.queue.front().after;
  if (after != nullptr && !passed(*after)) {
    bool some = false;
    for (const auto& [other, number] : after->streams)
      if (!has_passed(*other, number)) some = step(*other, lock) || some;
    return some;
  }
  const Act act = stream.queue.front().act;
  stream.busy = true;
  const Result code = act ? act(lock) : kSuccess;
  stream.busy = false;
  stream.queue.pop_front();
  ++stream.ended;
  if (code != kSuccess) all.kill(*stream.context, code);
  all.changed.notify_all();
  return true;
}

void run_all_that_can(const Point& point, Lock& lock) {
  for (const auto& [stream, number] : point.streams)
    while (!has_passed(*stream, number) && step(*stream, lock)) {
    }
}

Point end_of(const std::shared_ptr<FakeStream>& stream) {
  Primary& context = *stream->context;
  Point point{{}, &context, {}};
  if (stream->queued > stream->ended) point.streams.emplace_back(stream, stream->queued);
  if (stream != context.legacy) return point;
  for (const auto& [handle, other] : fake().streams)
    if (other->context == &context && other->blocking && other->queued > other->ended)
      point.streams.emplace_back(other, other->queued);
  point.kernels.assign(context.running.begin(), context.running.end());
  return point;
}

// Null: there is no such stream.
std::shared_ptr<FakeStream> stream_of(Stream handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return stack.back()->legacy;
  const auto found = fake().streams.find(static_cast<FakeStream*>(handle));
  return found == fake().streams.end() ? nullptr : found->second;
}

void break_capture(Capture& capture, const char* call) {
  capture.invalid = true;
  fake().broken.emplace_back(call);
}

// Queues an operation, or adds it to the graph that the stream captures.
Result queue(const std::shared_ptr<FakeStream>& stream, Act act, Lock& lock,
             std::shared_ptr<const Point> after = nullptr) {
  if (stream->context->dead != kSuccess) return stream->context->dead;
  if (Capture* capture = stream->capture.get()) {
    if (capture->invalid) return codes::kCaptureInvalidated;
    if (act) capture->nodes.push_back(std::move(act));
    if (stream.get() != capture->origin) capture->unjoined.insert(stream.get());
    return kSuccess;
  }
  Primary& context = *stream->context;
  if (after == nullptr && (stream == context.legacy || stream->blocking)) {
    Point point = stream == context.legacy ? end_of(stream) : end_of(context.legacy);
    point.kernels.clear();  // those of tests are on no stream
    std::erase_if(point.streams, [&](const auto& each) { return each.first == stream; });
    if (!point.streams.empty()) after = std::make_shared<const Point>(std::move(point));
  }
  stream->queue.push_back({std::move(after), std::move(act)});
  ++stream->queued;
  if (!fake().late)
    while (step(*stream, lock)) {
    }
  return stream->context->dead;
}

Act copy(Primary& context, void* to, const void* from, std::size_t size, bool to_device, bool from_device) {
  return [=, &context](Lock& lock) -> Result {
    Fake& all = fake();
    if ((to_device && !all.accessible(context.device, reinterpret_cast<DevicePointer>(to), size)) ||
        (from_device && !all.accessible(context.device, reinterpret_cast<DevicePointer>(from), size)))
      return codes::kIllegalAddress;
    lock.unlock();
    std::memmove(to, from, size);
    lock.lock();
    return kSuccess;
  };
}

Result queue_copy(Call& call, Stream handle, void* to, const void* from, std::size_t size, bool to_device,
                  bool from_device) {
  const auto stream = stream_of(handle);
  if (stream == nullptr) return codes::kInvalidHandle;
  const void* host = !to_device ? to : !from_device ? from : nullptr;
  if (host != nullptr && !fake().one_registration(host, size)) return codes::kInvalidValue;
  const Result code = queue(stream, copy(*stream->context, to, from, size, to_device, from_device), call.lock);
  // Memory of the host that is not pinned is read or written before the call returns.
  if (code == kSuccess && host != nullptr && stream->capture == nullptr && !fake().is_registered(host))
    run_to(end_of(stream), call.lock);
  return call.end(code == kSuccess ? stream->context->dead : code);
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  Fake& all = fake();
  for (const auto& [handle, stream] : all.streams)
    if (stream->capture == capture) stream->capture = nullptr;
  std::erase(all.captures, capture);
}

Result waits_for(const FakeEvent& event) {
  if (!event.captured) return kSuccess;
  if (const auto capture = event.capture.lock()) break_capture(*capture, "a wait for an event of the capture");
  return codes::kCapturedEvent;
}

}  // namespace

Point everything_on(Primary& context) {
  Point point{{}, &context, {context.running.begin(), context.running.end()}};
  if (context.legacy->queued > context.legacy->ended)
    point.streams.emplace_back(context.legacy, context.legacy->queued);
  for (const auto& [handle, stream] : fake().streams)
    if (stream->context == &context && stream->queued > stream->ended)
      point.streams.emplace_back(stream, stream->queued);
  return point;
}

bool passed(const Point& point) {
  for (const auto& [stream, number] : point.streams)
    if (!has_passed(*stream, number)) return false;
  if (point.context == nullptr || point.context->dead != kSuccess) return true;
  return std::none_of(point.kernels.begin(), point.kernels.end(),
                      [&](std::uint64_t kernel) { return point.context->running.contains(kernel); });
}

void run_to(const Point& point, Lock& lock) {
  for (;;) {
    run_all_that_can(point, lock);
    if (passed(point)) return;
    fake().changed.wait(lock);
  }
}

bool break_captures_of(const Primary& context, const char* call) {
  bool any = false;
  for (const auto& capture : fake().captures) {
    if (capture->origin->context != &context) continue;
    break_capture(*capture, call);
    any = true;
  }
  return any;
}

Result Call::refusal_in_capture() const {
  constexpr int kGlobal = 0;
  if (capture_mode == kCaptureRelaxed) return kSuccess;
  bool forbidden = false;
  for (const auto& capture : fake().captures) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (own ? capture->mode == kCaptureRelaxed : capture_mode != kGlobal || capture->mode != kGlobal) continue;
    break_capture(*capture, name_);
    forbidden = true;
  }
  return forbidden ? codes::kCaptureUnsupported : kSuccess;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

Result cuMemcpyDtoHAsync(void* host, DevicePointer device, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoHAsync");
  static_cast<void>(all);
  return queue_copy(call, stream, host, at(device), size, false, true);
}

Result cuMemcpyHtoDAsync(DevicePointer device, const void* host, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyHtoDAsync");
  static_cast<void>(all);
  return queue_copy(call, stream, at(device), host, size, true, false);
}

Result cuMemcpyDtoDAsync(DevicePointer to, DevicePointer from, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyDtoDAsync");
  static_cast<void>(all);
  return queue_copy(call, stream, at(to), at(from), size, true, true);
}

Result cuMemcpyAsync(DevicePointer to, DevicePointer from, std::size_t size, Stream stream) {
  FAKE_ENTER_CONTEXT("cuMemcpyAsync");
  const bool to_device = all.is_device_memory(to), from_device = all.is_device_memory(from);
  return queue_copy(call, stream, at(to), at(from), size, to_device, from_device);
}

Result cuMemcpy(DevicePointer to, DevicePointer from, std::size_t size) {
  FAKE_ENTER_UNSAFE("cuMemcpy");
  const bool to_device = all.is_device_memory(to), from_device = all.is_device_memory(from);
  const Result code = queue_copy(call, nullptr, at(to), at(from), size, to_device, from_device);
  if (code == kSuccess) run_to(end_of(stack.back()->legacy), call.lock);
  return code;
}

Result cuMemsetD8Async(DevicePointer device, unsigned char byte, std::size_t size, Stream handle) {
  FAKE_ENTER_CONTEXT("cuMemsetD8Async");
  const auto stream = stream_of(handle);
  if (stream == nullptr) return codes::kInvalidHandle;
  Primary& context = *stream->context;
  const Act set = [=, &all, &context](Lock& lock) -> Result {
    if (!all.accessible(context.device, device, size)) return codes::kIllegalAddress;
    lock.unlock();
    std::memset(at(device), byte, size);
    lock.lock();
    return kSuccess;
  };
  return call.end(queue(stream, set, call.lock));
}

Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  FAKE_ENTER_CONTEXT("cuStreamCreate");
  auto made = std::make_shared<FakeStream>();
  made->context = stack.back();
  made->blocking = (flags & kNonBlocking) == 0;
  made->priority = priority;
  *stream = made.get();
  all.streams[made.get()] = made;
  return call.end();
}

Result cuStreamCreate(Stream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

Result cuStreamGetPriority(Stream stream, int* priority) {
  FAKE_ENTER_CONTEXT("cuStreamGetPriority");
  static_cast<void>(all);
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  *priority = found->priority;
  return call.end();
}

Result cuStreamDestroy(Stream stream) {
  FAKE_ENTER("cuStreamDestroy");
  const auto found = all.streams.find(static_cast<FakeStream*>(stream));
  if (found == all.streams.end()) return codes::kInvalidHandle;
  const auto gone = found->second;
  run_to(end_of(gone), call.lock);
  all.streams.erase(gone.get());
  return call.end();
}

Result cuStreamSynchronize(Stream stream) {
  FAKE_ENTER_UNSAFE("cuStreamSynchronize");
  static_cast<void>(all);
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  if (found->capture != nullptr) {
    break_capture(*found->capture, "cuStreamSynchronize");
    return codes::kCaptureUnsupported;
  }
  run_to(end_of(found), call.lock);
  return call.end(found->context->dead);
}

Result cuStreamQuery(Stream stream) {
  FAKE_ENTER_UNSAFE("cuStreamQuery");
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  if (found->capture != nullptr) {
    break_capture(*found->capture, "cuStreamQuery");
    return codes::kCaptureUnsupported;
  }
  const Point point = end_of(found);
  const bool was_done = passed(point);
  run_all_that_can(point, call.lock);
  if (found->context->dead != kSuccess) return found->context->dead;
  return passed(point) && (was_done || !all.late) ? call.end() : kNotReady;
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  FAKE_ENTER_CONTEXT("cuStreamWaitEvent");
  const auto found = stream_of(stream);
  auto* waited = static_cast<FakeEvent*>(event);
  if (found == nullptr || !all.events.contains(waited)) return codes::kInvalidHandle;
  if (waited->captured) {
    const auto capture = waited->capture.lock();
    if (capture == nullptr) return codes::kCapturedEvent;
    if (found == found->context->legacy) {
      break_capture(*capture, "cuStreamWaitEvent");
      return codes::kCaptureUnsupported;
    }
    if (found->capture != nullptr && found->capture != capture) {
      break_capture(*capture, "cuStreamWaitEvent");
      break_capture(*found->capture, "cuStreamWaitEvent");
      return codes::kCaptureMerge;
    }
    found->capture = capture;
    capture->unjoined.erase(waited->stream);
    if (found.get() != capture->origin) capture->unjoined.insert(found.get());
    return call.end();
  }
  if (found->capture != nullptr) {
    if (waited->point.context == nullptr) return call.end();  // never recorded
    break_capture(*found->capture, "cuStreamWaitEvent");
    return kIsolation;
  }
  return call.end(passed(waited->point)
                      ? kSuccess
                      : queue(found, nullptr, call.lock, std::make_shared<const Point>(waited->point)));
}

Result cuStreamBeginCapture(Stream stream, int mode) {
  FAKE_ENTER_CONTEXT("cuStreamBeginCapture");
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  if (found == found->context->legacy) return codes::kCaptureUnsupported;
  if (found->capture != nullptr) return codes::kIllegalState;
  found->capture = std::make_shared<Capture>();
  found->capture->id = ++all.last_capture;
  found->capture->mode = mode;
  found->capture->thread = std::this_thread::get_id();
  found->capture->origin = found.get();
  all.captures.push_back(found->capture);
  return call.end();
}

Result cuStreamEndCapture(Stream stream, void** graph) {
  FAKE_ENTER_CONTEXT("cuStreamEndCapture");
  *graph = nullptr;
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  const auto capture = found->capture;
  if (capture == nullptr) return codes::kIllegalState;
  if (capture->origin != found.get()) return codes::kCaptureUnmatched;
  if (capture->mode != kCaptureRelaxed && capture->thread != std::this_thread::get_id())
    return codes::kCaptureWrongThread;
  end_capture(capture);
  if (capture->invalid) return codes::kCaptureInvalidated;
  if (!capture->unjoined.empty()) return codes::kCaptureUnjoined;
  auto made = std::make_shared<FakeGraph>(FakeGraph{std::move(capture->nodes)});
  *graph = made.get();
  all.graphs[made.get()] = made;
  return call.end();
}

Result cuStreamGetCaptureInfo(Stream stream, int* status, std::uint64_t* id, void** graph, const void** dependencies,
                              const void** edges, std::size_t* count) {
  FAKE_ENTER_CONTEXT("cuStreamGetCaptureInfo");
  static_cast<void>(all);
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  const Capture* capture = found->capture.get();
  *status = capture == nullptr ? 0 : capture->invalid ? 2 : 1;
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return call.end();
}

Result cuStreamIsCapturing(Stream stream, int* status) {
  return cuStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

Result cuGraphInstantiate(void** executable, void* graph, unsigned long long) {
  FAKE_ENTER_CONTEXT("cuGraphInstantiate");
  const auto found = all.graphs.find(static_cast<FakeGraph*>(graph));
  if (found == all.graphs.end()) return codes::kInvalidValue;
  auto made = std::make_shared<FakeGraph>(*found->second);
  *executable = made.get();
  all.graphs[made.get()] = made;
  return call.end();
}

Result cuGraphLaunch(void* executable, Stream stream) {
  FAKE_ENTER_CONTEXT("cuGraphLaunch");
  const auto graph = all.graphs.find(static_cast<FakeGraph*>(executable));
  const auto found = stream_of(stream);
  if (graph == all.graphs.end() || found == nullptr) return codes::kInvalidValue;
  const Act run = [nodes = graph->second->nodes](Lock& lock) -> Result {
    for (const Act& node : nodes)
      if (const Result code = node(lock); code != kSuccess) return code;
    return kSuccess;
  };
  return call.end(queue(found, run, call.lock));
}

Result cuGraphGetNodes(void* graph, void**, std::size_t* count) {
  FAKE_ENTER("cuGraphGetNodes");
  const auto found = all.graphs.find(static_cast<FakeGraph*>(graph));
  if (found == all.graphs.end()) return codes::kInvalidValue;
  *count = found->second->nodes.size();
  return call.end();
}

Result cuGraphDestroy(void* graph) {
  FAKE_ENTER("cuGraphDestroy");
  return all.graphs.erase(static_cast<FakeGraph*>(graph)) > 0 ? call.end() : codes::kInvalidValue;
}

Result cuGraphExecDestroy(void* executable) { return cuGraphDestroy(executable); }

// Kernels do nothing. In a capture they are nodes.
Result cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream stream,
                      void**, void**) {
  FAKE_ENTER_CONTEXT("cuLaunchKernel");
  static_cast<void>(all);
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  return call.end(queue(found, [](Lock&) { return kSuccess; }, call.lock));
}

Result cuLaunchHostFunc(Stream stream, void (*function)(void*), void* data) {
  FAKE_ENTER_CONTEXT("cuLaunchHostFunc");
  static_cast<void>(all);
  const auto found = stream_of(stream);
  if (found == nullptr) return codes::kInvalidHandle;
  const Act act = [=](Lock& lock) -> Result {
    lock.unlock();
    function(data);
    lock.lock();
    return kSuccess;
  };
  return call.end(queue(found, act, call.lock));
}

Result cuEventCreate(Event* event, unsigned) {
  FAKE_ENTER_CONTEXT("cuEventCreate");
  auto* made = new FakeEvent{stack.back(), {}, {}};
  all.events.insert(made);
  *event = made;
  return call.end();
}

Result cuEventRecord(Event event, Stream stream) {
  FAKE_ENTER_CONTEXT("cuEventRecord");
  auto* recorded = static_cast<FakeEvent*>(event);
  const auto found = stream_of(stream);
  if (!all.events.contains(recorded) || found == nullptr || found->context != recorded->context)
    return codes::kInvalidHandle;
  if (found->context->dead != kSuccess) return found->context->dead;
  if (const auto& capture = found->capture) {
    if (capture->invalid) return codes::kCaptureInvalidated;
    recorded->captured = true;
    recorded->capture = capture;
    recorded->stream = found.get();
    return call.end();
  }
  recorded->captured = false;
  recorded->point = end_of(found);
  return call.end();
}

Result cuEventSynchronize(Event event) {
  FAKE_ENTER_UNSAFE("cuEventSynchronize");
  auto* waited = static_cast<FakeEvent*>(event);
  if (!all.events.contains(waited)) return codes::kInvalidHandle;
  if (const Result code = waits_for(*waited); code != kSuccess) return code;
  const Point point = waited->point;
  Primary* context = waited->context;
  run_to(point, call.lock);
  return call.end(context->dead);
}

Result cuEventQuery(Event event) {
  FAKE_ENTER_UNSAFE("cuEventQuery");
  auto* asked = static_cast<FakeEvent*>(event);
  if (!all.events.contains(asked)) return codes::kInvalidHandle;
  if (const Result code = waits_for(*asked); code != kSuccess) return code;
  const Point point = asked->point;
  Primary* context = asked->context;
  if (context->dead != kSuccess) return context->dead;
  const bool was_done = passed(point);
  run_all_that_can(point, call.lock);
  if (context->dead != kSuccess) return context->dead;
  return passed(point) && (was_done || !all.late) ? call.end() : kNotReady;
}

Result cuEventElapsedTime(float* milliseconds, Event, Event) {
  *milliseconds = 1;
  return kSuccess;
}

Result cuEventDestroy(Event event) {
  FAKE_ENTER("cuEventDestroy");
  auto* gone = static_cast<FakeEvent*>(event);
  if (all.events.erase(gone) == 0) return codes::kInvalidHandle;
  delete gone;
  return call.end();
}

}  // extern "C"

void* fake_cuda::find_stream_call(const char* name) {
#define FAKE_CALL(call) \
  if (std::strcmp(name, #call) == 0) return reinterpret_cast<void*>(&call);
  FAKE_CALL(cuMemcpyAsync)
  FAKE_CALL(cuMemcpy)
  FAKE_CALL(cuStreamCreateWithPriority)
  FAKE_CALL(cuStreamGetPriority)
  FAKE_CALL(cuStreamDestroy)
  FAKE_CALL(cuStreamQuery)
  FAKE_CALL(cuStreamWaitEvent)
  FAKE_CALL(cuStreamBeginCapture)
  FAKE_CALL(cuStreamEndCapture)
  FAKE_CALL(cuStreamGetCaptureInfo)
  FAKE_CALL(cuStreamIsCapturing)
  FAKE_CALL(cuGraphInstantiate)
  FAKE_CALL(cuGraphLaunch)
  FAKE_CALL(cuGraphGetNodes)
  FAKE_CALL(cuGraphDestroy)
  FAKE_CALL(cuGraphExecDestroy)
  FAKE_CALL(cuLaunchKernel)
  FAKE_CALL(cuLaunchHostFunc)
  FAKE_CALL(cuEventElapsedTime)
#undef FAKE_CALL
  return nullptr;
}
