"""Findings of ``memsaver doctor``: the subject, the state, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from memsaver.doctor.machine import Machine

State = Literal["error", "warning", "note", "ok"]
STATES: Final[tuple[State, ...]] = ("error", "warning", "note", "ok")  # the worst first


@dataclass(frozen=True)
class Finding:
    """A line of the command.

    Attributes:
        subject: What was looked at, such as ``"host memory"``.
        state: ``"note"``: a fact that explains some errors. ``"warning"``: some calls may fail. ``"error"``: they fail.
        value: What was found, with its figures and processes.
        remedy: Empty where there is nothing to do.
    """

    subject: str
    state: State
    value: str
    remedy: str = ""


def judged(subject: str, value: str, *cases: tuple[object, State, str]) -> Finding:
    """A finding by the first case that is true: its state and its remedy. None: ok."""
    for is_true, state, remedy in cases:
        if is_true:
            return Finding(subject, state, value, remedy)
    return Finding(subject, "ok", value)


Check = Callable[[Machine], Iterable[Finding]]


def run(checks: Iterable[Check], machine: Machine) -> list[Finding]:
    """The findings of all checks, the worst first. A check that raises becomes a finding, after those that it made."""
    found: list[Finding] = []
    for check in checks:
        try:
            found.extend(check(machine))
        except Exception as error:  # the other checks still run
            [why, *_] = f"{type(error).__name__}: {error}".splitlines()
            text = f"this check failed: {why}"
            found.append(Finding(check.__name__.replace("_", " "), "warning", text))
    return sorted(found, key=lambda each: STATES.index(each.state))


def exit_status(findings: Iterable[Finding]) -> int:
    """0, 1 if there are warnings, or 2 if there are errors."""
    return max(({"error": 2, "warning": 1}.get(each.state, 0) for each in findings), default=0)


def lines(findings: Sequence[Finding]) -> list[str]:
    """The text of the command: a line for each finding, its remedy below it, and the sum."""
    width = max((len(each.subject) for each in findings), default=0)
    found = []
    for each in findings:
        found.append(f"{each.state:<7}  {each.subject:<{width}}  {each.value}")
        if each.remedy:
            found.append(f"{'':<7}  {'':<{width}}  -> {each.remedy}")
    counts = [f"{sum(each.state == state for each in findings)} {state}" for state in STATES]
    return [*found, ", ".join(counts)]
