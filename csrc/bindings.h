// The bindings: what memsaver's Python files see of the core, and nothing that users should call themselves. One file
// for each part of the core; module.cpp puts them together.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <string>

#include "region.h"

namespace memsaver {

namespace nb = nanobind;
using namespace nb::literals;

using Unlocked = nb::gil_scoped_release;

// Threads that a transition or an allocation keeps, from before it lets go of the GIL until it has it back.
inline std::atomic<std::size_t> under_way = 0;
struct UnderWay {
  UnderWay() { ++under_way; }
  ~UnderWay() { --under_way; }
};

Deadline in_seconds(double seconds);
Device& opened(const std::string& name);
nb::list region_rows(const std::string& device);  // what stats() says of the regions there

// Processes and what each holds, but for this one.
template <typename Processes>
nb::list others(const Processes& processes) {
  nb::list rows;
  for (const auto& [pid, bytes] : processes)
    if (pid != ::getpid()) rows.append(nb::make_tuple(pid, bytes));
  return rows;
}

void bind_errors(nb::module_& module);
void bind_regions(nb::module_& module);
void bind_transitions(nb::module_& module);
void bind_process(nb::module_& module);
void bind_driver(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_broker(nb::module_& module);

}  // namespace memsaver
