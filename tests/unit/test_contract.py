"""The public contract: names, arguments, errors, options, figures and phases."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import memsaver
from memsaver import _core
from memsaver.config import parse_size
from tests.support import GIB, MIB, PAGE, blocks, fresh_device, run_clean, run_python

Make = Callable[..., memsaver.Region]


def test_the_names_of_the_contract_are_there() -> None:
    for name in memsaver.__all__:
        if name not in ("CUDAGraph", "graph"):  # these load torch
            assert getattr(memsaver, name) is not None
    for kind in ("OutOfMemoryError", "RegionPausedError", "DriverError", "BackupError", "ConfigError"):
        assert issubclass(getattr(memsaver, kind), memsaver.Error)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memsaver.nothing  # noqa: B018


def test_dir_shows_the_names_of_the_contract() -> None:
    assert dir(memsaver) == sorted([*memsaver.__all__, "__version__"])


def test_importing_loads_neither_torch_nor_ray() -> None:
    out = run_clean("""
        import sys, memsaver
        region = memsaver.region("a", device="cpu")
        held = region._core.allocate_array(100)
        region.pause(); region.resume(); memsaver.stats(); memsaver.trim()
        memsaver.define_phase("p", resident=["a"])
        with memsaver.phase("p"): pass
        print(sorted({"torch", "ray", "numpy"} & set(sys.modules)))
    """)
    assert out == "[]\n"


def test_without_ray_its_part_says_how_to_get_it() -> None:
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
    _core.faults_arm(1)
    with pytest.raises(memsaver.DriverError):
        region.pause()
    memsaver.stats()
    assert capfd.readouterr() == ("", "")
    held[0].check()


def test_transitions_are_logged(caplog: pytest.LogCaptureFixture, make: Make) -> None:
    region = make()
    with caplog.at_level("DEBUG", logger="memsaver"):
        region.pause()
    assert region.tag in caplog.text


# Regions


def test_a_region_is_got_or_made_by_tag_device_and_policy(tag: str) -> None:
    made = memsaver.region(tag, device="cpu")
    assert memsaver.region(tag, device="cpu", backup="none") is made
    other = memsaver.region(tag, device="cpu", backup="host")
    assert other is not made
    assert (made.tag, made.device, made.backup, other.backup) == (tag, "cpu", "none", "host")
    assert repr(made) == f"<memsaver.Region {tag!r} on cpu, backup='none', active>"


def test_the_default_device_is_the_one_there_is(tag: str) -> None:
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
        (TypeError, lambda tag: memsaver.region(None)),
        (TypeError, lambda tag: memsaver.region(3)),
        (ValueError, lambda tag: memsaver.region("")),
        (ValueError, lambda tag: memsaver.region("x", device="tpu")),
        (ValueError, lambda tag: memsaver.region("x", device="cuda:one")),
        (ValueError, lambda tag: memsaver.region("x", device="cpu:0")),
        (ValueError, lambda tag: memsaver.region("x", device="cpu", backup="floppy")),
        (ValueError, lambda tag: memsaver.region("x", device="cpu", backup=None)),
        (ValueError, lambda tag: memsaver.pause("no such tag")),
        (ValueError, lambda tag: memsaver.resume([tag, "no such tag"])),
        (ValueError, lambda tag: memsaver.trim("no such tag")),
        (ValueError, lambda tag: memsaver.switch(pause=tag, resume="no such tag")),
        (TypeError, lambda tag: memsaver.pause([tag, 3])),
        (TypeError, lambda tag: memsaver.pause(3)),
        (ValueError, lambda tag: memsaver.pause(tag, backup="floppy")),
        (ValueError, lambda tag: memsaver.switch(pause=tag, resume=tag)),
        (ValueError, lambda tag: memsaver.switch(pause=None, resume=tag)),
        (ValueError, lambda tag: memsaver.resume(tag, timeout=-1)),
        (ValueError, lambda tag: memsaver.resume(tag, timeout=math.nan)),
        (TypeError, lambda tag: memsaver.resume(tag, timeout="soon")),
        (TypeError, lambda tag: memsaver.resume(tag, timeout=None)),
        (TypeError, lambda tag: memsaver.resume(tag, timeout=True)),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(
    make: Make, kind: type[Exception], call: Callable[[str], object]
) -> None:
    region = make("host")
    held = blocks(region, [MIB])
    _core.faults_disarm()
    with pytest.raises(kind):
        call(region.tag)
    assert _core.faults_calls() == 0
    assert region.state == "active"
    held[0].check()


@pytest.mark.parametrize("call", [memsaver.pause, memsaver.resume, memsaver.trim])
def test_what_is_no_tag_is_named(make: Make, call: Callable[[Any], object]) -> None:
    region = make("host")
    for wrong in (region, 3):
        with pytest.raises(TypeError, match="expected a tag, several, or None for all") as caught:
            call(wrong)
        assert str(caught.value).startswith(f"tags is {wrong!r}")
    with pytest.raises(TypeError, match="tags has <memsaver.Region .*, expected a string"):
        call([region])
    for both in ({"pause": region}, {"resume": region}):
        with pytest.raises(TypeError, match="tags is <memsaver.Region"):
            memsaver.switch(**both)
    for resident in (region, region.tag, None):
        with pytest.raises(TypeError, match="resident is .*, expected a list of tags"):
            memsaver.define_phase("wrong", resident=resident)
    assert region.state == "active"


def test_an_unknown_tag_names_the_known_ones(make: Make) -> None:
    tag = make().tag
    with pytest.raises(ValueError, match="there is no region 'nothing'") as caught:
        memsaver.pause("nothing")
    assert repr(tag) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape"), [(ValueError, (2, -1)), (TypeError, (2.0,)), (TypeError, (True,)), (TypeError, "ab")]
)
def test_shapes_that_are_none_are_refused(make: Make, kind: type[Exception], shape: Any) -> None:
    with pytest.raises(kind, match="shape is"):
        make().empty(shape)


def test_a_dtype_that_is_none_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match="dtype is"):
        make().empty(3, "float32")


def test_a_timeout_can_be_endless(make: Make) -> None:
    region = make()
    region.pause()
    assert region.resume(timeout=math.inf).resumed == (region.tag,)


def test_a_transition_compares_and_shows_its_figures(make: Make) -> None:
    done = make("host").pause()
    assert done.seconds > 0
    assert "released_bytes=0" in repr(done)
    with pytest.raises(AttributeError):
        done.seconds = 0.0


# Errors


@pytest.mark.parametrize(
    "error",
    [
        memsaver.Error("plain"),
        memsaver.OutOfMemoryError(
            "full", device="cpu", needed_bytes=1, free_bytes=2, regions=[{"tag": "a"}], processes=[(1, "init", 3)]
        ),
        memsaver.RegionPausedError("away", tag="a", state="paused"),
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


def test_errors_of_the_core_pickle_whole(make: Make) -> None:
    region = make("host")
    raised: list[memsaver.Error] = []

    def note(call: Callable[[], object]) -> None:
        with pytest.raises(memsaver.Error) as caught:
            call()
        raised.append(caught.value)

    note(lambda: region._core.allocate_array(4 * GIB))
    _core.faults_arm(1)
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
    assert {"device", "needed_bytes", "free_bytes", "regions", "processes"} <= set(vars(raised[0]))


def test_a_wrong_option_is_both_an_error_of_ours_and_a_value_error() -> None:
    assert issubclass(memsaver.ConfigError, ValueError)
    assert issubclass(memsaver.ConfigError, memsaver.Error)


# Options


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0), (4096, 4096), ("0", 0), ("4096", 4096), ("64GiB", 64 * GIB), ("64 GiB", 64 * GIB), (" 2gib ", 2 * GIB),
        ("1.5GiB", GIB + GIB // 2), ("512M", 512 * MIB), ("512 MB", 512 * 10**6), ("1KiB", 1024), ("1kb", 1000),
        ("7b", 7), ("2TiB", 2048 * GIB),
    ],
)  # fmt: skip
def test_sizes_are_integers_or_strings(text: int | str, nbytes: int) -> None:
    assert parse_size(text, "retain") == nbytes


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "", "-1", "many", "5 parsecs", "1..5GiB", 1 << 70, "9" * 400])
def test_sizes_that_are_none_are_refused(value: Any) -> None:
    before = memsaver.stats()["options"]
    with pytest.raises(memsaver.ConfigError, match="retain") as caught:
        memsaver.configure(retain=value)
    assert (caught.value.option, caught.value.value) == ("retain", value)
    assert memsaver.stats()["options"] == before


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(memsaver.ConfigError, match="no option 'colour'; there are host_device, pool_capacity, scrub"):
        memsaver.configure(colour=1)


def test_of_several_options_all_take_effect_or_none(make: Make) -> None:
    make()  # the host device is in use from here on
    memsaver.configure(retain=PAGE)
    for wrong in ({"colour": 1}, {"host_device": "3MiB"}, {"host_device": 1}):
        with pytest.raises(memsaver.ConfigError):
            memsaver.configure(retain=2 * PAGE, **wrong)
        assert memsaver.stats()["options"]["retain"] == PAGE


def test_the_host_device_has_the_size_that_was_set_before_its_first_use() -> None:
    out = run_clean("""
        import memsaver
        memsaver.configure(host_device="100MiB")
        memsaver.configure(host_device="150MiB")
        memsaver.region("a", device="cpu")
        memsaver.configure(host_device="150MiB")
        try:
            memsaver.configure(host_device="100MiB")
        except memsaver.ConfigError as error:
            print(error)
        print(memsaver.stats()["devices"]["cpu"]["total_bytes"])
    """)
    refusal, total = out.splitlines()
    assert "after the host device came into use" in refusal
    assert int(total) == 150 * MIB


def test_options_come_from_the_environment() -> None:
    size = fresh_device()
    source = """
        import memsaver
        memsaver.region("a", device="cpu")
        found = memsaver.stats()
        print(found["options"]["retain"], found["devices"]["cpu"]["total_bytes"])
    """
    assert run_clean(source, MEMSAVER_RETAIN="3MiB", MEMSAVER_HOST_DEVICE=size) == f"{3 * MIB} {size}\n"


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("MEMSAVER_RETAIN", "plenty", "retain is 'plenty', expected a number of bytes of 0 or more, or a string"),
        ("MEMSAVER_HOST_DEVICE", "1MiB", "host_device is '1MiB', expected at least 2 MiB"),
        ("MEMSAVER_POOL", "ours", "pool is 'ours', expected one of 'process', 'shared'"),
        ("MEMSAVER_SCRUB", "perhaps", "scrub is 'perhaps', expected True or False"),
        ("MEMSAVER_DISK_DIR", "/no/such", "disk_dir is '/no/such', expected a directory that can be written to"),
    ],
)
def test_a_wrong_option_in_the_environment_is_named(variable: str, value: str, text: str) -> None:
    done = run_python("import memsaver", **{variable: value})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"ConfigError: {text}" in last
    assert last.endswith(f"; it comes from {variable} in the environment")


# Figures


def test_stats_are_ready_for_json(make: Make) -> None:
    region = make("host")
    held = blocks(region, [3 * MIB])
    region.pause()
    found = memsaver.stats()
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
    assert found["unreleased_bytes"] == 0
    region.resume()
    held[0].check()


def test_stats_show_only_devices_in_use() -> None:
    assert run_clean("import memsaver; print(memsaver.stats()['devices'])") == "{}\n"


# Phases


@pytest.fixture(autouse=True)
def no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memsaver.phases, "_phases", {})


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


def test_phases_keep_contents_by_policy(make: Make) -> None:
    one, two = make("host"), make("host")
    held = blocks(one, [3 * MIB]) + blocks(two, [3 * MIB], seed=5)
    memsaver.define_phase("one", resident=[one.tag])
    memsaver.define_phase("two", resident=[two.tag])
    for _ in range(3):
        with memsaver.phase("one"):
            held[0].check()
        with memsaver.phase("two"):
            held[1].check()


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


def test_a_phase_that_others_name_but_nobody_made_yet_is_passed_over(fresh_tag: Callable[[], str], make: Make) -> None:
    region = make()
    memsaver.define_phase("a", resident=[region.tag])
    memsaver.define_phase("b", resident=[fresh_tag()])
    with memsaver.phase("a"):
        assert region.state == "active"


def test_wrong_phases_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no phase 'a'; there are none"), memsaver.phase("a"):
        pass
    wrong: list[tuple[Any, ...]] = [(1, []), ("a", "tag"), ("a", [1]), ("a", [], 3), ("a", [], None, "x"), ("a", None)]
    for arguments in wrong:
        with pytest.raises(TypeError):
            memsaver.define_phase(*arguments)


# Fork and exit


def test_a_forked_child_gets_a_clear_error_and_dies_in_peace() -> None:
    out = run_clean("""
        import gc, os, memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        held = region._core.allocate_array(5 << 20)
        paused = memsaver.region("b", device="cpu")
        paused.pause()
        before = memsaver.stats()["devices"]["cpu"]["free_bytes"]
        child = os.fork()
        if child == 0:
            calls = [
                lambda: memsaver.region("c", device="cpu"), memsaver.pause, memsaver.resume, memsaver.stats,
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
        print(memsaver.stats()["devices"]["cpu"]["free_bytes"] == before)
        region.pause()
        region.resume()
    """)
    assert out == "0\nTrue\n"


def test_a_forked_child_exits_as_any_process() -> None:
    run_clean("""
        import os, sys, memsaver
        region = memsaver.region("a", device="cpu", backup="host")
        tensor = region.empty(1000)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        region.pause()
    """)


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
