"""The trainer: FSDP2 and AdamW over fp32 shards, in memory that can be paused between two calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import memsaver

from ..grpo import importance_weights, policy_loss
from ..model import ModelConfig, checksums, random_parameters
from ..model.folder import failing, load_parameters
from ..model.layers import rotary_tables
from .batch import MicroBatch, RankBatch
from .causal_lm import CausalLM
from .interface import CheckpointError, NonFiniteError, Sample, StepMetrics, TokenStatistics, TrainerConfig
from .trainer_memory import TrainerMemory, local, own_rows
from .weights import WeightWriter


class Trainer:
    """One rank of the trainer. All ranks make the same calls, with the same samples; each learns from a part of them.

    Parameters, gradients and optimizer state are in the regions of `memory`, from construction on and under fixed
    addresses. Only these and the rotary tables outlast a call. `weights` brings the parameters to engines.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TrainerConfig,
        mesh: DeviceMesh,
        folder: Path | None = None,
        region: Any = memsaver.region,
    ) -> None:
        """`mesh` has one dimension; its process group has to exist (see `join`).

        `folder`: of a Hugging Face checkpoint with the initial parameters; None: random ones. `region`: makes one of a
        tag, a device and a backup.
        """
        self.model_config, self.config = model, config
        self.device = torch.device(mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.memory = TrainerMemory(self.device, region)
        with torch.device("meta"):
            self.model = CausalLM(model, config.checkpoint_layers)
        # Inputs are not cast: the rotary tables stay in fp32, as those of the engine.
        precision = MixedPrecisionPolicy(config.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.memory.place_params(self.model)
        parameters = dict(self.model.named_parameters())
        if folder is not None:
            load_parameters(parameters, folder)
        else:  # the same however many ranks share them
            for name, full in random_parameters(model, torch.float32, self.device, config.seed):
                rows, first = own_rows(parameters[name])
                rows.copy_(full[first : first + len(rows)])
        self.optimizer = torch.optim.AdamW(
            parameters.values(), lr=0.0, betas=config.betas, weight_decay=0.0, fused=True
        )
        self.memory.place_state(self.optimizer)
        self.weights = WeightWriter(self.model, model.dtype)
        self._tables = [table.to(self.device) for table in rotary_tables(model)]

    def warm_up(self, samples: Sequence[Sample], learning_rate: float) -> StepMetrics:
        """A supervised step: cross-entropy of the completions' tokens, at temperature 1."""
        return self._step(self.deal(samples), learning_rate, 1.0, lambda _, logprobs_N: (-logprobs_N.sum(), 0))

    def deal(self, samples: Sequence[Sample]) -> RankBatch:
        """This rank's part of a batch, with the samples' own log-probabilities as behaviour."""
        longest = max((sample.length for sample in samples), default=0)
        if longest > self.model_config.max_position:
            raise ValueError(f"a sample has {longest} tokens; expected at most {self.model_config.max_position}")
        return RankBatch.deal(samples, self.rank, self.world_size, self.config.micro_batch_tokens, self.device)

    def recompute(self, samples: Sequence[Sample]) -> tuple[RankBatch, TokenStatistics]:
        """This rank's part, with the trainer's own log-probabilities as behaviour: before the first step on a rollout.

        The ratio that is clipped then compares the trainer with itself. The gap to the program that sampled, which
        computes with other kernels and perhaps in another dtype, becomes the tokens' importance weights, truncated at
        `weight_cap`.
        """
        dealt, found, parts = self.deal(samples), [], []
        with torch.no_grad():
            for each in dealt.micro_batches:
                policy_N, entropy_N, variance_N = self._forward(each, self.config.temperature, True)
                weights_N = importance_weights(policy_N, each.behaviour_N, self.config.weight_cap)
                parts.append(TokenStatistics(policy_N, each.behaviour_N, entropy_N, variance_N))
                found.append(replace(each, behaviour_N=policy_N, weights_N=weights_N))
        self._reshard()  # without a backward pass the root would stay gathered, and get stale
        return replace(dealt, micro_batches=found), TokenStatistics.joined(parts)

    def train_step(self, batch: RankBatch, learning_rate: float) -> StepMetrics:
        """A policy-gradient step on a batch of `recompute`, by its advantages, behaviour and weights."""

        def loss(part: MicroBatch, logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
            return policy_loss(logprobs_N, part.behaviour_N, part.advantages_N, part.weights_N, self.config.clip)

        return self._step(batch, learning_rate, self.config.temperature, loss)

    @property
    def steps_taken(self) -> int:
        """Steps of the optimizer since it was made or reset."""
        self.memory.optimizer.wait()
        return int(next(iter(self.optimizer.state.values()))["step"])

    def reset_optimizer(self) -> None:
        """Forget all moments, in place: without a gradient the next step then changes nothing."""
        self.memory.optimizer.wait()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                local(tensor).zero_()

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer state, synced to disk. A collective; all ranks share the folder."""
        with failing(CheckpointError, f"the trainer's state could not be written to {str(folder)!r}"):
            dcp.save(self.state(), storage_writer=FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        """Overwrite parameters and optimizer state, in place: their addresses stay. A collective."""
        self._reshard()  # parameters that a failed call left gathered would be stale
        with failing(CheckpointError, f"the trainer's state could not be read from {str(folder)!r}"):
            dcp.load(self.state(), storage_reader=FileSystemReader(folder))

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint has, by name. Tied parameters come once."""
        self.memory.optimizer.wait()
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for key, tensor in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = tensor
        return found

    def checksums(self) -> dict[str, int]:
        """By name, of this rank's shards of parameters and moments, and of the step counters."""
        return checksums({name: local(tensor) for name, tensor in self.state().items()})

    def _reshard(self) -> None:
        """Free gathered parameters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _forward(self, batch: MicroBatch, temperature: float, with_statistics: bool = False) -> Tensor:
        """Log-probabilities of a micro-batch, and statistics: see `token_logprobs`."""
        return self.model(batch, *self._tables, temperature, self.config.logit_chunk, with_statistics)

    def _step(
        self,
        batch: RankBatch,
        learning_rate: float,
        temperature: float,
        loss_of: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor | int]],
    ) -> StepMetrics:
        """Gradients of all micro-batches, and a step of the optimizer. Raises NonFiniteError.

        `loss_of` maps a micro-batch and the log-probabilities of its tokens to the loss, summed over tokens, and how
        many of them were clipped.
        """
        self.optimizer.zero_grad(set_to_none=False)  # in place, and needed: a resume left them undefined
        sums_R3 = torch.zeros(self.world_size, 3, device=self.device)  # of each rank: loss, clipped tokens, not finite
        loss, clipped, wrong = sums_R3[self.rank]
        for part in batch.micro_batches:
            part_loss, part_clipped = loss_of(part, self._forward(part, temperature)[0])
            # FSDP averages over ranks, but the loss is the mean over all tokens.
            (part_loss * (self.world_size / batch.num_targets)).backward()
            loss += part_loss.detach()
            clipped += part_clipped
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        total_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        wrong += ~(torch.isfinite(loss) & torch.isfinite(total_norm))
        dist.all_reduce(sums_R3)
        losses, held, refusing = sums_R3.T.tolist()
        # Of all ranks: they decide alike also where rounding made their norms differ.
        if any(refusing):
            found = f"the gradient norm is {float(total_norm)}, the losses of the ranks are {losses}"
            step = self.steps_taken + 1
            raise NonFiniteError(f"optimizer step {step} was not applied: {found}; expected finite numbers")
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.max_grad_norm, norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.memory.optimizer.wait()
        self.optimizer.step()
        return StepMetrics(sum(losses) / batch.num_targets, float(total_norm), sum(held) / batch.num_targets)
