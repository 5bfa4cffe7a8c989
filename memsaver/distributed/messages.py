"""Values as JSON, with transitions and errors. A store has no authentication, so nothing is unpickled from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from memsaver import errors
from memsaver.transitions import Transition
from memsaver.turns.members import Ready


class LostRankError(errors.Error):
    """The process of a rank has ended, or its host cannot be reached.

    Attributes:
        process: The rank of the process in torch.distributed.

    Examples:
        >>> try:
        ...     raise memsaver.distributed.LostRankError("rank 3 has ended", process=3)
        ... except memsaver.Error as error:
        ...     print(error.process, error)
        3 rank 3 has ended
    """

    process: int


_RESULTS: dict[str, Callable[..., Any]] = {"Transition": Transition, "Ready": Ready}
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.Error)),
        LostRankError, AssertionError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError,
    )
}  # fmt: skip


def packed(value: Any) -> Any:
    """JSON's types, for them, tuples, transitions and errors. Of any other value its repr() arrives, as a string."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [packed(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [packed(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[packed(key), packed(each)] for key, each in value.items()]}
    if isinstance(value, (Transition, Ready)):
        return {type(value).__name__: packed(asdict(value))}
    if not isinstance(value, BaseException):
        return repr(value)
    kind = type(value).__name__
    if _ERRORS.get(kind) is not type(value):  # the class is not known everywhere, so its name is part of the text
        return {"error": ["Error", f"{kind}: {value}", packed({})]}
    text = str(value.args[0]) if len(value.args) == 1 else str(value)
    return {"error": [kind, text, packed(dict(vars(value)))]}


def unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    content = unpacked(inner)
    if kind == "tuple":
        return tuple(content)
    if kind == "dict":
        return dict(content)
    if kind == "error":
        name, text, fields = content
        error = _ERRORS[name](text)
        error.__dict__.update(fields)
        return error
    return _RESULTS[kind](**content)
