// Controls of tests over the tables of functions of the library: failures and stops of calls, and host devices under
// work, as a GPU is. Kernels end later, marks and copies are late, captures break, contexts die. All of it is off by
// default. Times are in seconds. Python calls the same functions (tests/controls.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/calls.h"

namespace memsaver::controls {

using FindTable = void* (*)(const char*);

// Replaces entries of the tables "host", "files" and "clock", once. Nothing else may use them meanwhile. Returns the
// table of the host devices.
host::Calls& install(FindTable find_table);

// Whether a device can access a range. tests/device/gpus.cpp replaces it.
extern bool (*may_access)(cuda::Device device, cuda::DevicePointer address, std::size_t size);
}  // namespace memsaver::controls

extern "C" {
void controls_install(void* find_table);
// The same for failures of calls of the CUDA driver. False: there is none.
int controls_install_cuda(void* find_table);

// Failures. The `nth` call from now (1: the next) fails, once. If `only` is given, calls of this name are counted
// alone. Kinds: 0: an error. 1: the code of a full device. 2: the call takes effect and then reports an error.
void controls_arm(std::uint64_t nth, int kind, const char* only);
std::uint64_t controls_calls();  // since then
// After so many calls of this name, the next `times` return a code.
void controls_fail(const char* name, int code, std::uint64_t times, std::uint64_t after);
// Calls of this name stop before they are made, once `after` of them have passed. False: they continue, as they do
// after 20 seconds.
void controls_hold(const char* name, int on, std::uint64_t after);
int controls_stopped(const char* name);          // the calls that are stopped now
const char* controls_overdue();                  // a call that continued after 20 seconds, since this was asked
std::uint64_t controls_count(const char* name);  // of all calls of this name
void controls_disarm();                          // ends all of these
// The files of the system are read from this folder, where it has them under their full path. Empty: they are not.
void controls_system_files(const char* folder);

int controls_device(std::size_t bytes);  // the number of the host device of this size

// Kernels of a host device. Kernels of a stream run in the order of their launches. A kernel runs `hold` seconds after
// its launch (negative: never), or when its stream is released. Memory that is not mapped with access then is an
// illegal access. A kernel of size 0 accesses nothing.
void* controls_stream(int device);
void controls_write(void* stream, unsigned long long address, std::size_t size, int byte, double hold);
void controls_touch(void* stream, unsigned long long address, std::size_t size, double hold);  // changes nothing
// `found` has the bytes when `is_there` is 1.
void controls_read(void* stream, unsigned long long address, std::size_t size, double hold, void* found, int* is_there);
void controls_release(void* stream);  // returns when its kernels have run. Null: all streams

void controls_delay_marks(double seconds);   // a mark passes at least this long after it was set
void controls_delay_copies(double seconds);  // a copy begins this long after it was queued
void controls_support_record(int on);        // 0: record() is null, as before CUDA 12.5

void controls_begin_capture();
int controls_end_capture();       // as the next one
int controls_capture_is_whole();  // 0: a record, a wait for the device, or an unsafe call broke it
const char* controls_broken();    // the names of the calls that did so since the first capture
// 1 if a capture is under way, and breaks it: it does not allow this call.
int controls_break_capture(const char* call);
int controls_forbids(const char* call);  // the same, but if the thread is in relaxed mode

void controls_kill(int device);  // every later call fails, and work that has not begun never runs
int controls_is_lost(int device);
void controls_reset();  // restores the initial state: no streams, delays or captures, and living contexts

std::size_t controls_pinned();  // bytes of host memory that are registered

void controls_use_virtual_clock(int on);
double controls_now();
void controls_pass(double seconds);  // on a virtual clock
}
