"""Sequences, and which of their tokens to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Padded sequences of B rows and T positions.

    `mask_BT` is true where a token is to be predicted: that of a completion. `behaviour_BT` is the log-probability, in
    nats, with which the policy chose it. Padding stands at the end and is masked out. `advantages_B` is the worth of a
    row's completion. `weights_BT` multiply each token's loss; None: one everywhere. The last three matter to
    policy-gradient steps alone.
    """

    tokens_BT: Tensor  # int64
    mask_BT: Tensor  # bool
    behaviour_BT: Tensor  # fp32
    advantages_B: Tensor  # fp32
    weights_BT: Tensor | None = None  # fp32

    def __post_init__(self) -> None:
        shape = self.tokens_BT.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise ValueError(f"tokens have shape {tuple(shape)}; expected [1 row or more, 2 positions or more]")
        expected_shapes = {"mask_BT": shape, "behaviour_BT": shape, "advantages_B": shape[:1], "weights_BT": shape}
        for name, expected in expected_shapes.items():
            if getattr(self, name) is not None and getattr(self, name).shape != expected:
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}; expected {tuple(expected)}")
        if self.mask_BT.dtype != torch.bool or bool(self.mask_BT[:, 0].any()):
            raise ValueError("the mask has to be of bool, and false for first tokens: nothing predicts them")
        if not bool(self.mask_BT.any()):
            raise ValueError("the mask is false everywhere; expected a token to learn from")

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        pad_token: int,
        logprobs: Sequence[Sequence[float]] | None = None,
        advantages: Tensor | None = None,
    ) -> TokenBatch:
        """A batch of prompts and their completions, as token ids; rows in their order."""
        if len(prompts) != len(completions) or (logprobs is not None and len(logprobs) != len(prompts)):
            raise ValueError(
                f"there are {len(prompts)} prompts, {len(completions)} completions and "
                f"{'no' if logprobs is None else len(logprobs)} rows of log-probabilities; expected as many of each"
            )
        length = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions))
        tokens, mask, behaviour = [], [], []
        for row, (prompt, completion) in enumerate(zip(prompts, completions)):
            padding = length - len(prompt) - len(completion)
            chosen = [0.0] * len(completion) if logprobs is None else list(logprobs[row])
            tokens.append([*prompt, *completion, *[pad_token] * padding])
            mask.append([False] * len(prompt) + [True] * len(completion) + [False] * padding)
            behaviour.append([0.0] * len(prompt) + chosen + [0.0] * padding)
        if advantages is None:
            advantages = torch.zeros(len(prompts))
        return cls(torch.tensor(tokens), torch.tensor(mask), torch.tensor(behaviour), advantages.float())

    def __len__(self) -> int:
        return len(self.tokens_BT)

    @property
    def num_targets(self) -> int:
        """Tokens to predict."""
        return int(self.mask_BT.sum())

    def shard(self, rank: int, world_size: int) -> TokenBatch:
        """The rows of one rank: every `world_size`-th."""
        if len(self) < world_size:
            raise ValueError(f"the batch has {len(self)} rows; expected one for each of {world_size} ranks at least")
        return self._map(lambda tensor: tensor[rank::world_size])

    def to(self, device: torch.device) -> TokenBatch:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> TokenBatch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return TokenBatch(**{name: function(tensor) for name, tensor in tensors.items() if tensor is not None})


@dataclass(frozen=True)
class RankBatch:
    """One rank's rows of a batch, and the tokens that all ranks learn from together."""

    rows: TokenBatch
    num_targets: int
