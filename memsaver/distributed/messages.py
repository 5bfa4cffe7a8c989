"""Messages between ranks as JSON. A store has no authentication, so nothing is unpickled from it."""

from __future__ import annotations

import json
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


def dumps(value: Any) -> str:
    """Encodes JSON's types, tuples, transitions and errors. Of any other value its repr() arrives, as a string."""
    return json.dumps(_packed(value), separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    return _unpacked(json.loads(text))


def _packed(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_packed(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_packed(key), _packed(each)] for key, each in value.items()]}
    if isinstance(value, (Transition, Ready)):
        return {type(value).__name__: _packed(asdict(value))}
    if isinstance(value, BaseException):
        return {"error": _packed(_described(value))}
    return repr(value)


def _described(error: BaseException) -> list[Any]:
    kind = type(error).__name__
    if _ERRORS.get(kind) is type(error):
        return [kind, str(error.args[0]) if len(error.args) == 1 else str(error), dict(vars(error))]
    # The class is not known everywhere, so its name is part of the text.
    return ["Error", f"{kind}: {error}", {}]


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, packed),) = value.items()
    content = _unpacked(packed)
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
