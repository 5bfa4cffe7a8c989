"""The trainer: FSDP2 and AdamW in fp32, in memory that can be paused between two calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from ..grpo import importance_weights, policy_loss
from ..model.config import ModelConfig
from ..model.layers import rotary_tables
from . import checkpoint
from .batch import RankBatch, TokenBatch
from .config import TrainerConfig
from .finite import refusal
from .gap import LogprobGap
from .memory import TrainerMemory, local
from .model import CausalLM, initial_deviation
from .weights import WeightWriter, weight_buckets


@dataclass(frozen=True)
class StepMetrics:
    """Figures of a step over all ranks: `loss` per token; `clipped`, the share of tokens whose ratio was clipped."""

    loss: float
    grad_norm: float  # before clipping
    clipped: float = 0.0


class Trainer:
    """One rank of the trainer. All ranks make the same calls, with the same batches; each takes its own rows.

    Parameters, gradients and optimizer state are in the regions of `TrainerMemory`, from construction on and under
    fixed addresses. Only these and the rotary tables outlast a call. Activations and gathered parameters are in
    torch's default pool until `release_activations`.
    """

    def __init__(self, model: ModelConfig, config: TrainerConfig, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension; its process group has to exist (see `process_group`)."""
        self.model_config, self.config = model, config
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.memory = TrainerMemory(self.device)
        with torch.device("meta"):
            self.model = CausalLM(model)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.memory.place_params(self.model)
        self.model.tie()
        self._initialize()
        self.memory.place_grads(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=config.betas, weight_decay=0.0, fused=True
        )
        self.memory.place_optimizer(self.optimizer)
        self._writer = WeightWriter(self.model)
        self._tables = rotary_tables(
            model.max_position, model.head_dim, model.rope_theta, self.device, model.rope_scaling
        )

    def warm_up(self, batch: TokenBatch, learning_rate: float) -> StepMetrics:
        """A supervised step: cross-entropy of the masked tokens."""
        own = batch.shard(self.rank, self.world_size).to(self.device)
        return self._update(-self._logprobs(own)[own.mask_BT[:, 1:]].sum(), batch.num_targets, learning_rate)

    def train_step(self, batch: TokenBatch | RankBatch, learning_rate: float) -> StepMetrics:
        """A policy-gradient step on completions, by their advantages and behaviour log-probabilities.

        Those of a `TokenBatch` are as its policy said; those of a `RankBatch` as `recompute` found them.
        """
        if isinstance(batch, TokenBatch):
            batch = RankBatch(batch.shard(self.rank, self.world_size), batch.num_targets)
        own = batch.rows.to(self.device)
        loss, clipped = policy_loss(
            self._logprobs(own),
            own.behaviour_BT[:, 1:],
            own.advantages_B,
            own.mask_BT[:, 1:],
            self.config.clip,
            None if own.weights_BT is None else own.weights_BT[:, 1:],
        )
        return self._update(loss, batch.num_targets, learning_rate, clipped)

    def recompute(self, batch: TokenBatch) -> tuple[RankBatch, LogprobGap]:
        """This rank's rows with the trainer's own log-probabilities as behaviour: before the first step on a rollout.

        The ratio that is clipped then compares the trainer with itself. The gap to the program that sampled, which
        computes with other kernels and perhaps in another dtype, becomes the tokens' importance weights, truncated at
        `weight_cap`.
        """
        own = batch.shard(self.rank, self.world_size)
        policy_BT, cap = self.logprobs(batch), self.config.weight_cap
        weights_BT = importance_weights(policy_BT, own.behaviour_BT, cap)
        gap = LogprobGap.of(policy_BT, own.behaviour_BT, own.mask_BT, cap)
        return RankBatch(replace(own, behaviour_BT=policy_BT, weights_BT=weights_BT), batch.num_targets), gap

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities of this rank's rows, fp32 [B, T] on the CPU: of each token after the tokens before it, and
        zero where the mask is false.
        """
        own = batch.shard(self.rank, self.world_size).to(self.device)
        logprobs_BT = F.pad(self._logprobs(own), (1, 0)).masked_fill(~own.mask_BT, 0.0)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass the root would stay gathered, and get stale
        return logprobs_BT.cpu()

    @property
    def steps_taken(self) -> int:
        """Steps of the optimizer since it was made or reset."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    def reset_optimizer(self) -> None:
        """Forget all moments, in place: without a gradient the next step then changes nothing."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                local(tensor).zero_()

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer state: see `checkpoint.save`. Needs their regions, and all ranks."""
        checkpoint.save(self.model, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of the same number of ranks, in place. Raises CheckpointError."""
        checkpoint.load(self.model, self.optimizer, folder)

    def weight_buckets(self, max_bytes: int, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
        """Full weights by name, on the CPU and in the model's dtype (or another): see `weights.weight_buckets`.

        Needs the region of the parameters alone.
        """
        return weight_buckets(self.model, max_bytes, dtype or self.model_config.dtype)

    def write_weights(
        self, targets: Sequence[Mapping[str, Tensor]], gather: bool = False, dtype: torch.dtype | None = None
    ) -> int:
        """Write the weights into tensors of others, of the model's dtype (or another): see `WeightWriter`.

        Needs the region of the parameters alone.
        """
        return self._writer.write(targets, dtype or self.model_config.dtype, gather)

    def addresses(self) -> dict[str, int]:
        """Where every tensor is that lasts: parameters, gradients and moments."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"params/{name}"] = local(parameter).data_ptr()
            found[f"grads/{name}"] = local(parameter.grad).data_ptr() if parameter.grad is not None else 0
            for moment, tensor in self.optimizer.state[parameter].items():
                found[f"optimizer/{name}/{moment}"] = local(tensor).data_ptr()
        return found

    def release_activations(self) -> None:
        """Wait for the device, and release the free memory of torch's default pool."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities [B, T - 1] of the tokens after the first."""
        logits_BTV: Tensor = self.model(batch.tokens_BT[:, :-1], *self._tables).float()
        chosen_BT = logits_BTV.gather(-1, batch.tokens_BT[:, 1:, None]).squeeze(-1)
        return chosen_BT - logits_BTV.logsumexp(-1)

    def _update(
        self, loss: Tensor, num_targets: int, learning_rate: float, clipped: Tensor | None = None
    ) -> StepMetrics:
        """Backward and optimizer step for a loss summed over this rank's tokens, of `num_targets` on all ranks.

        Raises NonFiniteError on all ranks, with nothing applied, if loss or gradients of one of them are not finite.
        """
        self.optimizer.zero_grad(set_to_none=False)  # in place, and needed: a resume left them undefined
        # FSDP averages over ranks, but the loss is the mean over all tokens.
        (loss * (self.world_size / num_targets)).backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        own = loss.detach()
        total_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Summed over ranks: they decide alike also where rounding made their norms differ.
        wrong = (~(torch.isfinite(own) & torch.isfinite(total_norm))).to(own.dtype)
        sums = torch.stack([own, own.new_zeros(()) if clipped is None else clipped.to(own.dtype), wrong])
        dist.all_reduce(sums)
        total, held, refusing = sums.tolist()
        grad_norm = float(total_norm)
        if refusing:
            raise refusal(own, grad_norm, self.model, self.steps_taken + 1)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.max_grad_norm, norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return StepMetrics(total / num_targets, grad_norm, held / num_targets)

    @torch.no_grad()
    def _initialize(self) -> None:
        """The same values however many ranks share them: each draws the whole tensor and keeps its part."""
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        for name, parameter in self.model.named_parameters():
            deviation = initial_deviation(name, parameter.shape)
            full = torch.full(parameter.shape, 0.0 if name.endswith(".bias") else 1.0, device=self.device)
            if deviation is not None:
                full.normal_(0.0, deviation, generator=generator)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local(parameter).copy_(local(full))
