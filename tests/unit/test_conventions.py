"""The conventions of public calls: selections, options by keyword, default policies, results, constructors."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pytest

import memsaver
from tests.public_api import NOT_CONSTRUCTIBLE, Name, public_names, signature

try:
    from memsaver.ray import AsyncColocated, Colocated, Group
except ImportError:
    RAY_VERBS: list[Callable[..., Any]] = []
else:
    RAY_VERBS = [
        Colocated.pause, Colocated.resume, AsyncColocated.pause, AsyncColocated.resume, Colocated.colocated_prepare,
        AsyncColocated.colocated_prepare, Group.enter,
    ]  # fmt: skip

Make = Callable[..., memsaver.Region]

VERBS: list[Callable[..., Any]] = [
    memsaver.pause, memsaver.resume, memsaver.switch, memsaver.phase, memsaver.define_phase, memsaver.trim,
    memsaver.Region.pause, memsaver.Region.resume, memsaver.transitions.prepare_pause, *RAY_VERBS,
]  # fmt: skip
BY_POSITION = {"self", "tags", "coming", "name", "resident"}
ORDER = ["backup", "restore", "timeout", "memory_timeout", "reader_timeout", "wait", "progress"]


@pytest.fixture
def pair(make: Make) -> tuple[memsaver.Region, memsaver.Region]:
    return make("host"), make("none")


@pytest.fixture(autouse=True)
def no_phases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memsaver.transitions, "_phases", {})
    yield


def options(verb: Callable[..., Any]) -> list[str]:
    parameters = signature(verb).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


@pytest.mark.parametrize("verb", VERBS)
def test_options_are_by_keyword_and_in_one_order(verb: Callable[..., Any]) -> None:
    found = [name for name in options(verb) if name in ORDER]
    assert found == sorted(found, key=ORDER.index)
    by_position = [
        each.name
        for each in signature(verb).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in BY_POSITION
    ]
    assert by_position == []


def test_graph_takes_its_options_by_keyword() -> None:
    assert options(memsaver.graph) == ["needs", "stream", "capture_error_mode"]


def test_function_and_method_have_the_same_options() -> None:
    assert options(memsaver.pause) == options(memsaver.Region.pause)
    assert options(memsaver.resume) == options(memsaver.Region.resume)


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_actors_have_the_options_of_the_functions(verb: str) -> None:
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")
    function = signature(getattr(memsaver, verb)).parameters
    in_process = {"wait", "progress"}  # neither passes from process to process
    expected = [(each.name, each.kind, each.default) for each in function.values() if each.name not in in_process]
    for base in (ray.Colocated, ray.AsyncColocated):
        _, *method = signature(getattr(base, verb)).parameters.values()
        assert [(each.name, each.kind, each.default) for each in method] == expected


def has_any(hint: Any) -> bool:
    """Whether a value of this type can be of any type. The values of a dictionary may."""
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return False
    parts = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        parts = parts[:1]
    return any(has_any(each) for each in parts)


@pytest.mark.parametrize("name", [each for each in public_names() if not each.is_class], ids=str)
def test_results_have_types(name: Name) -> None:
    hints = [name.returns(), *name.returns_of_overloads()]
    assert not any(map(has_any, hints)), hints


def test_public_constructors_and_methods_have_no_internal_parameters() -> None:
    for name in public_names():
        if name.is_class and name.value not in NOT_CONSTRUCTIBLE:
            parameters = signature(name.value).parameters
        elif name.is_class or name.is_property:
            continue
        else:
            parameters = signature(name.function).parameters
        assert not [each for each in parameters if each.startswith("_")], name


def test_tags_and_regions_select_regions(pair: tuple[memsaver.Region, memsaver.Region]) -> None:
    first, second = pair
    memsaver.pause(first)
    assert (first.state, second.state) == ("paused", "active")
    memsaver.pause([first.tag, second.tag])
    assert (first.state, second.state) == ("paused", "paused")
    memsaver.resume([second])
    assert (first.state, second.state) == ("paused", "active")
    memsaver.switch(pause=second, resume=first)
    assert (first.state, second.state) == ("active", "paused")
    memsaver.resume([first.tag, second, second, second.tag])
    assert (first.state, second.state) == ("active", "active")


def test_a_phase_takes_tags_and_regions(pair: tuple[memsaver.Region, memsaver.Region], make: Make) -> None:
    first, second = pair
    other = make()
    memsaver.define_phase("one", first)
    memsaver.define_phase("rest", [second, other.tag])
    memsaver.define_phase("other", resident=other.tag)
    with memsaver.phase("one"):
        assert [each.state for each in (first, second, other)] == ["active", "paused", "paused"]
    with memsaver.phase("rest"):
        assert [each.state for each in (first, second, other)] == ["paused", "active", "active"]
    with memsaver.phase("other"):
        assert [each.state for each in (first, second, other)] == ["paused", "paused", "active"]
    memsaver.resume()
    second.close()
    with memsaver.phase("rest"):  # without the region that was closed
        assert [each.state for each in (first, other)] == ["paused", "active"]
    memsaver.define_phase("one", [])
    with memsaver.phase("rest"):
        first.resume()
    with memsaver.phase("rest"):  # no phase names it any more
        assert first.state == "active"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (memsaver.pause, "tags"),
        (memsaver.resume, "tags"),
        (memsaver.trim, "tags"),
        (lambda wrong: memsaver.switch(pause=wrong), "pause"),
        (lambda wrong: memsaver.switch(resume=wrong), "resume"),
        (lambda wrong: memsaver.define_phase("wrong", wrong), "resident"),
    ],
)
def test_a_wrong_selection_raises_and_is_named(make: Make, call: Callable[[Any], object], name: str) -> None:
    tag = make().tag
    for wrong in (3, {tag: 1}, {tag: "host"}):
        with pytest.raises(TypeError, match="expected a tag, a Region, or several of either") as caught:
            call(wrong)
        assert str(caught.value).startswith(f"{name} is {wrong!r}")
    with pytest.raises(TypeError, match=f"{name} has 3, expected a tag or a Region"):
        call([tag, 3])


def test_region_without_a_policy_returns_a_frozen_region(tag: str) -> None:
    made = memsaver.region(tag, device="cpu", backup="host", frozen=True)
    assert memsaver.region(tag, device="cpu", frozen=True) is made
    with pytest.raises(ValueError, match="frozen is True and backup is 'none'"):
        memsaver.region(tag + " other", device="cpu", frozen=True)
