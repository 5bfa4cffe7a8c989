"""Random sequences over regions as a Hypothesis state machine: one thread, a virtual clock, a device under work.

A failure shrinks to the shortest sequence that shows it. ``MEMSAVER_TEST_EXPLORE=2000`` runs that many new sequences
instead of the fixed ones.

The thread that frees resting memory (csrc/regions/reclaimer.cpp) runs beside the sequence. It changes no virtual time,
so no check depends on its progress, except that memory in use is compared until it agrees. The threads of backups on
disk make their calls in any order, so an armed call may fail or not: the choice of a rule does not depend on states.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import memsaver
from memsaver import _core
from tests import controls
from tests.support import (
    GIB,
    KIB,
    MIB,
    PAGE,
    Fill,
    Ledger,
    drop_backups,
    exploration,
    fast_directory,
    free_bytes,
    holds,
    host_held_bytes,
    random_bytes,
    segments,
    unnamed_files,
    use_device,
)

ROOM = 160 * MIB  # of the device, for one sequence
REGIONS = 3
STREAMS = 2
KINDS: list[dict[str, Any]] = [
    {"backup": "none"},
    {"backup": "none", "fill": "poison"},
    {"backup": "host"},
    {"backup": "host", "fill": "zero"},
    {"backup": "host", "frozen": True},
    {"backup": "disk"},
    {"backup": "disk", "frozen": True},
]
FILL_BYTES = {"zero": 0, "poison": 0xFF}
SIZES = [100, 4097, 300 * KIB, PAGE, 3 * MIB + 5, 20 * MIB, 36 * MIB]
WINDOW = 4 * KIB  # of a large segment only some bytes are written and compared
LOOK_S = 0.002  # a bounded wait on the virtual clock may notice an end so much later
TIMEOUTS = [None, None, None, 0.0, 0.05, 5.0]
HOLDS = [0.001, 0.03, 2.0, None]
DELAYS = [0.0, 0.0, 0.0, 0.01, 0.5]

_numbers = itertools.count()

indices = st.integers(0, 11)
bounds = st.sampled_from(TIMEOUTS)
some_sizes = st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)
chosen_regions = st.sets(st.integers(0, REGIONS - 1), min_size=1)


def wait_for(condition: Any) -> bool:
    """Whether another thread brings it about within a time that is long enough for any machine."""
    end = time.monotonic() + 3
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0002)
    return True


@dataclass(eq=False)
class Window:
    """Bytes of a segment that are compared. None: undefined."""

    offset: int
    expected: np.ndarray[Any, Any] | None


@dataclass(eq=False)
class Segment:
    """A tensor of a region, and its expected contents."""

    tensor: Any
    address: int
    nbytes: int
    windows: list[Window]

    def write(self, seed: int) -> None:
        self.write_at(self.address, seed)

    @property
    def window_bytes(self) -> int:
        return self.nbytes if len(self.windows) == 1 else WINDOW

    def copy(self) -> Segment:
        return replace(self, tensor=None, windows=[replace(each) for each in self.windows])

    def write_at(self, address: int, seed: int) -> None:
        for number, window in enumerate(self.windows):
            size = self.window_bytes
            window.expected = random_bytes(size, 16 * seed + number).copy()
            ctypes.memmove(address + window.offset, window.expected.ctypes.data, size)

    def holds_at(self, address: int) -> bool:
        return all(
            window.expected is None or holds(address + window.offset, window.expected) for window in self.windows
        )


def windows_of(nbytes: int) -> list[Window]:
    if nbytes <= 4 * MIB:
        return [Window(0, None)]
    return [Window(offset, None) for offset in (0, nbytes // 2, nbytes - WINDOW)]


@dataclass(eq=False)
class Model:
    """A region, and its expected state."""

    region: memsaver.Region
    segments: list[Segment] = field(default_factory=list)
    paused: bool = False
    copied: bool = False  # a backup exists, or nothing was there to be copied
    backup_bytes: int = 0
    sealed: bool = False
    partial: bool = False  # paused, and a fault left chunks mapped
    users: int = 0  # guarded launches
    lazy: bool = False  # paused so: demands copy some of its contents

    @property
    def writable(self) -> bool:
        return not self.paused and not self.sealed

    @property
    def allocated(self) -> int:
        return sum(-(-each.nbytes // 512) * 512 for each in self.segments)

    @property
    def missing(self) -> int:
        """Bytes of the pages under the live segments."""
        pages = {
            page
            for each in self.segments
            for page in range(each.address // PAGE, (each.address + each.nbytes - 1) // PAGE + 1)
        }
        return len(pages) * PAGE

    def undefine(self) -> None:
        for each in self.segments:
            for window in each.windows:
                window.expected = None

    def leave(self, policy: str, lazy: bool) -> None:
        """A pause with this policy has gone through."""
        if self.paused:
            return
        self.paused, self.lazy = True, lazy
        self.copied = policy != "none" and (self.sealed or bool(self.segments))
        self.backup_bytes = 0 if not self.copied else self.backup_bytes if self.sealed else self.allocated
        self.sealed = False
        if not self.copied:
            self.undefine()

    def come(self, restore: bool) -> None:
        if not self.paused:
            return
        kept = restore and self.copied
        if not kept:
            self.undefine()
            if self.region.fill is not None and not self.partial:
                for each in self.segments:
                    for window in each.windows:
                        window.expected = np.full(each.window_bytes, FILL_BYTES[self.region.fill], np.uint8)
        self.sealed = self.region.frozen and kept and bool(self.segments)
        if self.lazy and self.sealed:  # a copy is kept if all of the contents were copied meanwhile
            self.sealed = bool(self.region._core.sealed)
        self.backup_bytes = self.backup_bytes if self.sealed else 0
        self.paused = self.copied = self.partial = self.lazy = False


@dataclass(eq=False)
class Kernel:
    """A write that is queued on a stream."""

    segment: Segment
    window: Window
    begin: int
    end: int
    byte: int
    due: float  # on the virtual clock; infinite: until its stream is released
    marker: Any  # a read queued behind it

    def ran(self) -> bool:
        return self.marker.bytes() is not None

    def apply(self) -> None:
        if self.window.expected is not None:
            self.window.expected[self.begin : self.end] = self.byte


class Device(RuleBasedStateMachine):
    """All calls that change regions, on a device with work in flight."""

    foreign = 0  # bytes of the device that are in use from before

    def __init__(self) -> None:
        super().__init__()
        use_device()
        drop_backups()
        self.others: list[Fill] = []  # memory of the device that is not a region's
        wait_for(lambda: memsaver.region("flush", device="cpu").mapped_bytes == 0)
        Device.foreign = self.unknown_bytes()  # earlier sequences may have left memory behind
        self.ledger = Ledger()
        self.others.append(Fill(leave=min(free_bytes(), ROOM)))
        controls.virtual_clock(True)
        self.models: list[Model] = []
        self.streams = [controls.stream_create() for _ in range(STREAMS)]
        self.queues: list[list[Kernel]] = [[] for _ in range(STREAMS)]
        self.launched: list[list[Model]] = []
        self.captures = 0
        self.marks_delay = 0.0
        self.records = True
        self.seeds = itertools.count()
        self.views: list[tuple[torch.Tensor, Segment]] = []  # of backups, with their contents
        self.limited = False  # host memory
        self.armed: tuple[int, str] | None = None
        self.was_hit = self.ever_hit = False

    @initialize(
        kinds=st.lists(st.sampled_from(KINDS), min_size=REGIONS, max_size=REGIONS),
        records=st.booleans(),
        retain=st.sampled_from([0, 0, 16 * MIB]),
        sizes=st.lists(some_sizes, min_size=REGIONS, max_size=REGIONS),
    )
    def begin(self, kinds: list[dict[str, Any]], records: bool, retain: int, sizes: list[list[int]]) -> None:
        self.records = records
        controls.record_supported(records)
        memsaver.configure(retain=retain)
        self.models = [self.make(kind) for kind in kinds]
        for number, some in enumerate(sizes):
            self.allocate(number, some)

    # Helpers

    @staticmethod
    def make(kind: dict[str, Any]) -> Model:
        return Model(memsaver.region(f"machine {next(_numbers)}", device="cpu", **kind))

    def model(self, index: int) -> Model:
        return self.models[index % len(self.models)]

    def pick(self, index: int, which: int) -> tuple[Model, Segment] | None:
        model = self.model(index)
        return (model, model.segments[which % len(model.segments)]) if model.segments else None

    @contextmanager
    def fault(self) -> Iterator[None]:
        """The armed call fails within this block. ``was_hit``: whether the call was reached."""
        armed, self.armed, self.was_hit = self.armed, None, False
        if armed is not None:
            controls.arm(*armed)
        try:
            yield
        finally:
            self.was_hit = armed is not None and controls.calls() >= armed[0]
            self.ever_hit |= self.was_hit
            for model in self.models:  # a chunk that could not be unmapped after its copy
                model.partial |= model.paused and model.region._handle.mapped_bytes > 0
            controls.disarm()

    def catch_up(self) -> None:
        """Applies the kernels whose time has come, and looks that no other one has run."""
        while any(abs(each.due - controls.clock_now()) < 1e-6 for queue in self.queues for each in queue):
            controls.clock_pass(1e-5)  # away from rounding
        now = controls.clock_now()
        for queue in self.queues:
            while queue and queue[0].due < now:
                ended = wait_for(lambda first=queue[0]: first.ran() or controls.context_lost())
                assert not controls.context_lost(), "an illegal access"
                assert ended, "a kernel whose time has come did not run"
                queue.pop(0).apply()
            assert not any(each.ran() for each in queue), "a kernel ran before its time"

    def work_left(self) -> float:
        """Seconds until the streams are idle."""
        now = controls.clock_now()
        return max((each.due - now for queue in self.queues for each in queue), default=0.0)

    def wait_s(self) -> tuple[float, float]:
        """The least and the most seconds that a wait for the device takes."""
        least = max(self.work_left(), self.marks_delay if self.records else 0.0)
        return least, least if self.records else max(least, max(DELAYS))

    def release_held(self) -> None:
        """Before a call that would wait for ever."""
        if math.isinf(self.work_left()):
            self.release(0)
            self.release(1)

    def unbounded(self, timeout: float | None, models: list[Model]) -> None:
        """Before a call without a bound: ends everything that only this thread can end."""
        if timeout is None:
            self.release_held()
            while any(model.users for model in models):
                self.finish_launch()

    def check_wait(
        self, error: memsaver.Error | None, timeout: float | None, models: list[Model], may_skip: bool = False
    ) -> None:
        """Compares with the model whether a call that waits for launches and the device had to run into its bound.

        ``may_skip``: the call need not wait for launches.
        """
        assert self.waited is not None
        (least, most), users = self.waited, any(model.users for model in models)
        if isinstance(error, memsaver.WaitTimeoutError):
            assert timeout is not None, "a call without a bound ran into one"
            assert error.stage in ("device", "launches", "backup"), error
            if error.stage == "backup":
                assert most + LOOK_S >= timeout, "pinned memory was not ready, and nothing else took time"
            elif error.stage == "launches":
                assert users, "a wait for launches that are not there"
            else:
                assert most + LOOK_S >= timeout, f"the wait takes {most} s at most, and {timeout} s were allowed"
                assert not users or may_skip, "the device came before the launches"
            return
        if error is None:
            assert not users or may_skip, "a pause under a guarded launch"
            assert timeout is None or least <= timeout, f"work for {least} s was waited for within {timeout} s"

    # Segments

    @rule(index=indices, sizes=some_sizes)
    def allocate(self, index: int, sizes: list[int]) -> None:
        for nbytes in sizes:
            self.allocate_one(self.model(index), nbytes)

    def allocate_one(self, model: Model, nbytes: int) -> None:
        try:
            with self.fault():
                tensor = model.region.empty(nbytes, torch.uint8)
        except memsaver.RegionPausedError:
            assert model.paused
            return
        except memsaver.OutOfMemoryError as error:
            assert error.needed_bytes == nbytes
            needed = -(-nbytes // PAGE) * PAGE + PAGE
            assert self.was_hit or self.memory_is_short(needed)
            return
        except memsaver.Error:
            assert model.sealed or self.was_hit
            return
        assert model.writable
        address = tensor.data_ptr()
        for other in self.models:
            for each in other.segments:
                apart = address + nbytes <= each.address or each.address + each.nbytes <= address
                assert apart, "two segments share addresses"
        segment = Segment(tensor, address, nbytes, windows_of(nbytes))
        segment.write(next(self.seeds))
        model.segments.append(segment)

    def memory_is_short(self, needed: int, coming: Sequence[Model] = ()) -> bool:
        """Whether a demand may fail. During a capture nothing is copied, and a copy needs host memory.

        A region that resumes keeps its own offered chunks whole, with the bytes beyond its segments.
        """
        found = [(model.region.offered_bytes, model.missing if model in coming else GIB) for model in self.models]
        offered = sum(map(min, found))
        if self.captures or self.limited:
            offered = 0
        return free_bytes() + offered < needed

    @rule(index=indices, which=indices)
    def free(self, index: int, which: int) -> None:
        found = self.pick(index, which)
        if found is not None:
            model, segment = found
            model.segments.remove(segment)
            with self.fault():
                del segment.tensor

    @rule(index=indices)
    def write(self, index: int) -> None:
        if self.model(index).writable:
            for segment in self.model(index).segments:
                segment.write(next(self.seeds))

    @rule(index=indices, which=indices)
    def read_backup(self, index: int, which: int) -> None:
        found = self.pick(index, which)
        if found is None:
            return
        model, segment = found
        try:
            contents = memsaver.cpu_backup(segment.tensor, clone=True)
        except memsaver.Error:
            assert not model.paused or not model.copied or model.partial or (model.lazy and self.may_refuse_copies)
            return
        assert model.paused and model.copied
        assert segment.holds_at(contents.data_ptr()), "the backup differs"

    @property
    def may_refuse_copies(self) -> bool:
        """Of contents that a lazy pause has left on the device."""
        return bool(self.captures or self.limited)

    @rule(index=indices, which=indices, keep=st.booleans())
    def write_backup(self, index: int, which: int, keep: bool) -> None:
        """A resume brings the written contents. A view that is kept outlives it."""
        found = self.pick(index, which)
        if found is None or not found[0].paused or not found[0].copied or found[0].partial:
            return
        model, segment = found
        try:
            with self.fault():
                view = memsaver.cpu_backup(segment.tensor)
        except memsaver.BackupError as error:
            assert "in a file" in str(error) or self.was_hit or self.limited or model.lazy, error
            return
        except memsaver.Error as error:
            assert self.was_hit or (model.lazy and self.captures), error
            return
        assert segment.holds_at(view.data_ptr()), "the backup differs"
        segment.write_at(view.data_ptr(), next(self.seeds))
        self.views = [each for each in self.views if each[0].data_ptr() != view.data_ptr()]
        if keep and not model.region.frozen:
            self.views.append((view, segment.copy()))

    @rule()
    def release_host_memory(self) -> None:
        with self.fault():
            memsaver.release_host_memory()

    @rule(limited=st.booleans())
    def limit_host_memory(self, limited: bool) -> None:
        self.limited = limited
        memsaver.configure(host_limit=host_held_bytes() + 20 * MIB if limited else None)

    @rule(index=indices)
    def thaw(self, index: int) -> None:
        model = self.model(index)
        try:
            model.region.thaw()
        except memsaver.RegionPausedError:
            assert model.paused
            return
        assert not model.paused
        model.sealed, model.backup_bytes = False, 0

    # Work

    @rule(index=indices, which=indices, stream=st.integers(0, STREAMS - 1), hold=st.sampled_from(HOLDS), byte=indices)
    def launch(self, index: int, which: int, stream: int, hold: float | None, byte: int) -> None:
        found = self.pick(index, which)
        if found is None or not found[0].writable:
            return
        segment = found[1]
        if hold is None and not self.records:
            hold = HOLDS[2]  # without marks a wait blocks in the driver
        for number, queue in enumerate(self.queues):
            if number != stream and any(each.segment is segment for each in queue):
                return  # kernels on two streams would race
        window = segment.windows[byte % len(segment.windows)]
        begin = segment.window_bytes // 4
        end = segment.window_bytes - begin
        due = math.inf if hold is None else controls.clock_now() + hold
        queue = self.queues[stream]
        controls.stream_write(self.streams[stream], segment.address + window.offset + begin, end - begin, byte, hold)
        marker = controls.stream_read(self.streams[stream], segment.address, 0, hold)
        due = max([due, *(each.due for each in queue)])
        queue.append(Kernel(segment, window, begin, end, byte, due, marker))

    @rule(stream=st.integers(0, STREAMS - 1))
    def release(self, stream: int) -> None:
        controls.stream_release(self.streams[stream])
        for kernel in self.queues[stream]:
            kernel.due = -math.inf

    @rule(seconds=st.sampled_from([0.002, 0.1, 3.0]))
    def pass_time(self, seconds: float) -> None:
        controls.clock_pass(seconds)

    @rule(marks=st.sampled_from(DELAYS), copies=st.sampled_from(DELAYS))
    def slow_down(self, marks: float, copies: float) -> None:
        controls.marks_delay(marks)
        controls.copies_delay(copies)
        self.marks_delay = marks

    @rule(chosen=chosen_regions)
    def begin_launch(self, chosen: set[int]) -> None:
        models = [self.models[number] for number in sorted(chosen)]
        away = _core.acquire([model.region._core for model in models])
        assert (away is None) == (not any(model.paused for model in models))
        if away is None:
            self.launched.append(models)
            for model in models:
                model.users += 1

    @rule()
    def finish_launch(self) -> None:
        models = self.launched.pop() if self.launched else []
        _core.release([model.region._core for model in models])
        for model in models:
            model.users -= 1

    @precondition(lambda self: self.captures == 0)
    @rule()
    def begin_capture(self) -> None:
        _core.capture_begins()
        controls.capture_begin()
        self.captures += 1

    @precondition(lambda self: self.captures)
    @rule(again=st.integers(0, 3))
    def end_capture(self, again: int = 1) -> None:
        """``again`` is 0: another one begins before."""
        if again == 0:
            self.begin_capture()
        assert controls.capture_end(), "a wait or a mark broke the capture"
        _core.capture_ends()
        self.captures -= 1

    # Memory

    @precondition(lambda self: len(self.others) < 3)
    @rule(leave=st.sampled_from([0, 2 * PAGE, 20 * MIB, 60 * MIB]))
    def another_takes_memory(self, leave: int) -> None:
        self.others.append(Fill(leave=min(free_bytes(), leave)))

    @precondition(lambda self: len(self.others) > 1)
    @rule()
    def another_gives_memory_back(self) -> None:
        self.others.pop().close()

    @rule(nth=st.integers(1, 24), kind=st.sampled_from(["error", "memory"]))
    def arm(self, nth: int, kind: str) -> None:
        self.armed = nth, kind

    # Transitions

    def move(
        self,
        out: list[Model],
        back: list[Model],
        backup: str | None,
        restore: bool,
        timeout: float | None,
        memory_timeout: float,
        lazy: bool = False,
    ) -> None:
        leaving = [model for model in out if not model.paused or model.partial]
        offered = [model for model in out if model.paused and model.region.offered_bytes and not lazy]
        coming = [model for model in back if model.paused]
        captured = bool(self.captures and leaving)
        if not captured:
            self.unbounded(timeout if leaving else 0.0, leaving)
        self.catch_up()
        self.waited = self.wait_s() if leaving else (0.0, 0.0)
        missing = sum(model.missing for model in coming)
        policies = {model: backup or str(model.region.backup) for model in leaving}
        saved = [model for model in leaving if not model.paused and not model.sealed and policies[model] != "none"]
        restored = [model for model in coming if restore and model.copied]
        released = sum(model.region.mapped_bytes for model in leaving)
        released += sum(model.region.offered_bytes for model in offered)
        backups = sum(model.region.backup_bytes for model in offered)
        done = memsaver.Transition()
        error: memsaver.Error | None = None
        try:
            with self.fault():
                done = memsaver.switch(
                    pause=[model.region.tag for model in out],
                    resume=[model.region.tag for model in back],
                    backup=backup,
                    lazy=lazy,
                    restore=restore,
                    timeout=timeout,
                    memory_timeout=memory_timeout,
                )
        except memsaver.Error as raised:
            error = raised
        states = {model: model.region.state for model in leaving + coming}
        if self.was_hit:
            for model in leaving:
                if states[model] == "paused":
                    model.leave(policies[model], lazy)
                    model.partial = model.region.mapped_bytes > 0
            for model in coming:
                if states[model] == "active":
                    kept = model.region.fill is not None and model.copied and not restore
                    model.come(restore)
                    if error is not None and kept:
                        model.undefine()  # the fill of kept memory failed, after the resume
                else:
                    model.partial = model.region.mapped_bytes > 0
            return
        if captured or (self.captures and offered):
            assert error is not None and "being captured" in str(error), "a pause during a capture"
            return
        if leaving:
            self.check_wait(error, timeout, leaving)
        if isinstance(error, memsaver.WaitTimeoutError):
            assert leaving, "a resume alone waits for nothing"
            return
        if isinstance(error, memsaver.BackupError):
            assert self.limited, error
            return
        if isinstance(error, memsaver.OutOfMemoryError):
            assert coming and self.memory_is_short(missing, coming), (
                f"{missing} bytes are needed, {free_bytes()} are free"
            )
            return
        if error is not None:
            raise error
        for tags, side in ((done.paused, leaving), (done.resumed, coming)):
            assert sorted(tags) == sorted(each.region.tag for each in side)
        if lazy and leaving and not coming:
            assert done.copied_bytes == 0 or any(model.partial for model in leaving)
        elif not lazy and not any(model.partial or model.lazy for model in leaving + coming):
            copied = sum(model.region.backup_bytes for model in offered) - backups
            assert done.copied_bytes == sum(model.allocated for model in saved + restored) + copied
            assert done.released_bytes == released
            assert done.restored_bytes == sum(model.region.mapped_bytes for model in coming)
        for model in leaving:
            model.leave(policies[model], lazy)
            model.partial = False
        for model in coming:
            model.come(restore)

    policies = st.sampled_from([None, None, None, "none", "host", "disk"])

    @rule(chosen=chosen_regions, backup=policies, timeout=bounds, lazy=st.booleans())
    def pause(self, chosen: set[int], backup: str | None, timeout: float | None, lazy: bool) -> None:
        self.move([self.models[number] for number in sorted(chosen)], [], backup, True, timeout, 0.0, lazy)

    @rule(
        chosen=chosen_regions,
        restore=st.sampled_from([True, True, False]),
        timeout=bounds,
        memory_timeout=st.sampled_from([0.0, 0.2]),
    )
    def resume(self, chosen: set[int], restore: bool, timeout: float | None, memory_timeout: float) -> None:
        self.move([], [self.models[number] for number in sorted(chosen)], None, restore, timeout, memory_timeout)

    @rule(
        sides=st.lists(st.sampled_from(["out", "back", ""]), min_size=REGIONS, max_size=REGIONS),
        backup=policies,
        timeout=bounds,
        memory_timeout=st.sampled_from([0.0, 0.2]),
        lazy=st.booleans(),
    )
    def switch(
        self, sides: list[str], backup: str | None, timeout: float | None, memory_timeout: float, lazy: bool
    ) -> None:
        out, back = ([model for model, at in zip(self.models, sides) if at == side] for side in ("out", "back"))
        self.move(out, back, backup, True, timeout, memory_timeout, lazy)

    @rule(chosen=chosen_regions, timeout=bounds)
    def trim(self, chosen: set[int], timeout: float | None) -> None:
        models = [self.models[number] for number in sorted(chosen)]
        active = [model for model in models if not model.paused]
        captured = bool(self.captures and active)
        if not captured:
            self.unbounded(timeout if active else 0.0, active)
        self.catch_up()
        self.waited = self.wait_s() if active else (0.0, 0.0)
        error: memsaver.Error | None = None
        try:
            with self.fault():
                memsaver.trim([model.region.tag for model in models], timeout=timeout)
        except memsaver.Error as raised:
            error = raised
        if self.was_hit:
            return
        if captured:
            assert error is not None and "being captured" in str(error), "a trim during a capture"
            return
        if timeout is not None and isinstance(error, memsaver.WaitTimeoutError) and len(active) > 1:
            self.waited = self.waited[0], math.inf  # each region waits anew: the first took a part of the bound
        self.check_wait(error, timeout, active, may_skip=True)
        if isinstance(error, memsaver.WaitTimeoutError):
            return
        if error is not None:
            raise error
        empty = [model.region for model in active if not model.segments]
        assert wait_for(lambda: not any(each.mapped_bytes for each in empty)), "chunks without a segment stay"

    @rule(index=st.integers(0, REGIONS - 1), kind=st.sampled_from(KINDS))
    def close(self, index: int, kind: dict[str, Any]) -> None:
        """Closes a region; another takes its place."""
        model = self.models[index]
        if not model.segments and not self.captures:
            self.release_held()
        try:
            with self.fault():
                model.region.close()
        except memsaver.Error as error:
            expected = model.segments or model.users or model.partial or self.captures or self.was_hit
            assert expected, f"an empty region: {error}"
            return
        assert not model.segments and not model.users
        self.models[index] = self.make(kind)

    # Invariants

    @invariant()
    def check(self) -> None:
        self.catch_up()
        assert not controls.context_lost(), "an illegal access"
        for model in self.models:
            region = model.region
            assert region.state == ("paused" if model.paused else "active")
            assert region.allocated_bytes == model.allocated
            assert region.backup_bytes <= model.backup_bytes
            assert model.lazy or (region.backup_bytes, region.offered_bytes) == (model.backup_bytes, 0)
            assert region._core.sealed == (model.copied and region.frozen if model.paused else model.sealed)
            held = segments(region)
            for each in model.segments:
                assert each.tensor.data_ptr() == each.address
                assert any(begin <= each.address and each.address + each.nbytes <= begin + size for begin, size in held)
            if model.paused:
                assert model.partial or region.mapped_bytes == 0
                continue
            assert region.mapped_bytes >= model.missing
            for each in model.segments:
                assert each.holds_at(each.address), f"{each.nbytes} bytes at {each.address:#x} differ"
        for view, contents in self.views:
            assert contents.holds_at(view.data_ptr()), "a view has changed"
        agrees = wait_for(self.agrees)
        assert agrees, f"{self.unknown_bytes() - Device.foreign} bytes of the device are in use by no region"

    def agrees(self) -> bool:
        """Whether all memory in use is a region's or of this test, but for chunks whose release failed."""
        lost = _core.unreleased_bytes() - self.ledger.unreleased
        return 0 <= self.unknown_bytes() - Device.foreign <= lost

    def is_quiet(self) -> bool:
        """Whether the thread that frees resting memory has nothing more to do."""
        return memsaver.region("flush", device="cpu").mapped_bytes == 0 and self.agrees()

    def unknown_bytes(self) -> int:
        """Memory of the device that is in use, and neither a region's nor taken by this test."""
        free, total = _core.open_driver("cpu").memory()
        mapped = sum(region.mapped_bytes + region.offered_bytes for region in memsaver.regions.all_regions())
        taken = sum(each.nbytes for each in self.others)
        retained = int(_core.device_stats("cpu")["retained_bytes"])
        return int(total - free - mapped - taken - retained)

    def teardown(self) -> None:
        failed = sys.exc_info()[1] is not None
        traceback.clear_frames(sys.exc_info()[2])  # they may hold tensors
        try:
            self.end_all()
            if self.models and not failed:
                self.move([], self.models, None, True, None, 0.0)
                self.check()
        finally:
            self.give_everything_back()
        if not failed:
            use_device()
            memsaver.release_host_memory()
            assert wait_for(lambda: self.is_quiet() and self.ledger.equals(Ledger())), f"{Ledger()}, not {self.ledger}"

    def end_all(self) -> None:
        """Only mapped and paused memory stays."""
        controls.disarm()
        while self.captures:
            self.end_capture(1)
        while self.launched:
            self.finish_launch()
        for stream in range(STREAMS):
            self.release(stream)
        self.slow_down(0.0, 0.0)
        while len(self.others) > 1:
            self.another_gives_memory_back()
        memsaver.configure(retain=0, host_limit=None)
        self.views.clear()

    def give_everything_back(self) -> None:
        """Also after a failure: shorter sequences follow in this process."""
        controls.reset()  # a context that lives
        for model in self.models:
            while model.segments:
                del model.segments.pop().tensor
            with suppress(memsaver.Error):  # the figures at the end tell
                model.region.resume()
                model.region.thaw()
                if self.ever_hit:
                    memsaver.trim(model.region.tag)  # also chunks that a refused unmap left
                model.region.close()
        self.others.pop().close()
        controls.virtual_clock(False)
        controls.reset()  # marks of the virtual clock lie in the future


def test_a_random_sequence_on_a_device_under_work_is_as_the_model_says(tmp_path: Path) -> None:
    with fast_directory(tmp_path) as directory:
        memsaver.configure(disk_dir=directory)
        run_state_machine_as_test(Device, settings=exploration(60, 40))
        assert unnamed_files(directory) == []
        memsaver.configure(disk_dir=tmp_path)


def test_a_resume_succeeds_if_its_exact_layout_fits() -> None:
    """Found by the machine: with slack, the layout of two regions took more than the pages that they need."""
    models = [Device.make({"backup": "host"}) for _ in range(2)]
    sizes = [[36 * MIB, 36 * MIB], [36 * MIB, 20 * MIB, 100]]
    tensors = [model.region.empty(nbytes, torch.uint8) for model, some in zip(models, sizes) for nbytes in some]
    tags = [model.region.tag for model in models]
    memsaver.pause(tags)
    with Fill(leave=130 * MIB):
        memsaver.resume(tags)
        assert sum(model.region.mapped_bytes for model in models) == 130 * MIB
    tensors.clear()
    for model in models:
        model.region.close()
