// Transitions.
#include <functional>
#include <utility>

#include "bindings/bindings.h"
#include "transitions/transition.h"

namespace memsaver {
namespace {

// Python drops it with the GIL held, which abort() must not hold.
struct OwnedTransition : Transition {
  using Transition::Transition;
  ~OwnedTransition() {
    const Unlocked release;
    abort();
  }
};

void prepare(OwnedTransition& transition, const std::vector<std::string>& policies, std::vector<Ranges> live,
             const std::vector<bool>& restore) {
  std::vector<Pause> pauses;
  const auto& pausing = transition.pausing();
  for (std::size_t i = 0; i < pausing.size(); ++i)
    pauses.push_back({pausing[i], policy_of(policies.at(i)), std::move(live.at(i))});
  transition.prepare(std::move(pauses), restore);
}

// `arrived`: see Transition::run. It keeps its exceptions, and returns whether the regions may become active.
nb::dict run(OwnedTransition& transition, const nb::object& arrived) {
  Transition::Outcome outcome;
  std::function<void()> callback;
  if (!arrived.is_none())
    callback = [&arrived] {
      const HeldGil python;
      if (!nb::cast<bool>(call(arrived))) throw Error("the contents that arrived were refused");
    };
  {
    const Unlocked release;
    outcome = transition.run(callback);
  }
  return dict_of("released_bytes", outcome.released_bytes, "restored_bytes", outcome.restored_bytes, "copied_bytes",
                 outcome.copied_bytes, "seconds", outcome.seconds);
}

}  // namespace

template <>
inline constexpr auto fields<Stages::Event> = [](const Stages::Event& each) {
  return std::make_tuple(each.device, each.kind, each.began, each.ended, each.bytes, each.holders);
};

void bind_transitions(nb::module_& module) {
  nb::class_<OwnedTransition>(module, "Transition")
      .def(
          "__init__",
          [](OwnedTransition* self, std::vector<Region*> pause, std::vector<Region*> resume,
             std::optional<double> timeout, std::optional<double> memory_timeout, double reader_timeout,
             std::vector<Region*> lazy) {
            const Bounds bounds{timeout ? deadline_in(*timeout) : kNever,
                                memory_timeout.value_or(core().parts.memory_timeout_s), reader_timeout};
            new (self) OwnedTransition(std::move(pause), std::move(resume), bounds, std::move(lazy));
          },
          "pause"_a, "resume"_a, "timeout"_a.none() = nb::none(), "memory_timeout"_a.none() = nb::none(),
          "reader_timeout"_a = 0.0, "lazy"_a = std::vector<Region*>())
      .def("begin", &OwnedTransition::begin, unlocked)
      .def("abort", &OwnedTransition::abort, unlocked)
      .def_prop_ro("stages", &OwnedTransition::stages)
      .def_prop_ro("events", &OwnedTransition::events)  // [(device, kind, began, ended, bytes, [(pid, bytes)])]
      .def_prop_ro("pausing", &OwnedTransition::pausing, nb::rv_policy::reference)
      .def_prop_ro("resuming", &OwnedTransition::resuming, nb::rv_policy::reference)
      .def_prop_ro("continued", &OwnedTransition::continued, nb::rv_policy::reference)
      .def_prop_ro("discarded", &OwnedTransition::discarded, nb::rv_policy::reference)
      .def("prepare", &prepare, "policies"_a, "live"_a, "restore"_a, unlocked)
      .def("run", &run, "arrived"_a.none() = nb::none());
}

}  // namespace memsaver
