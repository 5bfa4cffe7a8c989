"""The engine: continuous batching over a paged KV cache, in memory that can be paused between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from ..model import ModelConfig, WeightPart, checksums, random_parameters
from .batches import Readback
from .block_manager import BlockManager
from .decoder import Decoder
from .engine_config import EngineConfig
from .engine_memory import EngineMemory
from .model_runner import ModelRunner
from .scheduler import Counts, Scheduler, Step
from .sequence import Completion, SamplingParams, Sequence
from .tensor_parallel import ONE_RANK, Parallel
from .warm_up import warm_up


class Engine:
    """Generates completions. One caller at a time.

    All lasting tensors are in the regions of `EngineMemory`. While one of them is paused every call that would
    touch it raises memsaver.RegionPausedError, and changes nothing. A pause of the KV cache loses its contents: the
    next step drops the prefix cache, and computes the contents of running requests again. A `drain` before the pause
    avoids that. All work is queued on one stream, that of the caller.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        device: torch.device | str = "cpu",
        parallel: Parallel = ONE_RANK,
        memory: EngineMemory | None = None,
    ) -> None:
        """Starts with random weights; `capture` makes graphs.

        With tensor parallel every rank is an engine in a process of its own, and all are called alike.
        """
        self.model_config, self.config = model, config
        self.device = torch.device(device)
        if self.device.type == "cuda":  # where kernels are launched and events recorded
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.memory = EngineMemory(self.device) if memory is None else memory
        self.model = Decoder(model, self.memory.weights, self.memory.buffers, parallel)
        self.model.load_weights(random_parameters(model, model.dtype, self.device, config.seed % 2**32))
        self.weight_layout: dict[str, WeightPart] = self.model.layout  # this rank's slice of each parameter
        self.counts = Counts()
        self.runner = ModelRunner(self.model, config, self.memory, self.counts)
        # After the cache itself: too many blocks fail there, with an error of the device's memory.
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self.scheduler = Scheduler(self.blocks, config.max_batch_size, self.runner.max_prefill_tokens, self.counts)
        graphs = ["cuda_graph"] if self.memory.captures_graphs else []
        self.tags = ["weights", "buffers", "kv_cache", *graphs]  # of the regions; that of the weights comes first
        self.random_state = self.runner.batch.random_state  # an engine that gets another's draws the same numbers next
        self._residence = self.memory.kv_cache.residence
        self._in_flight: tuple[Step, Readback] | None = None

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, use_graphs: bool = True) -> list[Completion]:
        """Complete prompts of token ids, in their order.

        `use_graphs` False runs every step eagerly, True replays the graphs there are. Raises as `submit` does, with
        none of the prompts queued.
        """
        self.memory.check_active(use_graphs)
        sequences = [self._request(prompt, sampling) for prompt in prompts]
        self.scheduler.waiting += sequences
        for sequence in sequences:
            while sequence.finish_reason is None:
                self.step(use_graphs)
        self.settle()
        return [sequence.completion() for sequence in sequences]

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Queue one request; `step`, or a `drain`, works on it until its `finish_reason` is set.

        Raises ValueError for a prompt that has other tokens than the model, or is too long, and for a request that
        could not finish alone in the whole KV cache.
        """
        sequence = self._request(prompt, sampling)
        self.scheduler.waiting.append(sequence)
        return sequence

    @torch.no_grad()
    def step(self, use_graphs: bool = True) -> list[Sequence]:
        """Launch the next step, then take the samples of the previous step while this one runs.

        A step is a prefill of new requests, or one token for each that runs. Returns the requests that have one token
        more. An engine whose step failed cannot be used further.
        """
        self.memory.check_active(use_graphs)
        advanced = self._follow_kv_cache()
        step = self.scheduler.schedule()
        readback = self.runner.launch(step, use_graphs)
        advanced += self.settle()
        self._in_flight = None if readback is None else (step, readback)
        return advanced

    def settle(self) -> list[Sequence]:
        """Wait for the step in flight and take its samples. Returns the requests that have one token more."""
        if self._in_flight is None:
            return []
        step, readback = self._in_flight
        tokens, logprobs = readback.wait(len(step.sampling))  # a wait that is interrupted can be repeated
        self._in_flight = None
        return self.scheduler.update(step, tokens, logprobs)

    def drain(self) -> list[Sequence]:
        """Before a pause: put running requests back, to be computed anew later. Returns as `settle` does."""
        advanced = self.settle()
        self.scheduler.put_back_all()
        return advanced

    def drop_prefix_cache(self) -> None:
        """Drop the contents of the KV cache. Raises RuntimeError while requests are running."""
        self.blocks.drop_prefix_cache()

    def share_weights(self) -> bytes:
        """Offer the weights to a process that writes new ones; drop the prefix cache. No requests may be running.

        The result is a pickled dictionary: Hugging Face name -> this rank's part of the parameter, which
        `weight_layout` describes. It is valid until the weights are paused.
        """
        self.memory.weights.check_active("be shared")
        self.settle()
        self.drop_prefix_cache()
        return bytes(ForkingPickler.dumps(self.model.parameters))

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new parameters, by Hugging Face name; drop the prefix cache. No requests may be running."""
        self.drop_prefix_cache()
        for name, weight in weights.items():
            self.model.parameters[name].copy_(weight)

    def checksums(self) -> dict[str, int]:
        """Of this rank's part of each parameter, by Hugging Face name."""
        self.memory.weights.check_active("be read")
        return checksums(self.model.parameters)

    @torch.no_grad()
    def capture(self) -> None:
        """Capture graphs for the configured sizes, and run every kind of step that serving can reach.

        Afterwards nothing compiles in the middle of serving (see `warm_up`). Nothing to do on the CPU, or a second
        time. If it fails the error is raised, there are no graphs, and the engine goes on eagerly.
        """
        self.memory.check_active(graphs=False)
        runner = self.runner
        if not self.memory.captures_graphs or runner.decode_graphs:
            return
        self.settle()
        random_state = self.random_state.clone()
        try:
            runner.capture(self.memory)
            warm_up(runner)
        except BaseException:
            runner.decode_graphs.clear()
            runner.prefill_graphs.pieces.clear()
            raise
        self.random_state.copy_(random_state)
        self.counts.decode_replays = self.counts.prefill_replays = 0  # none was of a request

    def addresses(self) -> dict[str, int]:
        """The addresses of all tensors that graphs use: weights, KV cache, constants, static inputs and outputs."""
        runner, (cos, sin) = self.runner, self.model.tables
        held = {**self.model.weights, **runner.prefill_graphs.inputs, **vars(runner.batch)}
        held |= {"kv_cache": runner.kv_cache, "cos": cos, "sin": sin}
        return {name: each.data_ptr() for name, each in held.items() if isinstance(each, Tensor)}

    def _request(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        limit, vocabulary = self.model_config.max_position, self.model_config.vocab_size
        if unknown := [token for token in prompt if not 0 <= token < vocabulary]:
            raise ValueError(f"prompt has {unknown[0]!r}; expected tokens from 0 to {vocabulary - 1}")
        if not 1 <= len(prompt) < limit:
            raise ValueError(f"prompt has {len(prompt)} tokens; expected 1 to {limit - 1}")
        sequence = Sequence(list(prompt), sampling, min(len(prompt) + sampling.max_new_tokens, limit))
        needed = self.blocks.blocks_for(sequence.max_tokens - 1)  # K and V of the very last token are never written
        if needed > self.blocks.num_usable:
            found = f"a request of up to {sequence.max_tokens} tokens needs {needed} KV blocks"
            raise ValueError(f"{found}; expected at most the cache's {self.blocks.num_usable}")
        return sequence

    def _follow_kv_cache(self) -> list[Sequence]:
        """If it was paused its contents are gone. Returns the requests that have one token more."""
        residence = self.memory.kv_cache.residence
        if residence == self._residence:
            return []
        advanced = self.drain()
        self.drop_prefix_cache()
        self._residence = residence
        return advanced
