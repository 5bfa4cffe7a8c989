// Controls of tests over the tables of functions of the library: failures of calls, and a host device under work, as a
// GPU is. Kernels end later, marks and copies are late, captures break, contexts die. All of it is off by default.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "host/calls.h"

namespace memsaver::controls {

using cuda::Context;
using cuda::DevicePointer;
using cuda::Result;
using cuda::Stream;

using FindTable = void* (*)(const char*);

// Replaces entries of the tables "host", "files" and "clock", once. Nothing else may use them meanwhile.
void install(FindTable find_table);
// The same for failures of calls of the CUDA driver. False: there is none.
bool install_cuda(FindTable find_table);

// Failures. The `nth` call from now (1: the next) fails, once. If `only` is given, calls of this name are counted
// alone.
enum class Kind { error, memory, after, lost };
// memory: the code of a full device. after: the call takes effect and then reports an error. lost: the host context is
// dead from this call on.
void arm(std::uint64_t nth, Kind kind, const char* only);
void disarm();
std::uint64_t calls();  // since arm() or disarm()

// Kernels of a host device, of which the driver has opened the context. Kernels of a stream run in the order of their
// launches. A kernel runs at its time, or when its stream is released. Memory that is not mapped with access then is an
// illegal access. A kernel of size 0 accesses nothing.
Stream new_stream();
void launch_write(Stream stream, DevicePointer address, std::size_t size, unsigned char byte, Deadline due);
void launch_touch(Stream stream, DevicePointer address, std::size_t size, Deadline due);  // changes nothing
// `found` has the bytes when `is_there` is 1.
void launch_read(Stream stream, DevicePointer address, std::size_t size, Deadline due, void* found, int* is_there);
void release_stream(Stream stream);  // returns when its kernels have run
void release_streams();

void delay_marks(Clock::duration time);   // a mark passes at least this long after it was set
void delay_copies(Clock::duration time);  // a copy begins this long after it was queued
void keep_busy(Clock::duration time);     // as if a kernel were always in flight that ends this much later
void support_record(bool on);             // false: record() is null, as before CUDA 12.5

void begin_capture();
bool end_capture();  // false: a record or a wait for the device broke it

void kill_context();  // every later call fails, and work that has not begun never runs
bool context_lost();
void reset();  // restores the initial state: no streams, delays or captures, and a live context

void use_virtual_clock(bool on);

}  // namespace memsaver::controls
