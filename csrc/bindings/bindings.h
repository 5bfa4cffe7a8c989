// The bindings: the interface of the core for the Python files of memsaver. It is private. One file for each part of
// the core; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/detail/nb_list.h>
#include <nanobind/stl/pair.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "regions/core.h"

namespace memsaver {

namespace nb = nanobind;
using namespace nb::literals;

// nanobind's classes of these names abort the process if the thread ends in them: see gil.h.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { memsaver_restore_thread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

class HeldGil {
 public:
  HeldGil() : state_(memsaver_ensure_gil()) {}
  ~HeldGil() { PyGILState_Release(state_); }
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

// Held where a binding makes many containers, with the GIL. Before Python 3.12 the garbage collector runs where
// containers are made. There a finalizer may release the GIL, and the thread may end: see gil.h.
class NoCollector {
 public:
  NoCollector() : was_on_(PyGC_Disable() != 0) {}
  ~NoCollector() {
    if (was_on_) PyGC_Enable();
  }
  NoCollector(const NoCollector&) = delete;
  NoCollector& operator=(const NoCollector&) = delete;

 private:
  const bool was_on_;
};

// Calls a Python function. Throws its exception as nb::python_error.
template <typename... Arguments>
nb::object call(nb::handle function, Arguments&&... arguments) {
  const nb::tuple packed = nb::make_tuple(std::forward<Arguments>(arguments)...);
  PyObject* result = memsaver_call(function.ptr(), packed.ptr());
  if (result == nullptr) nb::raise_python_error();
  return nb::steal(result);
}

// The number of threads in a transition or an allocation, from before they release the GIL until they hold it again.
// The exit of the interpreter waits for those that began before it, so that a thread that calls again and again does
// not delay it.
struct UnderWay {
  UnderWay() : count_(waiting_is_over ? during_exit : before_exit) { ++count_; }
  ~UnderWay() { --count_; }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

  static inline std::atomic<std::size_t> before_exit = 0, during_exit = 0;

 private:
  std::atomic<std::size_t>& count_;
};

// Releases the GIL and counts the thread.
struct Unlocked {
  UnderWay counted;
  ReleasedGil release;
};

Device& opened(const std::string& name);

inline nb::list rows_of(const std::vector<Driver::Holding>& holdings) {
  const NoCollector no_collector;
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

// In the place of nanobind/stl/vector.h: lists of vectors are made without the collector.
template <typename Item, typename Allocator>
struct nanobind::detail::type_caster<std::vector<Item, Allocator>>
    : nanobind::detail::list_caster<std::vector<Item, Allocator>, Item> {
  template <typename Vector>
  static handle from_cpp(Vector&& items, rv_policy policy, cleanup_list* cleanup) noexcept {
    const memsaver::NoCollector no_collector;
    return list_caster<std::vector<Item, Allocator>, Item>::from_cpp(std::forward<Vector>(items), policy, cleanup);
  }
};

// A range as a pair: the address or offset, and the bytes.
template <>
struct nanobind::detail::type_caster<memsaver::Range> {
  using Pair = std::pair<std::size_t, std::size_t>;
  NB_TYPE_CASTER(memsaver::Range, const_name("tuple[int, int]"))

  bool from_python(handle source, auto flags, cleanup_list* cleanup) noexcept {
    make_caster<Pair> pair;
    if (!pair.from_python(source, flags, cleanup)) return false;
    const auto [offset, size] = static_cast<Pair>(pair);
    value = {offset, size};
    return true;
  }
  static handle from_cpp(const memsaver::Range& range, rv_policy policy, cleanup_list* cleanup) noexcept {
    return make_caster<Pair>::from_cpp(Pair(range.offset, range.size), policy, cleanup);
  }
};
