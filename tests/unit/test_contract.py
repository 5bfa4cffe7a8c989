"""The public contract: names, conventions of calls, arguments, errors, figures, phases, forks."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import memsaver
from memsaver import _core, errors
from memsaver.transitions import prepare_pause
from tests import controls
from tests.public_api import signature
from tests.support import MIB, PAGE, Make, blocks, free_bytes, run_clean

HAS_RAY = find_spec("ray") is not None
if HAS_RAY:
    from memsaver.ray import AsyncColocated, Colocated, Group

Call = Callable[..., Any]


# Conventions

READERS = ["timeout", "reader_timeout"]
MEMORY = ["timeout", "memory_timeout"]
ALL = ["timeout", "memory_timeout", "reader_timeout"]
# The calls that move regions, with their bounds.
VERBS: dict[Call, list[str]] = {
    memsaver.pause: READERS, prepare_pause: READERS, memsaver.Region.pause: READERS,
    memsaver.resume: MEMORY, memsaver.Region.resume: MEMORY, memsaver.switch: ALL, memsaver.start: ALL,
    memsaver.phase: ALL, memsaver.define_phase: [], memsaver.trim: ["timeout"],
}  # fmt: skip
for actors in (Colocated, AsyncColocated) if HAS_RAY else ():
    VERBS |= {actors.pause: READERS, actors.colocated_prepare: READERS, actors.resume: MEMORY}
BY_POSITION = {"self", "tags", "coming", "name", "resident"}
ORDER = ["backup", "lazy", "restore", *ALL]


def options(verb: Call) -> list[str]:
    return [each.name for each in signature(verb).parameters.values() if each.kind is each.KEYWORD_ONLY]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__qualname__)
def test_bounds_have_the_same_names_order_and_defaults_everywhere(verb: Call) -> None:
    parameters = signature(verb).parameters
    found = {name: each for name, each in parameters.items() if "timeout" in name}
    assert list(found) == VERBS[verb]
    defaults = {"timeout": None, "memory_timeout": None, "reader_timeout": 60.0}
    for name, parameter in found.items():
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, defaults[name])
    ordered = [name for name in options(verb) if name in ORDER]
    assert ordered == sorted(ordered, key=ORDER.index)
    assert {name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD} <= BY_POSITION


def test_calls_for_the_same_have_the_same_options() -> None:
    assert options(memsaver.graph) == ["needs", "stream", "capture_error_mode"]
    assert options(memsaver.switch) == options(memsaver.start)
    for verb in ("pause", "resume"):
        expected = options(getattr(memsaver, verb))
        assert options(getattr(memsaver.Region, verb)) == expected
        for base in (Colocated, AsyncColocated) if HAS_RAY else ():
            assert options(getattr(base, verb)) == expected
    if HAS_RAY:
        assert {each for each in ORDER if each in options(Group.enter)} == {*ORDER}


def test_the_process_never_prints(capfd: pytest.CaptureFixture[str], make: Make) -> None:
    region = make("host")
    held = blocks(region, [MIB])
    region.pause()
    region.pause()
    with pytest.raises(memsaver.RegionPausedError):
        region.empty(1)
    region.resume()
    controls.arm(1)
    with pytest.raises(memsaver.DriverError):
        region.pause()
    memsaver.stats()
    assert capfd.readouterr() == ("", "")
    held[0].check()


def test_a_program_without_handlers_of_logging_prints_no_warnings() -> None:
    """Also where it imports memsaver at its exit."""
    said = run_clean("""
        import atexit, logging, threading
        atexit.register(lambda: print(__import__("memsaver").__name__))
        atexit.register(lambda: logging.getLogger("memsaver").warning("a text"))
        atexit.register(lambda: __import__("memsaver"))
    """)
    assert said == "memsaver\n"


# Regions


def test_a_region_is_got_or_made_by_tag_and_device(tag: str) -> None:
    made = memsaver.region(tag, device=torch.device("cpu"), backup="host")
    assert memsaver.region(tag, device="cpu") is memsaver.region(tag, device="cpu", backup="host") is made
    assert (made.tag, made.device, made.backup) == (tag, "cpu", "host")
    assert repr(made) == f"<memsaver.Region {tag!r} on cpu, backup='host', active>"
    assert memsaver.region(f"{tag} default").device == ("cuda:0" if _core.cuda_device_count() else "cpu")
    with pytest.raises(memsaver.Error, match="host"):
        _ = made.pool
    for device in (f"cuda:{_core.cuda_device_count()}", "cuda:99999999999999999999"):
        with pytest.raises((ValueError, memsaver.DriverError)):
            memsaver.region(f"{tag} nowhere", device=device)
    if not _core.cuda_device_count():
        with pytest.raises(memsaver.DriverError, match="use device='cpu', the host driver, or install NVIDIA's driver"):
            memsaver.region(f"{tag} nowhere", device="cuda")
    assert f"{tag} nowhere" not in {region.tag for region in memsaver.regions.all_regions()}


@pytest.mark.parametrize(
    ("made", "option", "given"),
    [
        ({"backup": "host"}, "backup", "none"), ({}, "backup", "host"), ({"backup": "host"}, "frozen", True),
        ({"backup": "host", "frozen": True}, "frozen", False), ({"fill": "zero"}, "fill", "keep"),
        ({}, "one_handle", True),
    ],
)  # fmt: skip
def test_another_policy_for_a_tag_is_refused_and_makes_no_region(
    tag: str, made: dict[str, Any], option: str, given: Any
) -> None:
    """A second region would take the tensors of calls that name the tag alone, and could discard them."""
    first = memsaver.region(tag, device="cpu", **made)
    count, has = len(memsaver.regions.all_regions()), getattr(first, option)
    with pytest.raises(ValueError, match=f"^{option} is {given!r}, but region '{tag}' was made with {has!r}$"):
        memsaver.region(tag, device="cpu", **{option: given})
    assert memsaver.region(tag, device="cpu", **made) is memsaver.region(tag, device="cpu") is first
    assert len(memsaver.regions.all_regions()) == count
    first.close()
    assert memsaver.region(tag, device="cpu").backup == "none"


# Arguments

WRONG: list[tuple[type[Exception], str, Call]] = [
    (TypeError, "tag is None", lambda region: memsaver.region(None)),  # type: ignore[arg-type]
    (ValueError, "tag is ''", lambda region: memsaver.region("")),
    (ValueError, "device is 'tpu'", lambda region: memsaver.region("x", device="tpu")),
    (ValueError, "device is 'cuda:one'", lambda region: memsaver.region("x", device="cuda:one")),
    (ValueError, "device is 'cpu:0'", lambda region: memsaver.region("x", device="cpu:0")),
    (ValueError, "did you mean backup='host'", lambda region: memsaver.region("x", device="host")),
    (ValueError, "backup is 'floppy'", lambda region: memsaver.region("x", device="cpu", backup="floppy")),
    (ValueError, "frozen is True and backup is 'none'", lambda region: memsaver.region("x", device="cpu", frozen=True)),
    (TypeError, "frozen is 1", lambda region: memsaver.region("x", frozen=1)),  # type: ignore[arg-type]
    (TypeError, "one_handle is 1", lambda region: memsaver.region("x", one_handle=1)),  # type: ignore[arg-type]
    (ValueError, "fill is 'old'", lambda region: memsaver.region("x", fill="old")),
    (ValueError, "fill is 0", lambda region: memsaver.region("x", fill=0)),  # type: ignore[arg-type]
    (ValueError, "there is no region 'x'; there are .*'tag", lambda region: memsaver.pause("x")),
    (ValueError, "there is no region 'x'", lambda region: memsaver.resume([region.tag, "x"])),
    (ValueError, "there is no region 'x'", lambda region: memsaver.trim("x")),
    (ValueError, "there is no region 'x'", lambda region: memsaver.switch(pause=region, resume="x")),
    (ValueError, "backup is 'floppy'", lambda region: memsaver.pause(region, backup="floppy")),
    (ValueError, "to be paused and resumed at once", lambda region: memsaver.switch(pause=region.tag, resume=region)),
    (ValueError, "to be paused and resumed at once", lambda region: memsaver.switch(pause=None, resume=region)),
    (ValueError, "shape is", lambda region: region.empty((2, -1))),
    (TypeError, "shape is", lambda region: region.empty((2.0,))),
    (TypeError, "shape is", lambda region: region.empty((True,))),
    (TypeError, "shape is", lambda region: region.empty("ab")),
    (TypeError, "dtype is", lambda region: region.empty(3, "float32")),
    (TypeError, "name is 1", lambda region: memsaver.define_phase(1, [])),  # type: ignore[arg-type]
    (TypeError, "expected something to call", lambda region: memsaver.define_phase("a", [], on_enter=3)),  # type: ignore[arg-type]
    (TypeError, "expected something to call", lambda region: memsaver.define_phase("a", [], on_exit=3)),  # type: ignore[arg-type]
    (ValueError, "to be paused and resumed at once", lambda region: memsaver.start(pause=region, resume=region)),
    # At the call, before a with statement enters it.
    (ValueError, "there is no phase 'a'; there are 'b'", lambda region: memsaver.phase("a")),
    (ValueError, r"there is no phase \['a'\]; there are", lambda region: memsaver.phase(["a"])),  # type: ignore[arg-type]
    (ValueError, "backup is 'floppy', expected one of", lambda region: memsaver.phase("b", backup="floppy")),
]


def test_wrong_arguments_are_refused_before_anything_changes(make: Make) -> None:
    region = make("host")
    held = blocks(region, [MIB])
    memsaver.define_phase("b", [])
    controls.disarm()
    for kind, text, call in WRONG:
        with pytest.raises(kind, match=text):
            call(region)
    selections: list[tuple[str, Call]] = [
        ("tags", memsaver.pause), ("tags", memsaver.resume), ("tags", memsaver.trim),
        ("pause", lambda wrong: memsaver.switch(pause=wrong)), ("resume", lambda wrong: memsaver.start(resume=wrong)),
        ("resident", lambda wrong: memsaver.define_phase("wrong", wrong)),
    ]  # fmt: skip
    for name, call in selections:
        for wrong in (3, {region.tag: 1}):
            text = f"{name} is {wrong!r}, expected a tag, a Region, or several of either"
            with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
                call(wrong)
        with pytest.raises(TypeError, match=f"{name} has 3, expected a tag or a Region"):
            call([region.tag, 3])
    assert controls.calls() == 0
    assert region.state == "active"
    held[0].check()


@pytest.mark.parametrize(
    ("kind", "value"),
    [(ValueError, -1), (ValueError, math.nan), (TypeError, "soon"), (TypeError, True), (TypeError, [1])],
)
def test_wrong_bounds_are_refused_by_name_before_anything_changes(
    make: Make, kind: type[Exception], value: object
) -> None:
    region, other = make("host"), make("host")
    held = blocks(region, [MIB])
    other.pause()
    memsaver.define_phase("on", resident=[other.tag])
    both = {"pause": region, "resume": other}
    arguments: dict[Call, tuple[tuple[Any, ...], dict[str, Any]]] = {
        memsaver.pause: ((region,), {}), prepare_pause: ((region,), {}), memsaver.Region.pause: ((region,), {}),
        memsaver.resume: ((other,), {}), memsaver.Region.resume: ((other,), {}), memsaver.switch: ((), both),
        memsaver.start: ((), both), memsaver.phase: (("on",), {}), memsaver.trim: ((), {}),
    }  # fmt: skip
    if HAS_RAY:
        actor = Colocated()
        arguments |= {
            Colocated.pause: ((actor, region.tag), {}), Colocated.resume: ((actor, other.tag), {}),
            Colocated.colocated_prepare: ((actor, [region.tag]), {}),
        }  # fmt: skip
    calls = [(partial(verb, *given, **named), VERBS[verb]) for verb, (given, named) in arguments.items()]
    controls.disarm()
    for call, names in [*calls, (partial(memsaver.Region.close, region), ["timeout"])]:
        for name in names:
            with pytest.raises(kind, match=f"^{name} is {re.escape(repr(value))}, expected seconds"):
                call(**{name: value})
            if name == "reader_timeout":
                with pytest.raises(TypeError, match=f"^{name} is None, expected seconds"):
                    call(**{name: None})
    assert controls.calls() == 0
    assert (region.state, other.state) == ("active", "paused")
    held[0].check()


# Errors


def test_errors_of_the_core_pickle_whole(make: Make) -> None:
    region = make("host")
    raised: list[memsaver.Error] = []

    def note(call: Callable[[], object]) -> None:
        with pytest.raises(memsaver.Error) as caught:
            call()
        raised.append(caught.value)

    note(lambda: region._core.allocate_array(free_bytes() + PAGE))
    controls.arm(1)
    note(lambda: region._core.allocate_array(1))
    region.pause()
    note(lambda: region._core.allocate_array(1))
    region.resume()
    _core.capture_begins()
    note(region.pause)
    assert [type(error).__name__ for error in raised] == [
        "OutOfMemoryError", "DriverError", "RegionPausedError", "Error",
    ]  # fmt: skip
    for error in raised:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert set(vars(error)) == set(vars(type(error)).get("__annotations__", ())) - set(vars(memsaver.Error))


def test_errors_at_a_bound_name_the_stage_and_that_nothing_has_changed() -> None:
    late = errors.make("WaitTimeoutError", "region 'a' is in use", {"stage": "launches", "waited_s": 0.5})
    assert isinstance(late, memsaver.WaitTimeoutError) and isinstance(late, TimeoutError)
    assert str(late) == "region 'a' is in use (stage 'launches', after 0.50 s); nothing has changed"
    assert (late.stage, late.waited_s) == ("launches", 0.5)
    read = errors.make("AttachedError", "region 'a' cannot be paused", {"tag": "a", "holders": [os.getpid()]})
    assert isinstance(read, memsaver.AttachedError)
    ((pid, name),) = read.holders
    assert (pid, read.stage) == (os.getpid(), "readers")
    assert str(read) == f"region 'a' cannot be paused: {name} (pid {pid}) (stage 'readers'); nothing has changed"


# Figures


def test_stats_are_ready_for_json_and_a_table_for_readers(make: Make) -> None:
    region = make("host")
    held = blocks(region, [3 * MIB])
    region.pause()
    found = memsaver.stats().asdict()
    assert json.loads(json.dumps(found)) == found
    device = found["devices"]["cpu"]
    assert device["uuid"] == _core.open_driver("cpu").uuid()
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert device["host_used_bytes"] >= 3 * MIB
    assert found["unreleased_bytes"] == _core.unreleased_bytes()  # which other files left
    row = next(row for row in device["regions"] if row["tag"] == region.tag)
    assert row == {
        "tag": region.tag, "backup": "host", "state": "paused", "frozen": False, "allocated_bytes": 3 * MIB,
        "mapped_bytes": 0, "offered_bytes": 0, "backup_bytes": 3 * MIB, "paused_s": row["paused_s"],
    }  # fmt: skip
    assert row["paused_s"] > 0
    rows = [line.split() for line in str(memsaver.stats()).splitlines()]
    assert [region.tag, "paused", "host", "3.0", "MiB", "0.0", "MiB", "0.0", "MiB", "3.0", "MiB"] in rows
    region.resume()
    assert next(each for each in memsaver.stats().devices["cpu"].regions if each.tag == region.tag).paused_s == 0
    held[0].check()


# Phases


def test_a_phase_makes_exactly_its_regions_resident(make: Make) -> None:
    weights, cache, params, free = make("host"), make(), make("host"), make()
    seen: list[Any] = []

    def look() -> None:
        seen.append([each.state for each in (weights, cache, params)])

    memsaver.define_phase("rollout", [weights.tag, cache], on_enter=look, on_exit=look)
    memsaver.define_phase("train", params)
    with pytest.raises(KeyError), memsaver.phase("rollout") as moved:
        assert moved.paused == (params.tag,) and len(seen) == 1
        raise KeyError
    look()
    assert seen == [["active", "active", "paused"]] * 3  # the end moves nothing
    with memsaver.phase("train") as moved:
        assert [each.state for each in (weights, cache, params)] == ["paused", "paused", "active"]
        assert set(moved.paused) == {weights.tag, cache.tag} and moved.resumed == (params.tag,)
    assert free.state == "active"  # no phase names it


def test_a_phase_can_be_defined_before_its_regions_and_again(fresh_tag: Callable[[], str], make: Make) -> None:
    """Also the selection by tags, and bounds without an end."""
    early, late = fresh_tag(), fresh_tag()
    memsaver.define_phase("a", resident=[early])
    with pytest.raises(ValueError, match="there is no region"), memsaver.phase("a"):
        pass
    region = make(tag=early)
    memsaver.define_phase("b", resident=late)
    with memsaver.phase("a"):  # the tag of the other phase has no region
        assert region.state == "active"
    other = make(tag=late)
    memsaver.define_phase("a", resident=[late, region])
    with memsaver.phase("a"):
        assert (region.state, other.state) == ("active", "active")
    region.close()
    for _ in range(2):  # without the region that was closed; then no phase names the other one any more
        with memsaver.phase("a"):
            assert other.state == "active"
        memsaver.define_phase("a", [])
        memsaver.define_phase("b", [])
    # Tags and regions select regions.
    first, second = make("host"), make()
    assert memsaver.pause([]) == memsaver.resume([]) == memsaver.switch(pause=[], resume=()) == memsaver.Transition()
    for act, states in (
        (partial(memsaver.pause, first, timeout=math.inf, reader_timeout=10**400), ("paused", "active")),
        (partial(memsaver.pause, [first.tag, second.tag]), ("paused", "paused")),
        (partial(memsaver.resume, [second], timeout=10**400, memory_timeout=math.inf), ("paused", "active")),
        (partial(memsaver.switch, pause=second, resume=first), ("active", "paused")),
        (partial(memsaver.resume, [first.tag, second, second, second.tag]), ("active", "active")),
    ):
        act()
        assert (first.state, second.state) == states
    for all_of in (memsaver.pause, memsaver.resume):
        done = all_of()
        assert {first.tag, second.tag} <= {*done.paused, *done.resumed}


# Fork and exit


def test_a_forked_child_gets_a_clear_error_and_exits_normally() -> None:
    """A child that was forked before the first use has the library to itself."""
    out = run_clean("""
        import gc, os, signal, threading, memsaver
        from importlib._bootstrap import _ModuleLockManager
        early = os.fork()
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(5 << 20)
        if not early:
            region.pause()
            region.resume()
            raise SystemExit
        assert os.waitpid(early, 0)[1] == 0
        paused = memsaver.region("b", device="cpu")
        paused.pause()
        before = memsaver.stats().devices["cpu"].free_bytes
        begun = memsaver._core.Transition([region._core], [], None, 0.0, 0.0)
        begun.begin()
        held_here, let_go = threading.Event(), threading.Event()

        def hold():  # as a thread that makes or closes a region, and as one that loads torch
            with memsaver.regions._registry, _ModuleLockManager("memsaver._torch.routing"):
                held_here.set()
                let_go.wait()

        threading.Thread(target=hold).start()
        held_here.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            calls = [
                lambda: memsaver.region("a", device="cpu"), lambda: memsaver.region("c", device="cpu"), region.close,
                lambda: memsaver.pause("a"), lambda: memsaver.switch(pause="a"), region.pause, region.__enter__,
                lambda: memsaver.start(pause="a"), memsaver.outside, memsaver.pause, memsaver.resume, memsaver.stats,
                lambda: memsaver.configure(retain=1), lambda: region._core.allocate_array(1),
                lambda: memsaver._core.open_driver("cpu"), lambda: region.state, memsaver.trim,
                lambda: memsaver._core.capture_begins(), lambda: memsaver._core.acquire([region._core]),
            ]
            told = 0
            for call in calls:
                try:
                    call()
                except memsaver.Error as error:
                    told += "forked" in str(error)
            del held, begun
            gc.collect()
            os._exit(0 if told == len(calls) else 100 + told)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        let_go.set()
        begun.abort()
        print(memsaver.stats().devices["cpu"].free_bytes == before)
        region.pause()
        region.resume()
    """)
    assert out == "0\nTrue\n"
