"""A picture of device memory over the last steps of a run, by process and region, with the phases as bands.

    python -m examples.colocate.loop --picture build/memory.svg
    python -m examples.colocate.picture build/memory.samples.json --steps 1 --out build/memory.svg   # drawn again

Needs matplotlib: `pip install '.[picture]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .arguments import integer
from .recipes import GIB
from .report import Span
from .timeline import ProcessSamples, Timeline

# One colour for each region: blue ones for the engine, warm ones for the trainer.
COLOURS = {
    ("engine", "kv_cache"): "#4c8dc9",
    ("engine", "weights"): "#1f4e8c",
    ("engine", "cuda_graph"): "#9cc4e4",
    ("engine", "buffers"): "#2b8a7e",
    ("trainer", "workspace"): "#f2b134",
    ("trainer", "params"): "#c8431f",
    ("trainer", "optimizer"): "#e3782d",
    ("trainer", "grads"): "#8c2d19",
}
NAMES = {
    "kv_cache": "KV cache",
    "cuda_graph": "CUDA graphs",
    "params": "parameters",
    "grads": "gradients",
}
TINTS = {"rollout": "#dcebf7", "train": "#fdeed2", "sync": "#dff0de", "away": "#ececec"}
OTHER_COLOURS = ("#7a5195", "#bc5090", "#58508d", "#ffa600")
BAND_NAMES = {"away": "away (check)"}
_CHARACTER = 0.0105  # of the width of the axes: narrower bands have an upright label
_LINE = 0.018  # of the same, of an upright label

Layer = tuple[str, list[float], str]  # label, GiB at each time, colour


def write(timeline: Timeline | None, path: Path) -> None:
    """Draw the picture, keep its samples beside it, and print both names. None: the run ended before its last steps."""
    if timeline is None:
        print(f"no picture in {path}: the run did not reach the steps to draw")
        return
    samples = path.with_suffix(".samples.json")
    timeline.save(samples)
    draw(timeline, path)
    left_out = f"; without {', '.join(timeline.left_out)} on other machines" if timeline.left_out else ""
    print(f"picture: {path}, of the samples in {samples}{left_out}", flush=True)


def draw(timeline: Timeline, path: Path) -> None:
    """Write the picture of a timeline to a .svg or .png file. Raises ImportError without matplotlib."""
    pyplot = _pyplot()
    devices = list(dict.fromkeys(each.device for each in timeline.processes))
    size = (10.5, 1.2 + 3.4 * len(devices))
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memsaver", "font.size": 9.5}):
        figure, rows = pyplot.subplots(len(devices), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
        for number, (device, (axes,)) in enumerate(zip(devices, rows)):
            processes = [each for each in timeline.processes if each.device == device]
            _draw_device(axes, timeline, processes, f"device {number}: " if len(devices) > 1 else "")
        rows[-1][0].set_xlabel("seconds")
        figure.suptitle(_title(timeline), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib, expected the extra: pip install '.[picture]'") from error
    matplotlib.use("Agg")  # without a display
    from matplotlib import pyplot

    return pyplot


def _title(timeline: Timeline) -> str:
    first, last = timeline.steps[0].name, timeline.steps[-1].name
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    hardware = timeline.hardware
    if hardware.startswith("host"):
        hardware = "host driver (no GPU: host memory acts as the device)"
    return f"Device memory of the regions, {steps}: {hardware}, {timeline.date}"


def _draw_device(axes: Any, timeline: Timeline, processes: Sequence[ProcessSamples], prefix: str) -> None:
    begin, end = timeline.begin, timeline.end
    times = sorted({begin, end, *(one.time for each in processes for one in each.samples if begin <= one.time <= end)})
    seconds = [time - begin for time in times]
    capacity = processes[0].device_bytes / GIB
    layers = [layer for process in processes for layer in _layers(process, times, len(processes) > 2)]
    axes.stackplot(
        seconds,
        [values for _, values, _ in layers],
        labels=[label for label, _, _ in layers],
        colors=[colour for _, _, colour in layers],
        edgecolor="white",
        linewidth=0.3,
        zorder=2,
    )
    edge = 0.0
    for span in timeline.phases:
        edge = _draw_band(axes, span, begin, end - begin, edge)
        _name_roles(axes, span, begin, end - begin, processes)
    for step in timeline.steps[1:]:
        axes.axvline(step.begin - begin, color="black", linewidth=0.8, linestyle=":", zorder=3)

    both = sum(max((sum(one.regions.values()) for one in each.samples), default=0) for each in processes) / GIB
    axes.axhline(capacity, color="black", linewidth=1.4, zorder=4)
    _note(axes, capacity, f"{prefix}capacity {_gib(capacity)}", "black", above=both < capacity)
    axes.axhline(both, color="#b00020", linewidth=1.2, linestyle="--", zorder=4)
    fits = "does not fit" if both > capacity else "fits"
    _note(axes, both, f"all processes resident at once: {_gib(both)}, {fits}", "#b00020", both >= capacity)
    axes.set_xlim(0, end - begin)
    axes.set_ylim(0, 1.12 * max(capacity, both))
    axes.set_ylabel("GiB")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the stack, from the top.
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _note(axes: Any, height: float, text: str, colour: str, above: bool) -> None:
    axes.annotate(
        text, (0.995, height), xycoords=("axes fraction", "data"), xytext=(0, 3 if above else -3),
        textcoords="offset points", ha="right", va="bottom" if above else "top", color=colour, fontsize=8.5, zorder=5,
    )  # fmt: skip


def _gib(value: float) -> str:
    return f"{value:.3g} GiB"


def _layers(process: ProcessSamples, times: Sequence[float], numbered: bool) -> Iterator[Layer]:
    """The memory of each region of a process at these times. `numbered`: the labels name the rank."""
    name = f"{process.role} {process.rank}" if numbered else process.role
    tags = _tags(process)
    known = [tag for role, tag in COLOURS if role == process.role and tag in tags]
    others = sorted(tags.difference(known))
    spare = iter(OTHER_COLOURS * (1 + len(others) // len(OTHER_COLOURS)))
    for tag in [*known, *others]:
        colour = COLOURS.get((process.role, tag)) or next(spare)
        yield f"{name}: {NAMES.get(tag, tag)}", _at(times, *_series(process, tag)), colour


def _tags(process: ProcessSamples) -> set[str]:
    """The regions that had memory."""
    return {tag for each in process.samples for tag, nbytes in each.regions.items() if nbytes}


def _series(process: ProcessSamples, tag: str) -> tuple[list[float], list[float]]:
    """Times, and the GiB of a region at each."""
    return [one.time for one in process.samples], [one.regions.get(tag, 0) / GIB for one in process.samples]


def _at(times: Sequence[float], known: Sequence[float], values: Sequence[float]) -> list[float]:
    """Values at other times, 0 before the first sample and after the last.

    A transition changes the memory chunk by chunk, so a straight line between its two samples is close.
    """
    import numpy

    return [float(value) for value in numpy.interp(times, known, values, left=0.0, right=0.0)]


def _draw_band(axes: Any, span: Span, begin: float, whole: float, edge: float) -> float:
    """The band of a phase. Its label begins behind ``edge``, the end of the label before it. Returns its own end."""
    left, width = span.begin - begin, span.end - span.begin
    axes.axvspan(left, left + width, color=TINTS.get(span.name, "#f4f4f4"), linewidth=0, zorder=0)
    label = BAND_NAMES.get(span.name, span.name)
    upright = width / whole < _CHARACTER * len(label)
    half = whole / 2 * (_LINE if upright else _CHARACTER * len(label))
    middle = max(left + width / 2, edge + half)
    axes.annotate(
        label, (middle, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
        ha="center", va="bottom", rotation=90 if upright else 0, fontsize=9 if not upright else 7.5,
        fontweight="bold", color="#333333",
    )  # fmt: skip
    return middle + half


def _name_roles(axes: Any, span: Span, begin: float, whole: float, processes: Sequence[ProcessSamples]) -> None:
    """The name of each role in its area, where there is room for it."""
    middle, below = (span.begin + span.end) / 2, 0.0
    capacity = processes[0].device_bytes / GIB
    for process in processes:
        held = sum(next(iter(_at([middle], *_series(process, tag)))) for tag in _tags(process))
        if held > 0.1 * capacity and (span.end - span.begin) / whole > 1.3 * _CHARACTER * len(process.role):
            axes.text(
                middle - begin, below + held / 2, process.role, ha="center", va="center", color="white",
                fontweight="bold", fontsize=10, zorder=5,
            )  # fmt: skip
        below += held


def main(arguments: list[str] | None = None) -> int:
    """Draw the samples of a run again."""
    parser = argparse.ArgumentParser(prog="python -m examples.colocate.picture", description=main.__doc__)
    parser.add_argument("samples", type=Path, help="the .samples.json file beside a picture")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture, .svg or .png")
    parser.add_argument("--steps", type=integer(1), default=2, metavar="N", help="the last ones")
    options = parser.parse_args(arguments)
    draw(Timeline.load(options.samples).last_steps(options.steps), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
