"""The docstrings of public names: their sections are complete, and their examples run on the host driver."""

from __future__ import annotations

import asyncio
import doctest
import gc
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsaver
from tests.public_api import NOT_CONSTRUCTIBLE, Name, public_names, signature

PUBLIC = public_names()
SECTIONS = {"Args", "Attributes", "Returns", "Yields", "Raises", "Examples"}
# An example is required of functions, of classes, and of the methods of these classes.
WITH_EXAMPLES = {"Region", "TransitionFuture", "Group"}


def docstring(name: Name) -> str:
    return inspect.cleandoc(name.value.__doc__ or "")


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring of Google style, without indentation. Raises ValueError for an unknown heading."""
    parts = re.split(r"^(\w+):\n(?= )", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], map(inspect.cleandoc, parts[2::2])))
    if unknown := found.keys() - SECTIONS:
        raise ValueError(f"unknown sections: {unknown}")
    return found


def entries(text: str) -> list[str]:
    """The names in a section of entries ``name: description``."""
    return re.findall(r"^(\w+): \S", text, flags=re.MULTILINE)


def attributes(owner: type) -> list[str]:
    """The public attributes that a class declares."""
    annotated = vars(owner).get("__annotations__", {})
    constants = [name for name, value in vars(owner).items() if isinstance(value, str) and name not in annotated]
    return [name for name in [*constants, *annotated] if not name.startswith("_")]


def constructor(owner: type) -> Name | None:
    """The constructor that a class defines for its users."""
    if owner in NOT_CONSTRUCTIBLE or "__dataclass_fields__" in vars(owner):  # Attributes has the fields of a dataclass
        return None
    for method in ("__init__", "__new__"):
        if method in vars(owner):
            return Name(owner.__name__, getattr(owner, method), owner)
    return None


def complaints(name: Name) -> Iterator[str]:
    """The faults of a docstring, in words."""
    text = docstring(name)
    first, *rest = text.split("\n")
    if not re.fullmatch(r"\S.*\.", first) or (rest and rest[0]):
        yield f"it begins with {first!r}, expected one line that ends with a full stop"
    found = sections(text)
    if name.is_class:
        made = constructor(name.value)
        arguments = made.parameters if made is not None else []
        if made is not None and made.function.__name__ == "__new__":  # mkdocstrings reads these parameters only there
            found["Args"] = sections(docstring(made)).get("Args", "")
        fields = attributes(name.value)
        if entries(found.get("Attributes", "")) != fields:
            yield f"Attributes has {entries(found.get('Attributes', ''))}, expected {fields}"
    else:
        arguments = [] if name.is_property else name.parameters
    if entries(found.get("Args", "")) != arguments:
        yield f"Args has {entries(found.get('Args', ''))}, expected {arguments}"
    expected = result_section(name)
    for section in ("Returns", "Yields"):
        if (section in found) != (section == expected):
            yield f"{section} is {'there' if section in found else 'missing'}"
    for section in ("Returns", "Yields", "Raises"):
        if section in found and not found[section]:
            yield f"{section} is empty"
    if "Raises" in found and not re.match(r"[\w.]+: \S", found["Raises"]):
        yield "Raises names no error"


def result_section(name: Name) -> str | None:
    if name.is_class or name.is_property:
        return None
    hint = name.returns()
    if name.is_context_manager:
        return None if hint.__args__[0] in (None, type(None)) else "Yields"
    return None if hint is type(None) else "Returns"


def in_async_actor(name: Name) -> bool:
    """Whether the docstring of a method of AsyncColocated refers to the method of Colocated."""
    return name.owner is not None and name.owner.__name__ == "AsyncColocated"


def test_docstrings_have_all_sections() -> None:
    assert [(str(name), each) for name in PUBLIC if not in_async_actor(name) for each in complaints(name)] == []


def test_async_actor_has_the_methods_of_colocated() -> None:
    for name in filter(in_async_actor, PUBLIC):
        method = name.name.rpartition(".")[2]
        other = getattr(memsaver.ray.Colocated, method)
        assert docstring(name) == f"``Colocated.{method}()`` as a coroutine."
        assert signature(name.function) == signature(other)


# Examples


def requires_example(name: Name) -> bool:
    if name.owner is None:
        is_error = name.is_class and issubclass(name.value, memsaver.Error)
        return not is_error and not name.name.startswith("memsaver.figures.")
    return name.owner.__name__ in WITH_EXAMPLES and not name.is_property


def example(name: Name) -> doctest.DocTest:
    scope = {"memsaver": memsaver, "torch": torch, "asyncio": asyncio, "os": os}
    return doctest.DocTestParser().get_doctest(docstring(name), scope, name.name, None, None)


def marked(name: Name) -> Any:
    needs_gpu = 'device="cuda"' in docstring(name).partition("Examples:")[2]
    return pytest.param(name, marks=[pytest.mark.gpu] if needs_gpu else [], id=name.name)


@pytest.fixture
def clean() -> Iterator[None]:
    """Regions of one example are not there in the next one."""
    before = memsaver.regions.all_regions()
    yield
    gc.collect()
    for region in memsaver.regions.all_regions():
        if region not in before:
            region.close()


EXAMPLES = [each for each in PUBLIC if example(each).examples]


def test_functions_and_classes_have_examples() -> None:
    missing = [str(each) for each in PUBLIC if requires_example(each) and not example(each).examples]
    assert missing == []


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", [marked(each) for each in EXAMPLES])
def test_example_gives_the_results_that_it_shows(name: Name) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    output: list[str] = []
    result = runner.run(example(name), out=output.append)
    assert result.failed == 0, "".join(output)
