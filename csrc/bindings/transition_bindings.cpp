// Transitions, and backups that processes have in common.
#include <nanobind/stl/shared_ptr.h>

#include <functional>
#include <memory>
#include <utility>

#include "backup/backup.h"
#include "backup/common_memory.h"
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

void prepare(OwnedTransition& transition, const std::vector<Policy>& policies, std::vector<Ranges> live,
             const std::vector<bool>& restore, std::vector<std::shared_ptr<Backup>> common) {
  std::vector<Pause> pauses;
  const auto& pausing = transition.pausing();
  for (std::size_t i = 0; i < pausing.size(); ++i)
    pauses.push_back(
        {pausing[i], policies.at(i), std::move(live.at(i)), common.empty() ? nullptr : std::move(common.at(i))});
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

// `sums`: two numbers for each block of the parts, end to end.
std::shared_ptr<Backup> make_common_backup(std::shared_ptr<CommonMemory> memory, Ranges parts,
                                           const std::vector<std::uint64_t>& sums, std::optional<double> timeout) {
  std::vector<CommonMemory::Sum> pairs;
  for (std::size_t i = 0; i + 1 < sums.size(); i += 2) pairs.push_back({sums[i], sums[i + 1]});
  return common_backup(std::move(memory), std::move(parts), pairs, timeout ? deadline_in(*timeout) : kNever);
}

}  // namespace

template <>
inline constexpr auto fields<Stages::Event> = [](const Stages::Event& each) {
  return std::make_tuple(each.device, each.kind, each.began, each.ended, each.bytes, each.holders);
};

void bind_transitions(nb::module_& module) {
  // Made here, and not by their classes: they find their owners by shared_from_this(), and the end of one needs no GIL.
  nb::class_<Backup>(module, "CommonBackup");
  nb::class_<CommonMemory>(module, "CommonMemory").def("leave", &CommonMemory::leave, unlocked);
  module.def(
      "common_memory",
      [](const std::string& device, const std::string& path, const std::string& what, int rank) {
        return CommonMemory::of(opened(device).arena, path, what, rank);
      },
      "device"_a, "path"_a, "what"_a, "rank"_a, unlocked);
  module.attr("COMMON_BLOCK") = Blocks::kSize;
  module.def("common_backup", &make_common_backup, "memory"_a, "parts"_a, "sums"_a, "timeout"_a.none(), unlocked);
  nb::class_<OwnedTransition>(module, "Transition")
      .def(
          "__init__",
          [](OwnedTransition* self, std::vector<Region*> pause, std::vector<Region*> resume,
             std::optional<double> timeout, std::optional<double> memory_timeout, double reader_timeout,
             std::vector<Region*> lazy, std::vector<Region*> copy_ahead) {
            const Bounds bounds{timeout ? deadline_in(*timeout) : kNever,
                                memory_timeout.value_or(core().parts.memory_timeout_s), reader_timeout};
            new (self)
                OwnedTransition(std::move(pause), std::move(resume), bounds, std::move(lazy), std::move(copy_ahead));
          },
          "pause"_a, "resume"_a, "timeout"_a.none() = nb::none(), "memory_timeout"_a.none() = nb::none(),
          "reader_timeout"_a = 0.0, "lazy"_a = std::vector<Region*>(), "copy_ahead"_a = std::vector<Region*>())
      .def("begin", &OwnedTransition::begin, unlocked)
      .def("abort", &OwnedTransition::abort, unlocked)
      .def_prop_ro("stages", &OwnedTransition::stages)
      .def_prop_ro("events", &OwnedTransition::events)      // [(device, kind, began, ended, bytes, [(pid, bytes)])]
      .def_prop_ro("progress", &OwnedTransition::progress)  // bytes of contents that are copied, and of all to copy
      .def_prop_ro("pausing", &OwnedTransition::pausing, nb::rv_policy::reference)
      .def_prop_ro("resuming", &OwnedTransition::resuming, nb::rv_policy::reference)
      .def_prop_ro("continued", &OwnedTransition::continued, nb::rv_policy::reference)
      .def_prop_ro("discarded", &OwnedTransition::discarded, nb::rv_policy::reference)
      .def("prepare", &prepare, "policies"_a, "live"_a, "restore"_a,
           "common"_a = std::vector<std::shared_ptr<Backup>>(), unlocked)
      .def("run", &run, "arrived"_a.none() = nb::none());
}

}  // namespace memsaver
