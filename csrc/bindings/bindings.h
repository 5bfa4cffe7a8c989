// The bindings: the interface of the core for the Python files of memsaver. It is private. One file for each part of
// the core; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/detail/nb_list.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "regions/core.h"

namespace memsaver {

namespace nb = nanobind;
using namespace nb::literals;

// nanobind's classes of these names abort the process if the thread ends in them: see gil.h.
class ReleasedGil : Immovable {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { memsaver_restore_thread(state_); }

 private:
  PyThreadState* const state_;
};

class HeldGil : Immovable {
 public:
  HeldGil() : state_(memsaver_ensure_gil()) {}
  ~HeldGil() { PyGILState_Release(state_); }

 private:
  const PyGILState_STATE state_;
};

// Held where a binding makes many containers, with the GIL. Before Python 3.12 the garbage collector runs where
// containers are made. There a finalizer may release the GIL, and the thread may end: see gil.h.
class NoCollector : Immovable {
 public:
  NoCollector() : was_on_(PyGC_Disable() != 0) {}
  ~NoCollector() {
    if (was_on_) PyGC_Enable();
  }

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
struct UnderWay : Counted {
  UnderWay() : Counted(interpreter_exits ? during_exit : before_exit) {}
  static inline std::atomic<std::size_t> before_exit = 0, during_exit = 0;
};

// Releases the GIL and counts the thread.
struct Unlocked {
  UnderWay counted;
  ReleasedGil release;
};
inline constexpr nb::call_guard<Unlocked> unlocked;  // for a whole function

// A dict of names and values: dict_of("tag", tag, "bytes", bytes).
template <typename... NamesAndValues>
nb::dict dict_of(NamesAndValues&&... all) {
  const NoCollector no_collector;
  nb::dict made;
  const auto add = [&](auto self, const char* name, auto&& value, auto&&... rest) -> void {
    made[name] = nb::cast(std::forward<decltype(value)>(value));
    if constexpr (sizeof...(rest) > 0) self(self, std::forward<decltype(rest)>(rest)...);
  };
  add(add, std::forward<NamesAndValues>(all)...);
  return made;
}

// Structs that are tuples in Python: the fields of each.
template <typename Struct>
inline constexpr auto fields = nullptr;
template <>
inline constexpr auto fields<Range> = [](const Range& range) { return std::make_tuple(range.offset, range.size); };
template <>
inline constexpr auto fields<Unused> =
    [](const Unused& each) { return std::make_tuple(each.pid, each.bytes, each.why); };
template <>
inline constexpr auto fields<Driver::Holding> =
    [](const Driver::Holding& each) { return std::make_tuple(each.pid, each.bytes, each.imported); };

Device& opened(const std::string& name);

void bind_regions(nb::module_& module);
void bind_transitions(nb::module_& module);
void bind_process(nb::module_& module);
void bind_driver(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_lending(nb::module_& module);
void bind_broker(nb::module_& module);

}  // namespace memsaver

namespace nanobind::detail {

// In the place of nanobind/stl/vector.h: lists of vectors are made without the collector.
template <typename Item, typename Allocator>
struct type_caster<std::vector<Item, Allocator>> : list_caster<std::vector<Item, Allocator>, Item> {
  template <typename Vector>
  static handle from_cpp(Vector&& items, rv_policy policy, cleanup_list* cleanup) noexcept {
    const memsaver::NoCollector no_collector;
    return list_caster<std::vector<Item, Allocator>, Item>::from_cpp(std::forward<Vector>(items), policy, cleanup);
  }
};

template <typename Struct>
  requires requires(const Struct& value) { memsaver::fields<Struct>(value); }
struct type_caster<Struct> {
  using Tuple = decltype(memsaver::fields<Struct>(std::declval<const Struct&>()));
  NB_TYPE_CASTER(Struct, make_caster<Tuple>::Name)

  bool from_python(handle source, auto flags, cleanup_list* cleanup) noexcept {
    make_caster<Tuple> tuple;
    if (!tuple.from_python(source, flags, cleanup)) return false;
    value = std::make_from_tuple<Struct>(static_cast<Tuple>(tuple));
    return true;
  }
  static handle from_cpp(const Struct& value, rv_policy policy, cleanup_list* cleanup) noexcept {
    return make_caster<Tuple>::from_cpp(memsaver::fields<Struct>(value), policy, cleanup);
  }
};

// States, policies and fills are their names in Python.
template <typename Choice, const auto& names>
struct name_caster {
  NB_TYPE_CASTER(Choice, const_name("str"))

  bool from_python(handle source, auto flags, cleanup_list* cleanup) noexcept {
    make_caster<std::string> name;
    if (!name.from_python(source, flags, cleanup)) return false;
    const auto found = std::find(names.begin(), names.end(), name.value);
    value = static_cast<Choice>(found - names.begin());
    return found != names.end();
  }
  static handle from_cpp(Choice choice, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_FromString(memsaver::name_of(choice));
  }
};
template <>
struct type_caster<memsaver::State> : name_caster<memsaver::State, memsaver::kStateNames> {};
template <>
struct type_caster<memsaver::Policy> : name_caster<memsaver::Policy, memsaver::kPolicyNames> {};
template <>
struct type_caster<memsaver::Fill> : name_caster<memsaver::Fill, memsaver::kFillNames> {};

}  // namespace nanobind::detail
