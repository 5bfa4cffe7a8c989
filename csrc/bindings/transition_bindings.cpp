// Transitions, and their reports of progress to Python.

#include <exception>
#include <functional>
#include <utility>

#include "bindings/bindings.h"
#include "transitions/transition.h"

namespace memsaver {
namespace {

// A transition that reports to Python.
struct ReportingTransition : Transition {
  using Transition::Transition;
  ~ReportingTransition() {
    const Unlocked release;  // a copying thread may be about to report
    abort();
  }

  Progress::Report report() {
    if (progress.is_none()) return {};
    return [this](std::size_t done, std::size_t total) {
      const HeldGil python;
      try {
        call(progress, done, total);
      } catch (nb::python_error&) {
        interrupt = std::current_exception();
      }
    };
  }

  // Drops the report function and its exception. Both may refer to frames that refer to this transition, and Python's
  // garbage collector cannot see a cycle through C++.
  std::exception_ptr forget() {
    progress = nb::none();
    return std::exchange(interrupt, nullptr);
  }

  nb::object progress = nb::none();
  std::exception_ptr interrupt;  // Ctrl-C, which Python delivers when the report's code begins
};

void prepare(ReportingTransition& transition, const std::vector<std::string>& policies, std::vector<Ranges> live,
             const std::vector<bool>& restore, nb::object progress) {
  std::vector<Pause> pauses;
  const auto& pausing = transition.pausing();
  if (policies.size() != pausing.size() || live.size() != pausing.size())
    throw BadArgument("there are " + std::to_string(policies.size()) + " policies and " + std::to_string(live.size()) +
                      " lists of ranges, expected one of each for each of the " + std::to_string(pausing.size()) +
                      " regions to pause");
  if (restore.size() != transition.resuming().size())
    throw BadArgument("restore has " + std::to_string(restore.size()) + " values, expected one for each of the " +
                      std::to_string(transition.resuming().size()) + " regions to resume");
  for (std::size_t i = 0; i < pausing.size(); ++i)
    pauses.push_back({pausing[i], policy_of(policies[i]), std::move(live[i])});
  transition.progress = std::move(progress);
  const Unlocked release;
  transition.prepare(std::move(pauses), restore, transition.report());
}

// `arrived`: see Transition::run. It handles its exceptions.
nb::dict run(ReportingTransition& transition, const nb::object& arrived) {
  Transition::Outcome outcome;
  std::exception_ptr error;
  const bool has_callback = !arrived.is_none();
  {
    const Unlocked release;
    try {
      std::function<void()> callback;
      if (has_callback)
        callback = [&arrived] {
          const HeldGil python;
          call(arrived);
        };
      outcome = transition.run(callback);
    } catch (...) {
      error = std::current_exception();
    }
  }
  const std::exception_ptr interrupt = transition.forget();
  if (error) std::rethrow_exception(error);
  if (interrupt) std::rethrow_exception(interrupt);
  return dict_of("released_bytes", outcome.released_bytes, "restored_bytes", outcome.restored_bytes, "copied_bytes",
                 outcome.copied_bytes, "seconds", outcome.seconds);
}

}  // namespace

void bind_transitions(nb::module_& module) {
  nb::class_<ReportingTransition>(module, "Transition")
      .def(
          "__init__",
          [](ReportingTransition* self, std::vector<Region*> pause, std::vector<Region*> resume,
             std::optional<double> timeout, std::optional<double> memory_timeout, double reader_timeout) {
            const Bounds bounds{timeout ? deadline_in(*timeout) : kNever,
                                memory_timeout.value_or(core().parts.memory_timeout_s), reader_timeout};
            new (self) ReportingTransition(std::move(pause), std::move(resume), bounds);
          },
          "pause"_a, "resume"_a, "timeout"_a.none() = nb::none(), "memory_timeout"_a.none() = nb::none(),
          "reader_timeout"_a = 0.0)
      .def("begin", &ReportingTransition::begin, unlocked)
      .def("abort", &ReportingTransition::abort, unlocked)
      .def_prop_ro("stages", &ReportingTransition::stages)
      .def_prop_ro("pausing", &ReportingTransition::pausing, nb::rv_policy::reference)
      .def_prop_ro("resuming", &ReportingTransition::resuming, nb::rv_policy::reference)
      .def_prop_ro("continued", &ReportingTransition::continued, nb::rv_policy::reference)
      .def_prop_ro("discarded", &ReportingTransition::discarded, nb::rv_policy::reference)
      .def("prepare", &prepare, "policies"_a, "live"_a, "restore"_a, "progress"_a.none())
      .def("run", &run, "arrived"_a.none() = nb::none());
}

}  // namespace memsaver
