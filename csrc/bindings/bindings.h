// The bindings: the interface of the core for the Python files of memsaver. It is private. One file for each part of
// the core; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "regions/core.h"

namespace memsaver {

namespace nb = nanobind;
using namespace nb::literals;

// The number of threads in a transition or an allocation, from before they release the GIL until they hold it again.
inline std::atomic<std::size_t> under_way = 0;
struct UnderWay {
  UnderWay() { ++under_way; }
  ~UnderWay() { --under_way; }
};

// Releases the GIL and counts the thread: the exit of the interpreter waits for threads that need the GIL again.
struct Unlocked {
  UnderWay counted;
  nb::gil_scoped_release release;
};

Device& opened(const std::string& name);
nb::list region_rows(const std::string& device);  // rows of stats() for the regions of the device

// A figure of the system; nullopt if the read fails, as on a device with a dead context.
template <typename Read>
auto figure(Read read) -> std::optional<decltype(read())> {
  try {
    return read();
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The bytes of this process on a device, by the system's list of processes; nullopt if it does not list them.
std::optional<std::size_t> own_bytes(const Driver& driver,
                                     const std::optional<std::vector<Driver::Process>>& processes);

// The other processes, and the bytes of each.
template <typename Processes>
nb::list others(const Processes& processes) {
  nb::list rows;
  for (const auto& [pid, bytes] : processes)
    if (pid != ::getpid()) rows.append(nb::make_tuple(pid, bytes));
  return rows;
}

inline nb::list rows_of(const std::vector<Driver::Holding>& holdings) {
  nb::list rows;
  for (const Driver::Holding& each : holdings)
    rows.append(nb::make_tuple(each.pid, each.bytes, each.imported ? nb::cast(*each.imported) : nb::none()));
  return rows;
}

void bind_errors(nb::module_& module);
void bind_regions(nb::module_& module);
void bind_tagged(nb::module_& module);
void bind_transitions(nb::module_& module);
void bind_process(nb::module_& module);
void bind_driver(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_lending(nb::module_& module);
void bind_broker(nb::module_& module);

}  // namespace memsaver
