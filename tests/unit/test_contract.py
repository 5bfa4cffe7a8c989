"""The public contract: names, arguments, errors, options, figures and phases."""

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

import memsaver
from memsaver import _core, errors
from tests import controls
from tests.support import GIB, MIB, PAGE, Fill, blocks, run_clean

HAS_RAY = find_spec("ray") is not None
if HAS_RAY:
    from memsaver.ray import AsyncColocated, Colocated

Make = Callable[..., memsaver.Region]


def test_the_names_of_the_contract_are_there() -> None:
    for name in memsaver.__all__:
        if name not in ("CUDAGraph", "graph"):  # these load torch
            assert getattr(memsaver, name) is not None
    for kind in ("OutOfMemoryError", "RegionPausedError", "DriverError", "BackupError", "ConfigError"):
        assert issubclass(getattr(memsaver, kind), memsaver.Error)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memsaver.nothing  # noqa: B018


def test_importing_memsaver_ray_without_ray_names_the_extra() -> None:
    out = run_clean("""
        import sys
        sys.modules["ray"] = None
        try:
            import memsaver.ray
        except ModuleNotFoundError as error:
            print(error)
    """)
    assert "memsaver.ray needs Ray" in out and "pip install 'memsaver[ray]'" in out


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
    assert run_clean('import logging, memsaver; logging.getLogger("memsaver").warning("a text")') == ""


def test_an_import_in_the_exit_of_the_interpreter_is_quiet() -> None:
    assert (
        run_clean("import atexit, threading; atexit.register(lambda: print(__import__('memsaver').__name__))")
        == "memsaver\n"
    )


def test_transitions_are_logged(caplog: pytest.LogCaptureFixture, make: Make) -> None:
    region = make()
    with caplog.at_level("DEBUG", logger="memsaver"):
        region.pause()
    assert region.tag in caplog.text


# Regions


def test_a_region_is_got_or_made_by_tag_and_device(tag: str) -> None:
    made = memsaver.region(tag, device="cpu", backup="host")
    assert memsaver.region(tag, device="cpu") is memsaver.region(tag, device="cpu", backup="host") is made
    assert (made.tag, made.device, made.backup) == (tag, "cpu", "host")
    assert repr(made) == f"<memsaver.Region {tag!r} on cpu, backup='host', active>"


@pytest.mark.parametrize(("made", "asked"), [("host", "none"), ("none", "host"), ("host", "disk")])
def test_another_policy_for_a_tag_is_refused_and_makes_no_region(tag: str, made: str, asked: str) -> None:
    """A second region would take the tensors of calls that name the tag alone, and could discard them."""
    first = memsaver.region(tag, device="cpu", backup=made)
    count = len(memsaver.regions.all_regions())
    with pytest.raises(ValueError, match=f"^backup is '{asked}', but region '{tag}' was made with '{made}'$"):
        memsaver.region(tag, device="cpu", backup=asked)
    assert memsaver.region(tag, device="cpu") is first
    assert len(memsaver.regions.all_regions()) == count
    first.close()
    assert memsaver.region(tag, device="cpu", backup="none").backup == "none"


def test_the_default_device_is_cuda_if_there_is_one(tag: str) -> None:
    expected = "cuda:0" if _core.cuda_device_count() else "cpu"
    assert memsaver.region(tag).device == expected


def test_a_device_can_be_a_torch_device(tag: str) -> None:
    import torch

    assert memsaver.region(tag, device=torch.device("cpu")) is memsaver.region(tag, device="cpu")


def test_a_region_without_cuda_is_an_error_that_names_it(tag: str) -> None:
    count = _core.cuda_device_count()
    with pytest.raises((ValueError, memsaver.DriverError)):
        memsaver.region(tag, device=f"cuda:{count}")
    with pytest.raises((ValueError, memsaver.DriverError)):
        memsaver.region(tag, device="cuda:99999999999999999999")
    assert tag not in {region.tag for region in memsaver.regions.all_regions()}


def test_a_host_region_has_no_pool_for_graphs(make: Make) -> None:
    with pytest.raises(memsaver.Error, match="host"):
        _ = make().pool


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (TypeError, lambda tag: memsaver.region(None)),  # type: ignore[arg-type]
        (TypeError, lambda tag: memsaver.region(3)),  # type: ignore[arg-type]
        (ValueError, lambda tag: memsaver.region("")),
        (ValueError, lambda tag: memsaver.region("x", device="tpu")),
        (ValueError, lambda tag: memsaver.region("x", device="cuda:one")),
        (ValueError, lambda tag: memsaver.region("x", device="cpu:0")),
        (ValueError, lambda tag: memsaver.region("x", device="cpu", backup="floppy")),
        (ValueError, lambda tag: memsaver.pause("no such tag")),
        (ValueError, lambda tag: memsaver.resume([tag, "no such tag"])),
        (ValueError, lambda tag: memsaver.trim("no such tag")),
        (ValueError, lambda tag: memsaver.switch(pause=tag, resume="no such tag")),
        (TypeError, lambda tag: memsaver.pause([tag, 3])),  # type: ignore[list-item]
        (TypeError, lambda tag: memsaver.pause(3)),  # type: ignore[arg-type]
        (ValueError, lambda tag: memsaver.pause(tag, backup="floppy")),
        (ValueError, lambda tag: memsaver.switch(pause=tag, resume=tag)),
        (ValueError, lambda tag: memsaver.switch(pause=None, resume=tag)),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(
    make: Make, kind: type[Exception], call: Callable[[str], object]
) -> None:
    region = make("host")
    held = blocks(region, [MIB])
    controls.disarm()
    with pytest.raises(kind):
        call(region.tag)
    assert controls.calls() == 0
    assert region.state == "active"
    held[0].check()


READERS = ("timeout", "reader_timeout")
MEMORY = ("timeout", "memory_timeout")
ALL = ("timeout", "memory_timeout", "reader_timeout")
BOUNDED = {
    memsaver.pause: READERS, memsaver.transitions.prepare_pause: READERS, memsaver.Region.pause: READERS,
    memsaver.resume: MEMORY, memsaver.Region.resume: MEMORY, memsaver.switch: ALL, memsaver.phase: ALL,
}  # fmt: skip
for actors in (Colocated, AsyncColocated) if HAS_RAY else ():
    BOUNDED |= {actors.pause: READERS, actors.colocated_prepare: READERS, actors.resume: MEMORY}


@pytest.mark.parametrize("call", BOUNDED, ids=lambda call: call.__qualname__)
def test_bounds_have_the_same_names_order_and_defaults_everywhere(call: Callable[..., object]) -> None:
    found = {name: each for name, each in inspect.signature(call).parameters.items() if "timeout" in name}
    assert tuple(found) == BOUNDED[call]
    defaults = {"timeout": None, "memory_timeout": None, "reader_timeout": 60.0}
    for name, parameter in found.items():
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, defaults[name])


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
    memsaver.define_phase("off", resident=[region.tag])
    calls: list[tuple[Callable[..., object], tuple[str, ...]]] = [
        (partial(memsaver.pause, region.tag), READERS),
        (partial(memsaver.transitions.prepare_pause, region.tag), READERS),
        (region.pause, READERS),
        (partial(memsaver.resume, other.tag), MEMORY),
        (other.resume, MEMORY),
        (partial(memsaver.switch, pause=region.tag, resume=other.tag), ALL),
        (lambda **bounds: memsaver.phase("on", **bounds).__enter__(), ALL),
    ]
    if HAS_RAY:
        actor = Colocated()
        calls += [
            (partial(actor.pause, region.tag), READERS),
            (partial(actor.colocated_prepare, [region.tag]), READERS),
            (partial(actor.resume, other.tag), MEMORY),
        ]
    controls.disarm()
    for call, names in calls:
        for name in names:
            with pytest.raises(kind, match=f"^{name} is {re.escape(repr(value))}, expected seconds"):
                call(**{name: value})
            if name == "reader_timeout":
                with pytest.raises(TypeError, match=f"^{name} is None, expected seconds"):
                    call(**{name: None})
    assert controls.calls() == 0
    assert (region.state, other.state) == ("active", "paused")
    held[0].check()


def test_an_unknown_tag_names_the_known_ones(make: Make) -> None:
    tag = make().tag
    with pytest.raises(ValueError, match="there is no region 'nothing'") as caught:
        memsaver.pause("nothing")
    assert repr(tag) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape"), [(ValueError, (2, -1)), (TypeError, (2.0,)), (TypeError, (True,)), (TypeError, "ab")]
)
def test_invalid_shapes_raise(make: Make, kind: type[Exception], shape: Any) -> None:
    with pytest.raises(kind, match="shape is"):
        make().empty(shape)


def test_an_invalid_dtype_raises(make: Make) -> None:
    with pytest.raises(TypeError, match="dtype is"):
        make().empty(3, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("endless", [math.inf, 10**400])
def test_a_bound_can_be_endless(make: Make, endless: float) -> None:
    region = make()
    assert region.pause(timeout=endless, reader_timeout=endless).paused == (region.tag,)
    assert region.resume(timeout=endless, memory_timeout=endless).resumed == (region.tag,)
    assert region.pause(timeout=None).paused == (region.tag,)


# Errors


@pytest.mark.parametrize(
    "error",
    [
        memsaver.Error("plain"),
        memsaver.OutOfMemoryError(
            "full",
            device="cpu",
            needed_bytes=1,
            free_bytes=2,
            regions=[{"tag": "a"}],
            processes=[(1, "init", 3)],
            outside_bytes=4,
        ),
        memsaver.RegionPausedError("away", tag="a", state="paused"),
        memsaver.WaitTimeoutError("late", stage="queue", waited_s=1.5),
        memsaver.AttachedError("read", tag="a", holders=[(1, "init")]),
        memsaver.DriverError("refused", call="map", code=1, message="no"),
        memsaver.BackupError("short", needed_bytes=1, held_bytes=2),
        memsaver.ConfigError("wrong", option="retain", value=-1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle_whole(error: memsaver.Error) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is type(error)
        assert str(copy) == str(error) != ""
        assert vars(copy) == vars(error)
        assert getattr(copy, "stage", None) == getattr(error, "stage", None)


def test_errors_of_the_core_pickle_whole(make: Make) -> None:
    region = make("host")
    raised: list[memsaver.Error] = []

    def note(call: Callable[[], object]) -> None:
        with pytest.raises(memsaver.Error) as caught:
            call()
        raised.append(caught.value)

    note(lambda: region._core.allocate_array(4 * GIB))
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
    assert {"call", "code", "message"} <= set(vars(raised[1]))
    assert set(vars(raised[0])) == set(memsaver.OutOfMemoryError.__annotations__)


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


def test_out_of_memory_counts_bytes_of_this_process_outside_of_regions(make: Make) -> None:
    region, idle = make(), make()
    held = blocks(region, [40 * MIB]) + blocks(idle, [32 * MIB])
    memsaver.configure(retain="1GiB")
    idle.pause()  # its chunks are retained
    before = memsaver.stats().asdict()["devices"]["cpu"]
    lost = _core.unreleased_bytes()  # which other files left
    for leave in (before["free_bytes"], PAGE):
        taken = before["free_bytes"] - leave
        with Fill(leave=leave):
            assert memsaver.stats().devices["cpu"].own_bytes == before["own_bytes"] + taken
            with pytest.raises(memsaver.OutOfMemoryError) as caught:
                region.empty(8 * GIB)
        assert caught.value.outside_bytes == taken + lost
        said = errors.gib(taken + lost) if taken + lost else "nothing"
        assert f"{region.tag} (active) {errors.gib(region.mapped_bytes)}" in str(caught.value)
        assert f", outside of regions {said}; other processes on the device: " in str(caught.value)
    rows = [line.split() for line in str(memsaver.stats()).splitlines()]
    sizes = [part for nbytes in (region.allocated_bytes, region.mapped_bytes, 0) for part in errors.gib(nbytes).split()]
    assert [region.tag, "active", "none", *sizes] in rows
    mapped = sum(row["mapped_bytes"] for row in before["regions"])
    assert before["own_bytes"] == mapped + before["retained_bytes"] + lost
    assert before["retained_bytes"] > 0
    del held


def test_out_of_memory_reports_unknown_bytes_of_this_process() -> None:
    fields = {
        "device": "cuda:0", "needed_bytes": 2 * GIB, "free_bytes": MIB, "waited_s": 0.0, "regions": [],
        "processes": [], "unused": [], "own_bytes": None, "retained_bytes": 0,
    }  # fmt: skip
    error = errors.make("OutOfMemoryError", "", fields)
    assert isinstance(error, memsaver.OutOfMemoryError)
    assert error.outside_bytes is None
    assert set(vars(error)) == set(memsaver.OutOfMemoryError.__annotations__)
    assert str(error) == (
        f"out of memory on cuda:0 (stage 'memory'): 2.00 GiB ({2 * GIB} bytes) needed, 1.0 MiB ({MIB} bytes) free; "
        "this process: regions nothing, outside of regions an unknown amount (torch's default pool, contexts, NCCL); "
        "other processes on the device: none seen; nothing has changed"
    )


# Figures


def test_stats_are_ready_for_json(make: Make) -> None:
    region = make("host")
    held = blocks(region, [3 * MIB])
    region.pause()
    found = memsaver.stats().asdict()
    assert json.loads(json.dumps(found)) == found
    device = found["devices"]["cpu"]
    assert device["uuid"] == _core.open_driver("cpu").uuid()
    assert 0 < device["free_bytes"] <= device["total_bytes"]
    assert device["host_used_bytes"] >= 3 * MIB
    row = next(row for row in device["regions"] if row["tag"] == region.tag)
    assert row == {
        "tag": region.tag, "backup": "host", "state": "paused", "frozen": False, "allocated_bytes": 3 * MIB,
        "mapped_bytes": 0, "backup_bytes": 3 * MIB,
    }  # fmt: skip
    assert found["unreleased_bytes"] == _core.unreleased_bytes()  # which other files left
    region.resume()
    held[0].check()


def test_stats_show_only_devices_in_use() -> None:
    assert run_clean("import memsaver; print(memsaver.stats().asdict()['devices'])") == "{}\n"


# Phases


@pytest.fixture(autouse=True)
def no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memsaver.transitions, "_phases", {})


def test_a_phase_makes_exactly_its_regions_resident(make: Make) -> None:
    weights, cache, params, free = make("host"), make(), make("host"), make()
    memsaver.define_phase("rollout", resident=[weights.tag, cache.tag])
    memsaver.define_phase("train", resident=(params.tag,))
    with memsaver.phase("rollout") as moved:
        assert [each.state for each in (weights, cache, params)] == ["active", "active", "paused"]
        assert moved.paused == (params.tag,)
    assert params.state == "paused"  # leaving moves nothing
    with memsaver.phase("train") as moved:
        assert [each.state for each in (weights, cache, params)] == ["paused", "paused", "active"]
        assert set(moved.paused) == {weights.tag, cache.tag} and moved.resumed == (params.tag,)
    assert free.state == "active"  # no phase names it


def test_hooks_of_a_phase_run_inside_it(make: Make) -> None:
    one, two = make(), make()
    seen: list[Any] = []
    memsaver.define_phase(
        "one",
        resident=[one.tag],
        on_enter=lambda: seen.append(("enter", one.state, two.state)),
        on_exit=lambda: seen.append(("exit", one.state)),
    )
    memsaver.define_phase("two", resident=[two.tag])
    with memsaver.phase("one"):
        seen.append("inside")
    assert seen == [("enter", "active", "paused"), "inside", ("exit", "active")]
    with pytest.raises(KeyError), memsaver.phase("one"):
        raise KeyError
    assert seen[-1] == ("exit", "active")


def test_a_phase_can_be_defined_before_its_regions_and_again(fresh_tag: Callable[[], str], make: Make) -> None:
    early, late = fresh_tag(), fresh_tag()
    memsaver.define_phase("a", resident=[early])
    with pytest.raises(ValueError, match="there is no region"), memsaver.phase("a"):
        pass
    region, other = make(tag=early), make(tag=late)
    memsaver.define_phase("b", resident=[late])
    with memsaver.phase("a"):
        assert (region.state, other.state) == ("active", "paused")
    memsaver.define_phase("a", resident=[late, early])
    with memsaver.phase("a"):
        assert (region.state, other.state) == ("active", "active")


def test_entering_a_phase_ignores_tags_of_other_phases_without_regions(
    fresh_tag: Callable[[], str], make: Make
) -> None:
    region = make()
    memsaver.define_phase("a", resident=[region.tag])
    memsaver.define_phase("b", resident=[fresh_tag()])
    with memsaver.phase("a"):
        assert region.state == "active"


def test_wrong_phases_are_refused() -> None:
    # At the call, before a with statement enters it.
    with pytest.raises(ValueError, match="there is no phase 'a'; there are none"):
        memsaver.phase("a")
    memsaver.define_phase("b", [])
    with pytest.raises(ValueError, match="backup is 'floppy', expected one of"):
        memsaver.phase("b", backup="floppy")
    with pytest.raises(ValueError, match="timeout is -1"):
        memsaver.phase("b", timeout=-1)
    wrong: list[tuple[Any, ...]] = [(1, []), ("a", {"tag": 1}), ("a", [1]), ("a", None)]
    for arguments in wrong:
        with pytest.raises(TypeError):
            memsaver.define_phase(*arguments)
    for hook in ("on_enter", "on_exit"):
        with pytest.raises(TypeError, match="expected something to call"):
            memsaver.define_phase("a", [], **{hook: 3})  # type: ignore[arg-type]


# Fork and exit


def test_a_forked_child_gets_a_clear_error_and_exits_normally() -> None:
    out = run_clean("""
        import gc, os, signal, threading, memsaver
        from importlib._bootstrap import _ModuleLockManager
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(5 << 20)
        paused = memsaver.region("b", device="cpu")
        paused.pause()
        before = memsaver.stats().devices["cpu"].free_bytes
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
                memsaver.outside, memsaver.pause, memsaver.resume, memsaver.stats,
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
            del held
            gc.collect()
            os._exit(0 if told == len(calls) else 100 + told)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        let_go.set()
        print(memsaver.stats().devices["cpu"].free_bytes == before)
        region.pause()
        region.resume()
    """)
    assert out == "0\nTrue\n"


def test_a_child_forked_before_first_use_has_the_library_to_itself() -> None:
    run_clean("""
        import os, memsaver
        child = os.fork()
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(1)
        region.pause()
        region.resume()
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """)
