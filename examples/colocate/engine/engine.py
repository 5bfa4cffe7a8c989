"""The engine: continuous batching over a paged KV cache, in memory that can be paused between two steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers the reducers of tensors
from torch import Tensor

from .attention import Caches, DecodeAttention
from .block_manager import BlockManager
from .checkpoint import build, check_supported
from .config import EngineConfig, check_type
from .decode_batch import DecodeBatch, Readback
from .graph_pool import GraphPool
from .graph_runner import GraphRunner
from .memory import EngineMemory, borrowed
from .model import Config
from .parallel import ONE_RANK, Parallel
from .prefill_batch import Padding, PrefillBatch
from .prefill_runner import PrefillRunner
from .sampler import Sampler
from .scheduler import Scheduler, Step
from .sequence import Completion, SamplingParams, Sequence
from .warm_up import warm_up


class Engine:
    """Generates completions. One caller at a time.

    All lasting tensors are in the regions of `EngineMemory`. While one of them is paused every call that would
    touch it raises memsaver.RegionPausedError, and changes nothing. A pause of the KV cache loses its contents: the
    next step drops the prefix cache, and computes the contents of running requests again. A `drain` before the pause
    avoids that. All work is queued on one stream, that of the caller.
    """

    def __init__(
        self, model: Config, config: EngineConfig, device: torch.device | str = "cpu", parallel: Parallel = ONE_RANK
    ) -> None:
        """Starts with random weights; `load_weights` loads others, and `capture` makes graphs.

        With tensor parallel every rank is an engine in a process of its own, and all are called alike. If a call
        fails on one of them the others wait for it in a collective, until the process group's timeout.
        """
        check_supported(model)
        check_type("config", config, EngineConfig)
        self.model_config, self.config, self.parallel = model, config, parallel
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
        if self.max_model_len > model.max_position:
            raise ValueError(f"max_model_len is {self.max_model_len}; expected at most {model.max_position}")
        self.memory = EngineMemory(self.device, config.use_regions)
        self.model = build(model, self.memory.weights, self.memory.buffers, parallel)
        self.model.initialize(config.seed)
        cache_shape = (2, config.num_blocks, config.block_size, self.model.num_kv_heads, model.head_dim)
        self.kv_cache: Tensor = self.memory.kv_cache.empty((model.num_layers, *cache_shape), model.dtype)
        # After the cache itself: too many blocks fail there, with an error of the device's memory.
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.prefix_cache)
        prefill_sizes = config.prefill_sizes(on_cuda=self.device.type == "cuda")
        self.scheduler = Scheduler(self.blocks, config.max_batch_size, config.max_prefill_tokens, prefill_sizes)
        # Taken apart once: to index a tensor costs as much as to launch a kernel. Each with a storage of its own: of
        # several that a kernel writes to in one storage, torch.compile copies all but the first.
        self.kv_caches: Caches = [(borrowed(layer[0]), borrowed(layer[1])) for layer in self.kv_cache]
        max_blocks = self.blocks.blocks_for(self.max_model_len)
        self.batch = DecodeBatch(config.max_batch_size, max_blocks, config.block_size, self.memory.buffers, self.device)
        self.sampler = Sampler(self.device, config.seed, self.memory.buffers)
        self.graphs = GraphPool(self.memory, self.device, config.freeze_gc)
        self.runner = GraphRunner(self.decode_step, config.batch_sizes(), self.graphs, config.eager_batch_sizes())
        self.prefill_runner = PrefillRunner(self.model, prefill_sizes, self.memory.buffers, self.graphs)
        self.compiled_logits: Callable[[int], Tensor] = self.decode_logits
        if config.compile_batch_sizes:  # anew for each batch size that it is called with
            self.compiled_logits = torch.compile(
                self.decode_logits, backend=config.compile_backend, fullgraph=True, dynamic=False
            )
        self._residence = self.memory.kv_cache.residence
        self.tokens_generated = 0
        self._in_flight: tuple[Step, Readback] | None = None
        self._warm = False
        self._closed = False

    @property
    def replays(self) -> int:
        """Decode graphs replayed so far."""
        self._check_open()
        return self.runner.replays

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes that have a graph, ascending; none on the CPU."""
        self._check_open()
        return tuple(sorted(self.runner.graphs))

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, use_graphs: bool | None = None
    ) -> list[Completion]:
        """Complete prompts of token ids, in their order.

        `use_graphs` False runs every step eagerly, True replays the graphs there are; None follows the config. Raises
        as `submit` does, with none of the prompts queued.
        """
        self._check_ready(self._want_graphs(use_graphs))
        sequences: list[Sequence] = []
        try:
            for prompt in _listed("prompts", prompts, "prompts"):
                sequences.append(self.submit(prompt, sampling))
            for sequence in sequences:
                while sequence.finish_reason is None:
                    self.step(use_graphs)
            self.settle()
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        return [sequence.completion() for sequence in sequences]

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Queue one request; `step`, or a `drain`, works on it until its `finish_reason` is set.

        "failed" if a step did, whether it was this request's or not. Raises ValueError or TypeError for a prompt that
        is no list of the model's tokens, or too long, and for `sampling` of another type.
        """
        self._check_open()
        check_type("sampling", sampling, SamplingParams)
        prompt = self._checked(prompt)
        max_tokens = min(len(prompt) + sampling.max_new_tokens, self.max_model_len)
        sequence = Sequence(prompt, sampling, max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Finish a request with the tokens it has; nothing happens if it is finished."""
        self.scheduler.cancel(sequence)

    @torch.no_grad()
    def step(self, use_graphs: bool | None = None, admit: bool = True) -> list[Sequence]:
        """Launch the next step, then take the samples of the previous step while this one runs.

        A step is a prefill of new requests, or one token for each that runs. Without `admit` waiting ones stay so.
        Returns the requests that have one token more. If it fails, all requests are dropped, and the engine can go on
        with new ones.
        """
        with_graphs = self._want_graphs(use_graphs)
        self._check_ready(with_graphs)
        with self.on_device():
            try:
                advanced = self._follow_kv_cache()
                step = self.scheduler.schedule(admit)
                launched = self._launch(step, with_graphs)
                advanced += self.settle()
                self._in_flight = launched
            except BaseException:
                self._in_flight = None
                self.scheduler.abort()
                with suppress(RuntimeError):  # of a device that is lost: the reason is on its way
                    self._synchronize()  # copies from buffers that are filled anew may still be queued
                raise
        return advanced

    def settle(self) -> list[Sequence]:
        """Wait for the step in flight and take its samples. Returns the requests that have one token more."""
        if self._in_flight is None:
            return []
        step, readback = self._in_flight
        tokens, logprobs = readback.wait(len(step.sampling))  # a wait that is interrupted can be repeated
        self._in_flight = None
        advanced = self.scheduler.update(step, tokens, logprobs)
        self.tokens_generated += len(advanced)
        return advanced

    def drain(self, finish: bool = True) -> None:
        """Empty the KV cache of running requests, admit nothing, and wait for the device: before a pause.

        They run to their end, unless one is preempted; with `finish` False they are put back, and computed anew later.
        Requests that wait hold no blocks; the next `step` goes on with them.
        """
        self._check_open()
        self.settle()
        if not finish:
            self.scheduler.preempt_all()
        while self.scheduler.active:
            self.step(admit=False)
        self.settle()
        self._synchronize()

    def drop_prefix_cache(self) -> None:
        """Drop the contents of the KV cache. Raises RuntimeError while requests are running."""
        self._check_open()
        self.blocks.drop_prefix_cache()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Overwrite the weights by Hugging Face name (see `Model.load_weights`), and drop the prefix cache.

        With `partial` the last call, without it, checks that all names came. Needs the weights' region alone, and
        no running requests.
        """
        self._check_open()
        self.memory.weights.check_active("take weights")
        self.settle()
        self.drop_prefix_cache()
        self.model.load_weights(named_tensors, partial)

    def share_weights(self) -> bytes:
        """Offer the weights, by Hugging Face name, to a process that writes new ones; drop the prefix cache.

        The result is a pickled dictionary of tensors. It is valid until the weights are paused. The other process must
        drop the tensors before the next step. Needs the weights' region alone, and no running requests.
        """
        self._check_whole()
        self.memory.weights.check_active("be shared")
        self.settle()
        self.drop_prefix_cache()
        return bytes(ForkingPickler.dumps(self.model.parameters))

    def differing_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of those that are not, bit for bit, the weights that the engine has."""
        self._check_whole()
        parameters = self.model.parameters
        return [name for name, tensor in named_tensors if not _same_bits(parameters.get(name), tensor)]

    @torch.no_grad()
    def capture(self) -> None:
        """Capture graphs for the configured sizes, and run every kind of step that serving can reach.

        Afterwards nothing compiles in the middle of serving (see `warm_up`), and the random numbers of sampling are
        those that would have come next. With `use_graphs` off steps run eagerly. Nothing to do on the CPU, or a second
        time. The cost of each graph is in `graphs.captures`. If it fails the error is raised, there are no graphs, and
        the engine goes on eagerly.
        """
        self._check_ready(graphs=False)
        if not self.graphs.available or self._warm:
            return
        self.settle()
        self.batch.fill([], self.config.max_batch_size)
        with self.on_device():
            sampler_state, replays = self.sampler.state.clone(), (self.runner.replays, self.prefill_runner.replays)
            try:
                if self.config.use_graphs:
                    with self.graphs.open():
                        self.prefill_runner.capture()  # the largest temporaries come first
                        self.runner.capture()
                warm_up(self, self.config.use_graphs)
                self._synchronize()
            except BaseException:
                self._release_graphs()
                raise
            self.sampler.state.copy_(sampler_state)
        self.runner.replays, self.prefill_runner.replays = replays
        self._warm = True

    def prefill(self, step: Step, use_graphs: bool) -> None:
        """Launch a prefill step: K and V of its tokens, and a token for each sequence that samples."""
        size = self.prefill_runner.padded_size(step.num_tokens)
        padding = Padding(self.runner.padded_size(len(step.sampling)), self.batch.padding_row)
        batch = PrefillBatch.build(
            step, size, self.kv_caches, padding if step.sampling else None, self.config.use_kernel
        )
        hidden_TC = self.prefill_runner.run(batch.tokens_T, batch.positions_T, batch.attention, use_graphs)
        if step.sampling:
            logits_BV = self.model.logits(hidden_TC.index_select(0, batch.last_B))
            self.batch.store(batch.rows_B, *self.sampler(logits_BV, batch.temperatures_B))

    def decode_step(self, size: int) -> None:
        """The work of a graph of this size: from the static inputs to the static outputs of `batch`."""
        batch = self.batch
        forward = self.compiled_logits if size in self.config.compile_batch_sizes else self.decode_logits
        batch.store(batch.rows(size), *self.sampler(forward(size), batch.temperatures(size)))

    def decode_logits(self, size: int) -> Tensor:
        """The part of `decode_step` that may go through torch.compile: logits [size, V]."""
        batch = self.batch
        attention = DecodeAttention(
            self.kv_caches, batch.slots(size), batch.block_table(size), batch.lengths(size), self.config.use_kernel
        )
        return self.model.logits(self.model.forward(batch.tokens(size), batch.positions(size), attention))

    def addresses(self) -> dict[str, int]:
        """The addresses of all tensors that graphs use: weights, KV cache, constants, static inputs and outputs."""
        self._check_open()
        found = {f"weights/{name}": weight.data_ptr() for name, weight in self.model.weights.items()}
        found["kv_cache"] = self.kv_cache.data_ptr()
        buffers = {name: constant.data_ptr() for name, constant in self.model.constants.items()}
        buffers |= {"sampler": self.sampler.state.data_ptr()}
        buffers |= self.batch.addresses() | self.prefill_runner.addresses()
        return found | {f"buffers/{name}": address for name, address in buffers.items()}

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the engine's GPU the current one, where kernels are launched and events recorded."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """Release graphs and tensors. The engine cannot be used afterwards. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._in_flight = None
        self.scheduler.abort()
        self._release_graphs()
        # The runners hold bound methods of this engine; without them no collector is needed to free the tensors.
        del self.runner, self.prefill_runner, self.compiled_logits
        del self.model, self.kv_cache, self.kv_caches, self.batch, self.sampler

    def _follow_kv_cache(self) -> list[Sequence]:
        """If it was paused its contents are gone. Returns the requests that have one token more."""
        residence = self.memory.kv_cache.residence
        if residence == self._residence:
            return []
        advanced = self.settle()
        self.scheduler.preempt_all()
        self.drop_prefix_cache()
        self._residence = residence
        return advanced

    def _launch(self, step: Step, use_graphs: bool) -> tuple[Step, Readback] | None:
        """None if no token comes of it."""
        if not step.chunks:
            return None
        (self.prefill if step.prefill else self._decode)(step, use_graphs)
        return (step, self.batch.read_back()) if step.sampling else None

    def _decode(self, step: Step, use_graphs: bool) -> None:
        size = self.runner.padded_size(len(step.sampling))
        self.batch.fill(step.sampling, size)
        self.runner.run(size, use_graphs)

    def _release_graphs(self) -> None:
        self.runner.release()
        self.prefill_runner.release()
        self.graphs.captures.clear()
        self._warm = False

    def _want_graphs(self, use_graphs: bool | None) -> bool:
        return self.config.use_graphs if use_graphs is None else use_graphs

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _check_ready(self, graphs: bool) -> None:
        self._check_open()
        self.memory.check_active(graphs)

    def _check_whole(self) -> None:
        self._check_open()
        if self.parallel.size > 1:
            raise ValueError(f"tensor parallel size is {self.parallel.size}; expected 1, so that weights are whole")

    def _checked(self, prompt: list[int]) -> list[int]:
        tokens = _listed("prompt", prompt, "token ids")
        for position, token in enumerate(tokens):
            try:
                tokens[position] = operator.index(token)
            except TypeError:
                raise TypeError(f"prompt has {token!r} at {position}; expected integers") from None
            if not 0 <= tokens[position] < self.model_config.vocab_size:
                raise ValueError(f"prompt has token {token}; expected 0 to {self.model_config.vocab_size - 1}")
        if not 1 <= len(tokens) < self.max_model_len:
            raise ValueError(f"prompt has {len(tokens)} tokens; expected 1 to {self.max_model_len - 1}")
        return tokens


def _listed(name: str, value: Iterable[Any], items: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:  # by trying, since a tensor of no dimensions has an iterator, which raises
        raise TypeError(f"{name} is {value!r}; expected a list of {items}") from None


def _same_bits(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.dtype != other.dtype:
        return False
    return torch.equal(one.view(torch.uint8), other.to(one.device).view(torch.uint8))
