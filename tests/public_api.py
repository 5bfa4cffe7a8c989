"""The public names: functions, classes and methods of memsaver and its public parts, with their annotations."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import memsaver
import memsaver.distributed

try:
    import memsaver.ray
except ImportError:
    _RAY: list[str] = []
else:
    _RAY = memsaver.ray.__all__

try:
    import memsaver.metrics
except ImportError:
    _METRICS: list[str] = []
else:
    _METRICS = memsaver.metrics.__all__

# The other names are those of memsaver.ray as well.
_DISTRIBUTED = [
    name
    for name in memsaver.distributed.__all__
    if getattr(memsaver.distributed, name).__module__.startswith("memsaver.distributed.")
]

# Classes that the library alone constructs.
NOT_CONSTRUCTIBLE = {memsaver.Region, memsaver.TransitionFuture}


@dataclass(frozen=True)
class Name:
    """A public name. ``owner``: the class of a method or property."""

    name: str
    value: Any
    owner: type | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def is_class(self) -> bool:
        return isinstance(self.value, type)

    @property
    def is_property(self) -> bool:
        return isinstance(self.value, property)

    @property
    def function(self) -> Callable[..., Any]:
        """The function behind decorators. Of a property, its getter."""
        return inspect.unwrap(self.value.fget if self.is_property else self.value)

    @property
    def is_context_manager(self) -> bool:
        return inspect.isgeneratorfunction(self.function)

    @property
    def parameters(self) -> list[str]:
        """The parameters in their order, without ``self`` and ``cls``."""
        names = list(signature(self.function).parameters)
        return names[1:] if self.owner is not None else names

    def returns(self) -> Any:
        """The annotation of the result."""
        return _returns(self.function)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature in the source. Ray adds a parameter to the methods of a class that becomes an actor."""
    found = inspect.signature(function)
    return found.replace(parameters=[each for each in found.parameters.values() if each.name != "_ray_trace_ctx"])


def _returns(function: Callable[..., Any]) -> Any:
    import torch

    names = {**vars(memsaver.transitions), "torch": torch, **function.__globals__}
    return typing.get_type_hints(function, globalns=names)["return"]


def _members(name: str, owner: type, public: Collection[Any]) -> Iterator[Name]:
    """Those of bases of memsaver that have no public name are among them."""
    bases = [each for each in owner.__mro__ if each.__module__.startswith("memsaver.") and each not in public]
    for member, value in [pair for each in (owner, *bases) for pair in vars(each).items()]:
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield Name(f"{name}.{member}", value, owner)


def public_names() -> list[Name]:
    """All public functions and classes, the dataclasses of ``stats()``, and the methods and properties of classes."""
    found = [Name(f"memsaver.{name}", getattr(memsaver, name)) for name in memsaver.__all__]
    found += [
        Name(f"memsaver.figures.{name}", value)
        for name, value in vars(memsaver.figures).items()
        if dataclasses.is_dataclass(value)
    ]
    found += [Name(f"memsaver.guests.{name}", getattr(memsaver.guests, name)) for name in memsaver.guests.__all__]
    found += [Name(f"memsaver.ray.{name}", getattr(memsaver.ray, name)) for name in _RAY]
    found += [Name(f"memsaver.distributed.{name}", getattr(memsaver.distributed, name)) for name in _DISTRIBUTED]
    found += [Name(f"memsaver.metrics.{name}", getattr(memsaver.metrics, name)) for name in _METRICS]
    public = [each.value for each in found]
    return [*found, *(member for each in found if each.is_class for member in _members(each.name, each.value, public))]
