"""The engine: continuous batching over a paged KV cache, in memory that can be paused between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import memsaver

from ..model.config import ModelConfig
from .attention import DecodeAttention, PrefillAttention, Span
from .block_manager import BlockManager
from .config import EngineConfig
from .decode_batch import DecodeBatch
from .graph_runner import GraphRunner
from .memory import EngineMemory
from .model import Decoder
from .sampler import Sampler
from .scheduler import Scheduler
from .sequence import Completion, SamplingParams, Sequence


class Engine:
    """Generates completions. One caller at a time.

    Everything that lasts lives in the regions of `EngineMemory`. While one of them is paused every call that would
    touch it raises memsaver.RegionPausedError, and changes nothing. A resume of the KV cache brings undefined
    contents: `drain` before the pause, `drop_prefix_cache` before going on.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, device: torch.device | str = "cpu") -> None:
        """Random weights to begin with; `load_weights` brings real ones. Graphs come with `capture`."""
        self.model_config, self.config = model, config
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
        if self.max_model_len > model.max_position:
            raise ValueError(f"max_model_len is {self.max_model_len}; expected at most {model.max_position}")
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_cache)
        self.scheduler = Scheduler(self.blocks, config.max_batch_size, config.max_prefill_tokens)
        self.memory = EngineMemory(self.device)
        self.model = Decoder(model, self.memory.weights, self.memory.buffers)
        self.model.initialize(config.seed)
        cache_shape = (2, config.num_blocks, config.block_size, model.num_kv_heads, model.head_dim)
        self.kv_cache: Tensor = self.memory.kv_cache.empty((model.num_layers, *cache_shape), model.dtype)
        max_blocks = self.blocks.blocks_for(self.max_model_len)
        self.batch = DecodeBatch(config.max_batch_size, max_blocks, self.memory.buffers, self.device)
        self.sampler = Sampler(self.device, config.seed)
        self.runner = GraphRunner(self._decode_step, config.batch_sizes(), self.sampler, self.memory, self.device)
        self.tokens_generated = 0
        self._closed = False

    @property
    def replays(self) -> int:
        """Graphs replayed so far."""
        return self.runner.replays

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, ascending; none on the CPU."""
        return tuple(sorted(self.runner.graphs))

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, use_graphs: bool | None = None
    ) -> list[Completion]:
        """Complete prompts of token ids, in their order.

        `use_graphs` False runs every step eagerly, True replays the graphs there are; None follows the config.
        """
        self._check_ready(self._want_graphs(use_graphs))
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequences.append(self.submit(prompt, sampling))
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step(use_graphs)
        except BaseException:
            for sequence in sequences:
                self.scheduler.cancel(sequence)
            raise
        return [sequence.completion() for sequence in sequences]

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Queue one request; `step` works on it until its `finish_reason` is set."""
        self._check_prompt(prompt)
        max_tokens = min(len(prompt) + sampling.max_new_tokens, self.max_model_len)
        sequence = Sequence(list(prompt), sampling, max_tokens)
        self.scheduler.add(sequence)
        return sequence

    @torch.no_grad()
    def step(self, use_graphs: bool | None = None, admit: bool = True) -> None:
        """One prefill of new requests, or one token for each that runs. Without `admit` waiting ones stay so.

        If the step fails, all requests are dropped, and the engine can go on with new ones.
        """
        with_graphs = self._want_graphs(use_graphs)
        self._check_ready(with_graphs)
        try:
            step = self.scheduler.schedule(admit)
            if not step.sequences:
                return
            if step.prefill:
                tokens, logprobs = self._prefill(step.sequences)
            else:
                tokens, logprobs = self._decode(step.sequences, with_graphs)
            self.scheduler.update(step.sequences, tokens, logprobs)
        except BaseException:
            self.scheduler.abort()
            raise
        self.tokens_generated += len(tokens)

    def drain(self) -> None:
        """Finish what is running, admit nothing, and wait for the device: before a pause.

        Requests that wait, or are preempted meanwhile, hold no blocks; the next `step` goes on with them.
        """
        while self.scheduler.running:
            self.step(admit=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def drop_prefix_cache(self) -> None:
        """Forget what the KV cache holds; a RuntimeError while requests are running."""
        self.blocks.drop_prefix_cache()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Overwrite the weights by Hugging Face name (see `Decoder.load_weights`), and forget what old ones cached.

        With `partial` the last call, without it, checks that all names came. Needs the weights' region alone, and
        no running requests.
        """
        self.memory.weights.check_active("take weights")
        self.drop_prefix_cache()
        self.model.load_weights(named_tensors, partial)

    def share_weights(self) -> memsaver.Token:
        """Offer the weights, by Hugging Face name, to a process that writes new ones; forget what old ones cached.

        The token is good until the weights are paused. Whoever attaches has to be done before the next step. Needs the
        weights' region alone, in a shared pool, and no running requests.
        """
        self.memory.weights.check_active("be shared")
        self.drop_prefix_cache()
        return memsaver.share(self.model.parameters)

    def differing_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of those that are not, bit for bit, the weights that the engine has."""
        return [name for name, tensor in named_tensors if not _same_bits(self.model.parameters[name], tensor)]

    @torch.no_grad()
    def capture(self) -> None:
        """Capture a decode graph for each batch size; nothing to do on the CPU, or with `use_graphs` off.

        If a capture fails its error is raised, and the engine goes on eagerly.
        """
        self._check_ready(graphs=False)
        if self.config.use_graphs and self.device.type == "cuda":
            self.batch.fill([], self.config.max_batch_size, self.config.block_size)
            self.runner.capture()

    def addresses(self) -> dict[str, int]:
        """Where every tensor is that graphs rely on: weights, KV cache, constants, static inputs and outputs."""
        found = {f"weights/{name}": weight.data_ptr() for name, weight in self.model.weights.items()}
        found["kv_cache"] = self.kv_cache.data_ptr()
        found["buffers/cos"] = self.model.cos_PD.data_ptr()
        found["buffers/sin"] = self.model.sin_PD.data_ptr()
        found.update({f"buffers/{name}": address for name, address in self.batch.addresses().items()})
        return found

    def close(self) -> None:
        """Give back graphs and tensors; the engine cannot be used afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.scheduler.abort()
        self.runner.release()
        # The runner holds a bound method of this engine; without it no collector is needed to free the tensors.
        del self.runner, self.model, self.kv_cache, self.batch

    def _prefill(self, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for sequence in sequences:
            cached, length = sequence.num_computed, len(sequence.tokens)
            context = self._slots(sequence, length)
            context_slots = torch.tensor(context, device=self.device) if cached else None
            spans.append(Span(len(tokens), len(tokens) + length - cached, context_slots))
            tokens += sequence.tokens[cached:]
            positions += range(cached, length)
            slots += context[cached:]
        tokens_T, positions_T, slots_T = torch.tensor([tokens, positions, slots], device=self.device)
        hidden_TC = self.model.forward(tokens_T, positions_T, PrefillAttention(self.kv_cache, slots_T, spans))
        last_B = torch.tensor([span.stop - 1 for span in spans], device=self.device)
        temperatures = [sequence.sampling.temperature for sequence in sequences]
        temperature_B = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        tokens_B, logprobs_B = self.sampler(self.model.logits(hidden_TC[last_B]), temperature_B)
        return tokens_B.tolist(), logprobs_B.tolist()

    def _decode(self, sequences: list[Sequence], use_graphs: bool) -> tuple[list[int], list[float]]:
        count = len(sequences)
        self.batch.fill(sequences, self.runner.padded_size(count), self.config.block_size)
        self.runner.run(count, use_graphs)
        return self.batch.tokens_out_B[:count].tolist(), self.batch.logprobs_out_B[:count].tolist()

    def _decode_step(self, size: int) -> None:
        """What a graph of this size records: from the static inputs to the static outputs."""
        batch = self.batch
        attention = DecodeAttention(self.kv_cache, batch.slots(size), batch.block_table(size), batch.lengths(size))
        hidden_BC = self.model.forward(batch.tokens(size), batch.positions(size), attention)
        tokens_B, logprobs_B = self.sampler(self.model.logits(hidden_BC), batch.temperatures(size))
        batch.tokens_out_B[:size].copy_(tokens_B)
        batch.logprobs_out_B[:size].copy_(logprobs_B)

    def _slots(self, sequence: Sequence, length: int) -> list[int]:
        size = self.config.block_size
        return [sequence.blocks[position // size] * size + position % size for position in range(length)]

    def _want_graphs(self, use_graphs: bool | None) -> bool:
        return self.config.use_graphs if use_graphs is None else use_graphs

    def _check_ready(self, graphs: bool) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self.memory.check_active(graphs)

    def _check_prompt(self, prompt: list[int]) -> None:
        if not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(f"prompt has {len(prompt)} tokens; expected 1 to {self.max_model_len - 1}")
        for token in prompt:
            if not 0 <= token < self.model_config.vocab_size:
                raise ValueError(f"prompt has token {token}; expected 0 to {self.model_config.vocab_size - 1}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    other = other.to(one.device)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
