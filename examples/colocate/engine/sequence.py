"""One request on its way through the engine, and its completion for the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens: temperature 0 is greedy; one of `stop_tokens` ends a completion and is part of it."""

    temperature: float = 1.0
    max_new_tokens: int = 32
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Logits divided by these are finite, and distinct, in fp32.
        if not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e6) or self.max_new_tokens < 1:
            raise ValueError(f"{self}; expected a temperature of 0, or from 0.001 to 1e6, and 1 token or more")


@dataclass
class Completion:
    """Tokens chosen after a prompt, and each one's log-probability: see `ops.sample`."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(eq=False)
class Sequence:
    """A request's state. K and V of the first `num_computed` tokens are in the cache, in `blocks`.

    A token that a step samples is in flight until it is read back: it counts in `length`, and is not yet in `tokens`.
    """

    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int  # prompt and completion together
    tokens: list[int] = field(init=False)  # the prompt, then the samples
    logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of full blocks of tokens, as far as they were computed
    num_published: int = 0  # blocks that others may share
    num_computed: int = 0  # a step that is launched counts as done
    is_prefilled: bool = False  # all tokens of when it was admitted are computed
    in_flight: int = 0
    row: int = -1  # its place in the device's tensors, while it holds blocks
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion, those in flight included."""
        return len(self.tokens) + self.in_flight

    def append(self, token: int, logprob: float) -> None:
        """Add a sampled token, and set `finish_reason` if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """Of a finished request."""
        assert self.finish_reason is not None
        return Completion(self.prompt, self.tokens[len(self.prompt) :], self.logprobs, self.finish_reason)
