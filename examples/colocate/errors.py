"""Errors that end a run of the loop."""

from __future__ import annotations

import torch

import memsaver


class ProofError(RuntimeError):
    """A check of the loop failed."""


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The innermost out-of-memory error among the causes of an error. None if there is none."""
    found = None
    while error is not None:
        if isinstance(error, (memsaver.OutOfMemoryError, torch.OutOfMemoryError)):
            found = error  # Ray wraps it in an error of the same type; the text of the innermost is readable
        inner = getattr(error, "cause", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__
    return found
