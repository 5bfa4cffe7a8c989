"""Values as JSON, with transitions and errors. A store has no authentication, so nothing is unpickled from it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from memsaver import errors
from memsaver.transitions import Transition
from memsaver.turns.members import Ready


class LostRankError(errors.Error):
    """The process of a rank has ended, or its host cannot be reached.

    Attributes:
        process: The rank of the process in torch.distributed.
    """

    process: int


_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.Error)),
        LostRankError, AssertionError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError,
        Transition, Ready,
    )
}  # fmt: skip


def dumps(value: Any) -> str:
    """Encodes JSON's types, transitions and errors. Tuples arrive as lists, other values as their repr()."""
    try:
        return json.dumps(value, default=_packed, separators=(",", ":"))
    except (TypeError, ValueError):  # keys that are no strings, and cycles
        plain = errors.Error(f"{type(value).__name__}: {value}") if isinstance(value, Exception) else repr(value)
        return json.dumps(plain, default=_packed)


def loads(text: str) -> Any:
    return json.loads(text, object_hook=_unpacked)


def _packed(value: Any) -> Any:
    kind = type(value).__name__
    for base in (Transition, Ready):
        if isinstance(value, base):  # a derived class has other fields, which other processes may not know
            return {"class": base.__name__, "fields": {each.name: getattr(value, each.name) for each in fields(base)}}
    if not isinstance(value, BaseException):
        return repr(value)
    if _CLASSES.get(kind) is type(value):
        text = str(value.args[0]) if len(value.args) == 1 else str(value)
        return {"class": kind, "text": text, "fields": vars(value)}
    # The class is not known everywhere, so its name is part of the text.
    return {"class": "Error", "text": f"{kind}: {value}", "fields": {}}


def _unpacked(found: dict[str, Any]) -> Any:
    if found.keys() == {"class", "text", "fields"}:
        kind = _CLASSES[found["class"]]
        error = kind(found["text"])
        for name, each in found["fields"].items():
            error.__dict__[name] = tuple(each) if isinstance(getattr(kind, name, None), tuple) else each
        return error
    if found.keys() == {"class", "fields"}:
        fields = {name: tuple(each) if isinstance(each, list) else each for name, each in found["fields"].items()}
        return _CLASSES[found["class"]](**fields)
    return found
