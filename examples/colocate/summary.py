"""The text of a run for a reader: an introduction, one step as bars, and at the end a table and a verdict."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from .recipes import GIB, MIB, Demand, Recipe
from .report import Report

WORK = {
    "rollout": "the engine samples completions",
    "away": "check: the trainer overwrites its workspace while the engine is paused",
    "train": "the trainer learns from the completions",
    "sync": "the trainer writes its weights into the engine's tensors",
}
STDOUT = "-"  # of --json
_WIDTH = 40  # characters of a bar
_HEADER = " step  reward    loss   grad  clipped    max gap   mean gap  truncated  tokens/s  turns, s step, s"
_LEGEND = (
    "reward: mean of the sampled completions (1 is the best); grad: norm of the gradient; clipped: share of tokens "
    "whose ratio was clipped; gap: difference between the log-probabilities of engine and trainer in nats, the "
    "largest of a token and the mean; truncated: share of tokens whose importance weight was truncated; "
    "turns: time in transitions"
)
_FEWEST_STEPS, _SHORTEST_WARM_UP = 10, 100  # the recipes that learn have 20 and 30, and 350
_TITLE = 14  # characters of the titles in the verdict


def size(nbytes: float) -> str:
    """Such as "1.5 GiB"."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def opening(recipe: Recipe, device: str, ranks: int) -> str:
    """The actors, the device and the work of a run."""
    kind = "GPU" if device == "cuda" else "host driver (no GPU: host memory acts as the device)"
    actors = "an engine and a trainer" if ranks == 1 else f"{ranks} engines and {ranks} trainers"
    note = "" if too_short(recipe) is None else ", too few to learn: this run checks the memory"
    return (
        f"Ray actors, {actors}, share the {kind}: {recipe.warm_up_steps} steps of supervised warm-up, then "
        f"{recipe.steps} steps of reinforcement learning{note}"
    )


def too_short(recipe: Recipe) -> str | None:
    """The reason for which the reward of a run does not rise. None: the run is long enough to learn."""
    if recipe.steps < _FEWEST_STEPS:
        return f"{_steps(recipe.steps)} too few to learn"
    if recipe.warm_up_steps < _SHORTEST_WARM_UP:
        return f"{_steps(recipe.warm_up_steps, ' of warm-up')} too few to learn"
    return None


def capacity(nbytes: int, device_bytes: int, recipe: Recipe, device: str) -> str:
    """The part of a device that regions may take, and the reason for it."""
    if device == "cpu":
        more = nbytes - recipe.host_device_bytes
        source = f"{size(recipe.host_device_bytes)} of the recipe"
        if more:
            source += f" and {size(more)} more: the odd size gives this run a device of its own"
        return f"the device is {size(nbytes)} of host memory: {source}; regions may take all of it"
    if nbytes < device_bytes:
        rest = f"the other {size(device_bytes - nbytes)} are for contexts and for torch's memory outside of regions"
        return f"the device is a GPU of {size(device_bytes)}; regions may take {size(nbytes)}, {rest}"
    return (
        f"the device is a GPU of {size(device_bytes)}; without a shared pool regions may take all that the driver gives"
    )


def introduction(engine: Demand, trainer: Demand, device_bytes: int, pairs: int, pausing: bool) -> list[str]:
    """Two lines: the memory that both roles need of a device, and the reason for turns.

    `device_bytes`: those that regions may take. `pairs`: engines, and trainers, on one device. The demands are those
    of one actor.
    """
    wanted = pairs * (engine.nbytes + trainer.nbytes)
    share = f"{size(wanted)}, {_percent(wanted, device_bytes)} of {size(device_bytes)}"
    needs = (
        f"in whole chunks the engine needs {size(pairs * engine.nbytes)} ({engine.largest}), "
        f"the trainer {size(pairs * trainer.nbytes)} ({trainer.largest})"
    )
    if wanted <= device_bytes:
        reason = f"together they need {share}, so both fit; {'they take turns all the same' if pausing else 'no turns'}"
    elif pausing:
        reason = f"together they need {share}, so both do not fit: they take turns, and the idle one pauses"
    else:
        reason = (
            f"together they need {share}, so both do not fit, and --no-pause releases nothing: expect out of memory"
        )
    return [needs, reason]


def step_drawing(report: Report) -> list[str]:
    """A row for each phase: a bar with the memory of the engines (E) and of the trainers (T), and their bytes."""
    whole = max(report.device_bytes * report.devices, 1)
    lines = [f"one step; a bar is {size(whole)} of device memory, E: engine, T: trainer"]
    for phase, work in WORK.items():
        if phase not in report.phase_held:
            continue
        held = report.phase_held[phase]
        bar = _bar("E", held.engine, whole) + _bar("T", held.trainer, whole)
        figures = f"engine {size(held.engine):>9}, trainer {size(held.trainer):>9}"
        lines.append(f"  {phase:<8}|{bar:<{_WIDTH}}| {figures}  {work}")
    return lines


def verdict(report: Report, recipe: Recipe) -> list[str]:
    """The figures of a run, a line each, and at the end its result."""
    lines = []
    if report.out_of_memory:
        lines.append(("out of memory", report.out_of_memory))
    passed = ", ".join(f"{name} ({count})" for name, count in report.proofs.items())
    checks = f"all {sum(report.proofs.values())} checks held: {passed}"
    lines.append(("proofs", checks if passed else "the run ended before the first check"))
    if report.rows:
        sampled = f"{report.rows[0].reward:.3f} -> {report.rows[-1].reward:.3f} in rollouts"
        if "end" in report.held_out:
            before, after = report.held_out["warm-up"], report.held_out["end"]
            sampled = f"{before:.3f} -> {after:.3f} on held-out problems, {sampled}"
        without = (
            "--zero-advantages changes no weights" if report.settings.get("zero_advantages") else too_short(recipe)
        )
        lines.append(("reward", f"{sampled} (1 is the best)" + (f"; {without}" if without else "")))
        moved, whole = _transitions(report)
        share = f"{moved:.1f} of {whole:.1f} s of the steps, {100 * moved / whole:.1f} %"
        graphs = f"{report.replays} graphs replayed" + (" (no GPU)" if report.settings.get("device") == "cpu" else "")
        lines.append(("transitions", f"{share}; {report.pauses} regions paused, {graphs}"))
    if report.sync_seconds:
        syncs = report.sync_seconds
        lines.append(("weight syncs", f"{len(syncs)} in {sum(syncs):.2f} s, at most {max(syncs):.3f} s"))
    if report.rollout_seconds:
        rate = report.rollout_tokens / report.rollout_seconds
        lines.append(("tokens", f"{report.tokens} generated, {rate:.0f} per second in rollouts"))
    for each in report.recoveries:
        back = f"back to step {each.back_to} in {each.seconds:.1f} s"
        lines.append((f"step {each.step}", f"lost {', '.join(each.lost)}; {back}"))
    if report.settings.get("pause", True):
        lines.append(("try", "--no-pause: both stay resident; if both do not fit, the run ends in out of memory"))
    elif report.out_of_memory:
        lines.append(("try", "the same without --no-pause: the two take turns on this device"))
    lines.append(("time", f"{report.seconds:.1f} s"))
    lines.append(("Result:", result(report, recipe)))
    indent = " " * _TITLE
    return [textwrap.fill(f"{title:<{_TITLE}}{text}", 120, subsequent_indent=indent) for title, text in lines]


def result(report: Report, recipe: Recipe) -> str:
    """The conclusion of a run in a few sentences."""
    needs = f"both need {_percent(report.wanted_bytes, report.device_bytes)} of the device"
    pausing = report.settings.get("pause", True)
    if report.out_of_memory:
        return f"out of memory; {needs}" + (", and --no-pause keeps both resident." if not pausing else ".")
    found = [needs]
    if report.phase_held:
        most = max(held.engine + held.trainer for held in report.phase_held.values())
        found.append(f"at most {size(most)} was in use in any phase")
    if not report.proofs:
        found.append("no check was reached")
    elif not pausing:
        found.append("all checks held, and nothing was paused")
    elif "tokens are the same" in report.proofs or "overwritten" in report.proofs:
        found.append("no contents were lost, and no address changed")
    else:
        found.append("all checks held, and none of them had a pause between two rollouts")
    if report.rows:
        moved, whole = _transitions(report)
        found.append(f"transitions took {_percent(moved, whole)} of the time of the steps")
    if report.recoveries:
        found.append(f"{len(report.recoveries)} times dead actors were replaced")
    if report.rows and report.rows[-1].step < recipe.steps:
        found.append(f"the run stopped after step {report.rows[-1].step} of {recipe.steps}")
    return "; ".join(found) + "."


def show_end(report: Report, recipe: Recipe) -> None:
    """Print the table of the steps and the verdict."""
    print()
    if report.rows:
        print(_HEADER)
        for row in report.rows:
            print(row)
        print(textwrap.fill(_LEGEND, 120))
        print()
    print("\n".join(verdict(report, recipe)), flush=True)


def write_json(report: Report, target: str | None) -> None:
    """Write the figures as a line of JSON to a file or, for "-", to the standard output."""
    if target is None:
        return
    line = json.dumps(report.as_dict())
    if target == STDOUT:
        print(line, flush=True)
    else:
        Path(target).write_text(line + "\n")


def _transitions(report: Report) -> tuple[float, float]:
    """Seconds of the steps in transitions, and of the steps as a whole."""
    return sum(row.transition_seconds for row in report.rows), sum(row.seconds for row in report.rows)


def _steps(count: int, kind: str = "") -> str:
    return f"1 step{kind} is" if count == 1 else f"{count} steps{kind} are"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1e-9):.0f} %"


def _bar(letter: str, nbytes: int, whole: int) -> str:
    """At least one character for any memory."""
    return letter * max(round(_WIDTH * nbytes / whole), nbytes > 0)
