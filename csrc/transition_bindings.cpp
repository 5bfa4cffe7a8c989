// Transitions, and what they tell Python on their way.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>

#include "bindings.h"
#include "transition.h"

namespace memsaver {
namespace {

// A transition that reports to Python.
struct ReportingTransition : Transition {
  using Transition::Transition;
  ~ReportingTransition() {
    const Unlocked release;  // what copies may be about to report
    abort();
  }

  Progress::Report report() {
    if (progress.is_none()) return {};
    return [this](std::size_t done, std::size_t total) {
      nb::gil_scoped_acquire python;
      try {
        progress(done, total);
      } catch (nb::python_error&) {
        interrupt = std::current_exception();
      }
    };
  }

  // Drops what was reported to, and what that raised: both may know frames that know this transition, and Python's
  // collector cannot see a cycle that passes here.
  std::exception_ptr forget() {
    progress = nb::none();
    return std::exchange(interrupt, nullptr);
  }

  nb::object progress = nb::none();
  std::exception_ptr interrupt;  // Ctrl-C, delivered as the report's Python code begins
};

void prepare(ReportingTransition& transition, const std::vector<std::string>& policies,
             const std::vector<std::vector<std::pair<std::size_t, std::size_t>>>& live, bool restore, double timeout,
             nb::object progress) {
  std::vector<Transition::Pause> pauses;
  const auto& pausing = transition.pausing();
  if (policies.size() != pausing.size() || live.size() != pausing.size())
    throw BadArgument("one policy and one list of ranges are needed for each region that pauses");
  for (std::size_t i = 0; i < pausing.size(); ++i) {
    Ranges ranges;
    for (const auto& [offset, size] : live[i]) ranges.push_back({offset, size});
    pauses.push_back({pausing[i], policy_of(policies[i]), std::move(ranges)});
  }
  transition.progress = std::move(progress);
  const UnderWay counted;
  const Unlocked release;
  transition.prepare(pauses, restore, in_seconds(timeout), transition.report());
}

nb::dict run(ReportingTransition& transition, double timeout) {
  const UnderWay counted;
  Transition::Outcome outcome;
  std::exception_ptr error;
  {
    const Unlocked release;
    try {
      outcome = transition.run(in_seconds(timeout));
    } catch (...) {
      error = std::current_exception();
    }
  }
  const std::exception_ptr interrupt = transition.forget();
  if (error) std::rethrow_exception(error);
  if (interrupt) std::rethrow_exception(interrupt);
  nb::dict row;
  row["paused"] = nb::cast(outcome.paused, nb::rv_policy::reference);
  row["resumed"] = nb::cast(outcome.resumed, nb::rv_policy::reference);
  row["released_bytes"] = outcome.released_bytes;
  row["restored_bytes"] = outcome.restored_bytes;
  row["copied_bytes"] = outcome.copied_bytes;
  row["seconds"] = outcome.seconds;
  return row;
}

}  // namespace

void bind_transitions(nb::module_& module) {
  nb::class_<ReportingTransition>(module, "Transition")
      .def(nb::init<std::vector<Region*>, std::vector<Region*>>(), "pause"_a, "resume"_a)
      .def(
          "begin",
          [](ReportingTransition& transition, double timeout) {
            const UnderWay counted;
            const Unlocked release;
            transition.begin(in_seconds(timeout));
          },
          "timeout"_a = 0.0)
      .def(
          "abort", [](ReportingTransition& transition) { transition.abort(); }, nb::call_guard<Unlocked>())
      .def_prop_ro(
          "pausing", [](const ReportingTransition& transition) { return transition.pausing(); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "resuming", [](const ReportingTransition& transition) { return transition.resuming(); },
          nb::rv_policy::reference)
      .def_prop_ro(
          "discarded", [](const ReportingTransition& transition) { return transition.discarded(); },
          nb::rv_policy::reference)
      .def("prepare", &prepare, "policies"_a, "live"_a, "restore"_a, "timeout"_a, "progress"_a.none())
      .def("run", &run, "timeout"_a);
}

}  // namespace memsaver
