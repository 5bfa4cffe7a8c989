"""The trainer: FSDP2 and AdamW in fp32, in memory that can be paused between two calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from ..grpo import policy_loss
from ..model.config import ModelConfig
from ..model.layers import rotary_tables
from .batch import TokenBatch
from .config import TrainerConfig
from .memory import TrainerMemory, local
from .model import CausalLM, initial_deviation
from .weights import WeightWriter, weight_buckets


@dataclass(frozen=True)
class StepMetrics:
    """What a step did, over all ranks: `loss` per token; `clipped`, the share of tokens whose ratio was clipped."""

    loss: float
    grad_norm: float  # before clipping
    clipped: float = 0.0


class Trainer:
    """One rank of the trainer. All ranks make the same calls, with the same batches; each takes its own rows.

    Parameters, gradients and optimizer state live in the regions of `TrainerMemory`, from construction on and under
    fixed addresses; nothing else outlasts a call but the rotary tables. Activations, and what FSDP gathers, are in
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

    def train_step(self, batch: TokenBatch, learning_rate: float) -> StepMetrics:
        """A policy-gradient step on completions, by their advantages and behaviour log-probabilities."""
        own = batch.shard(self.rank, self.world_size).to(self.device)
        loss, clipped = policy_loss(
            self._logprobs(own), own.behaviour_BT[:, 1:], own.advantages_B, own.mask_BT[:, 1:], self.config.clip
        )
        return self._update(loss, batch.num_targets, learning_rate, clipped)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities of this rank's rows, fp32 [B, T] on the CPU: what the model gives each token after those
        before it, and zero where the mask is false.
        """
        own = batch.shard(self.rank, self.world_size).to(self.device)
        logprobs_BT = F.pad(self._logprobs(own), (1, 0)).masked_fill(~own.mask_BT, 0.0)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass the root would stay gathered, and get stale
        return logprobs_BT.cpu()

    def reset_optimizer(self) -> None:
        """Forget all moments, in place: without a gradient the next step then changes nothing."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                local(tensor).zero_()

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
        """Wait for the device, and give back what torch's default pool holds free."""
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
        """Backward and optimizer step for a loss summed over this rank's tokens, of `num_targets` on all ranks."""
        self.optimizer.zero_grad(set_to_none=False)  # in place, and needed: a resume left them undefined
        # FSDP averages over ranks; what is wanted is the mean over all tokens.
        (loss * (self.world_size / num_targets)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        sums = torch.stack([loss.detach(), loss.new_zeros(()) if clipped is None else clipped.to(loss.dtype)])
        dist.all_reduce(sums)
        total, held = (sums / num_targets).tolist()
        return StepMetrics(total, float(norm.full_tensor() if isinstance(norm, DTensor) else norm), held)

    @torch.no_grad()
    def _initialize(self) -> None:
        """The same values however many ranks share them: each draws the whole tensor and keeps its part."""
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        for name, parameter in self.model.named_parameters():
            deviation = initial_deviation(name, parameter.shape)
            full = torch.ones(parameter.shape, device=self.device)
            if deviation is not None:
                full.normal_(0.0, deviation, generator=generator)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            local(parameter).copy_(local(full))
