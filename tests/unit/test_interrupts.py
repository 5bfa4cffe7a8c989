"""An interrupt at each place where Python looks at signals leaves no call blocked, and loses no contents.

CPython looks at signals at the entry of a function, at jumps backward, and after calls of functions in C. A trace
function raises KeyboardInterrupt at the n-th such place in memsaver's code, for each n. A line that runs often counts
twice.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import memsaver
from memsaver import _core, _guests, _moves, _results
from memsaver._adapter import adapter
from memsaver._torch import graphs
from memsaver.turns.group import BaseGroup
from memsaver.turns.members import Colocated
from memsaver.turns.plan import Plan
from tests.support import KIB, Block, Visitor, check, until

FOLDER = os.path.dirname(memsaver.__file__)
CALLS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") if name in dis.opmap}
PLACES = CALLS | {dis.opmap[name] for name in ("RESUME", "JUMP_BACKWARD")}
BOUND_S = 20.0  # of a repeated call, which would wait for ever


class Interrupts:
    """Raises KeyboardInterrupt at the n-th place of a call. ``at``: the place, once it has come so far."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._visits: Counter[tuple[Any, int]] = Counter()
        self._came_from_python = False
        self.at: str | None = None

    def during(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, argument: object) -> Any:
        self._came_from_python = True
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, last = frame.f_code.co_code, 0

        def local(frame: Any, event: str, argument: object) -> Any:
            nonlocal last
            if event == "return":
                self._came_from_python = True
            elif event == "opcode":
                before, last = last, code[frame.f_lasti]
                was_python, self._came_from_python = self._came_from_python, False
                if before in PLACES and not (was_python and before in CALLS):
                    self._visits[frame.f_code, frame.f_lasti] += 1
                    self._left -= self._visits[frame.f_code, frame.f_lasti] <= 2
                    if self._left == 0 and self.at is None:
                        sys.settrace(None)
                        self.at = f"{os.path.relpath(frame.f_code.co_filename, FOLDER)}:{frame.f_lineno}"
                        raise KeyboardInterrupt
            return local

        return local


def interrupted(call: Callable[[], object], kept: list[KeyboardInterrupt]) -> Iterator[str]:
    """Interrupts a call at its first place, then at its second, and so on to the last. Yields each place.

    ``kept``: the errors, as a debugger keeps them: their tracebacks have the objects of the call.
    """
    for n in itertools.count(1):
        interrupts = Interrupts(n)
        try:
            interrupts.during(call)
        except KeyboardInterrupt as error:
            kept.append(error)
        if interrupts.at is None:
            return
        yield f"interrupted at place {n}, {interrupts.at}"


@pytest.fixture
def regions(fresh_tag: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> list[memsaver.Region]:
    """Two regions of which one has a backup, with guests and phases."""
    adapter()  # a module that is imported later would keep the function that is patched here
    monkeypatch.setattr(_results, "_LOG_S", 0.01)
    found = [memsaver.region(fresh_tag(), device="cpu", backup=backup) for backup in ("host", "none")]
    memsaver.register(Visitor("first", found[0].tag))
    memsaver.register(Visitor("both", [each.tag for each in found]))
    memsaver.define_phase("first", found[0])
    memsaver.define_phase("second", found[1])
    for module in (memsaver.regions, _moves):  # those of other files would be looked at thousands of times
        monkeypatch.setattr(module, "all_regions", lambda: list(found))
    return found


def phase(first: memsaver.Region, second: memsaver.Region) -> None:
    with memsaver.phase("first"):
        pass
    with memsaver.phase("second"):
        pass


def switch(first: memsaver.Region, second: memsaver.Region) -> None:
    first.pause()
    memsaver.switch(pause=second, resume=first)


def background(first: memsaver.Region, second: memsaver.Region) -> None:
    moving = memsaver.start(pause=[first, second])
    moving.result(BOUND_S)


def shown(first: memsaver.Region, second: memsaver.Region) -> None:
    first.pause(progress=True)
    first.resume(progress=True)


def close(first: memsaver.Region, second: memsaver.Region) -> None:
    memsaver.region(f"{first.tag} closed", device="cpu").close()


@pytest.mark.parametrize("call", [phase, switch, background, shown, close], ids=lambda call: call.__name__)
def test_an_interrupt_at_any_place_blocks_no_later_call(
    regions: list[memsaver.Region], call: Callable[[memsaver.Region, memsaver.Region], None]
) -> None:
    first, second = regions
    held = Block(first, KIB)
    call(first, second)  # imports and caches
    kept: list[KeyboardInterrupt] = []
    for n, where in enumerate(interrupted(lambda: call(first, second), kept), 1):
        del kept[:-1]
        try:
            memsaver.pause([first, second], timeout=BOUND_S)
            memsaver.resume([first, second], timeout=BOUND_S)
            if call is close:
                memsaver.region(f"{first.tag} closed", device="cpu").close(timeout=BOUND_S)
        except memsaver.Error as error:
            pytest.fail(f"{where}: {error}")
        assert [each["state"] for each in _guests.rows()] == ["here", "here"], where
        assert not _guests._movers, where
        until(lambda: not [each for each in threading.enumerate() if each.name == "memsaver progress"])
        if n % 50 == 0:
            assert [each for each in memsaver.history() if each.outcome == "running"] == [], where
        held.check()
    assert n > 10  # places


def test_an_interrupt_at_any_place_of_a_turn_leaves_no_unwritten_contents_in_use(make: Callable[..., Any]) -> None:
    weights, params = make("host"), make("host")
    held = [Block(weights, KIB), Block(params, KIB)]
    plan = Plan(
        {
            "rollout": {"engine": [weights.tag]},
            "train": {"trainer": [params.tag]},
            "sync": {"engine": [weights.tag], "trainer": [params.tag]},
        },
        ["engine", "trainer"],
        backup={"train": {"engine": "none"}},
        restore={"sync": {"engine": False}},
    )
    ranks = pytest.importorskip("memsaver.ray.ranks", reason="needs ray", exc_type=ModuleNotFoundError)
    caller = ranks.Caller([ranks.MemberRank(role, 0, Colocated()) for role in ("engine", "trainer")])
    group = BaseGroup(plan, caller)

    def enter(name: str) -> None:
        until(lambda: all(call.done() for call in caller.late))
        group.enter(name, timeout=BOUND_S)

    kept: list[KeyboardInterrupt] = []
    enter("train")  # discards the weights, which "sync" is to write
    for n, where in enumerate(interrupted(lambda: group.enter("sync", timeout=BOUND_S), kept), 1):
        assert len(kept) == n, where
        with pytest.raises(memsaver.Error, match=f"the contents of {weights.tag!r} are not there"):
            enter("rollout")
        enter("sync")
        held[0].fill(n)
        enter("rollout")
        check(held[: 1 + (params.state == "active")])
        enter("train")
    assert n > 100  # places


@pytest.mark.parametrize("kind", ["ray", "distributed"])
def test_an_interrupt_at_any_place_of_a_turn_leaves_no_member_prepared(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first, second = make("host"), make("host")
    phases = {"on": {"one": [first.tag], "other": [second.tag]}, "off": {"one": [], "other": []}}
    members, late = {"one": Colocated(), "other": Colocated()}, {}
    group: Any
    if kind == "ray":
        ranks = pytest.importorskip("memsaver.ray.ranks", reason="needs ray", exc_type=ModuleNotFoundError)
        caller = ranks.Caller([ranks.MemberRank(role, 0, member) for role, member in members.items()])
        group, late = BaseGroup(Plan(phases, members), caller), caller.late
    else:
        distributed = pytest.importorskip("memsaver.distributed", exc_type=ModuleNotFoundError)
        store = distributed.group.distributed.HashStore()
        group = distributed.Group(phases=phases, store=store, rank=0, world_size=1, **members)
        monkeypatch.setattr(sys.modules[__name__], "FOLDER", os.path.join(FOLDER, "turns"))
    kept: list[KeyboardInterrupt] = []
    for where in interrupted(lambda: group.enter("off", timeout=BOUND_S), kept):
        until(lambda: all(call.done() for call in late))
        assert "pausing" not in (first.state, second.state), where
        group.enter("on", timeout=BOUND_S)
    assert len(kept) > 10
    if kind == "distributed":
        group.close()


class Capture:
    """A capture by torch."""

    def __enter__(self) -> None:
        graphs._begin_capture(cast(Any, self), None, lambda: None)

    def __exit__(self, *_: object) -> None:
        graphs._end_capture(cast(Any, self), lambda: None, lambda graph, pool: None)


@pytest.mark.parametrize("enter", ["region", "outside", "capturing", "capture"])
def test_an_interrupt_at_the_begin_of_a_with_statement_leaves_nothing_entered(
    make: Callable[..., Any], enter: str
) -> None:
    region, router = make(), adapter()
    makers: dict[str, Callable[[], Any]] = {
        "region": lambda: region, "outside": memsaver.outside, "capturing": memsaver.capturing,
        "capture": Capture,
    }  # fmt: skip
    kept: list[KeyboardInterrupt] = []
    entered: list[Any] = []

    def begin() -> None:
        entered[:] = [makers[enter]()]
        entered[0].__enter__()

    for where in interrupted(begin, kept):
        assert not router.thread.entered and not router.thread.modes, where
        assert not router._inside and not _core.capturing(), where
    assert kept
    entered[0].__exit__(None, None, None)  # the last one was not interrupted
    assert not router._inside and not _core.capturing()


def test_an_interrupt_while_a_region_is_left_leaves_it(make: Callable[..., Any]) -> None:
    region, router = make(), adapter()
    for n in itertools.count(1):
        interrupts = Interrupts(n)
        region.__enter__()
        with contextlib.suppress(KeyboardInterrupt):
            interrupts.during(lambda: router._leave(router.thread.entered[-1]))
        assert not router.thread.entered and not router.thread.modes and not router._inside, interrupts.at
        if interrupts.at is None:
            break
    assert n > 10  # places
