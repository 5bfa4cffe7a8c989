"""Regions that come back, or leave, while the work of a phase goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from memsaver.regions import Coming, Region, Selection, find, selected

if TYPE_CHECKING:
    import torch

log = logging.getLogger("memsaver")


def expect(phase: str, future: Future[Any], coming: Iterable[Region]) -> None:
    """The first use of these regions waits for a transition in the background, which is part of a phase."""
    for each in coming:
        each._coming = Coming(future, phase, each.residence)

    def note(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            log.warning("phase %r: late and lingering regions could not move: %s", phase, error)

    future.add_done_callback(note)


def forget(every: Iterable[Region]) -> None:
    """Another phase begins, in which these move: errors of earlier ones are not raised any more."""
    for each in every:
        each._coming = None


def wait_before_step(optimizer: torch.optim.Optimizer, tags: Selection) -> torch.utils.hooks.RemovableHandle:
    """Lets each step of an optimizer wait for regions that come late in a phase: see ``memsaver.define_phase()``.

    Args:
        optimizer: An optimizer of torch, or an object with ``register_step_pre_hook()``.
        tags: A tag, a Region, or several of either: the regions of the optimizer's states.

    Returns:
        A handle of torch. Its ``remove()`` ends the waits.

    Raises:
        TypeError: The object has no such method.
        ValueError: A tag has no region.

    Examples:
        >>> states = memsaver.region("optimizer", device="cpu", backup="host")
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> handle = memsaver.wait_before_step(optimizer, "optimizer")
        >>> optimizer.step()
    """
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None or isinstance(optimizer, type):
        raise TypeError(f"optimizer is {optimizer!r}, expected an object with register_step_pre_hook()")
    parts = None if tags is None else selected(tags)  # once: an iterator is empty afterwards
    find(parts)  # raises

    def wait(*_: Any) -> None:
        for each in find(parts):  # which may have been made anew
            each.wait()

    return register(wait)
