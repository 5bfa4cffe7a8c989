"""After a capture serving launches no Triton kernel that would have to be compiled, by Triton's own keys.

Nothing is launched here: the engine runs on the CPU, and each kernel is replaced by a record of the key under which
Triton would look up the compiled kernel for a Hopper GPU. No test reads elements that kernels leave undefined.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.colocate.engine import Engine, SamplingParams, ops
from tests.examples.engine_support import QWEN, HostGraphs, MakeEngine

KERNELS = {
    "_add_rms_norm", "_rotate", "_swiglu", "_write_kv", "_attend_part", "_join_parts", "_attend_chunk",
    "_sample_part", "_sample_joined",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "max_batch_size": 12,
    "num_blocks": 96,
    "graph_batch_sizes": (1, 2, 4),
    "prefill_graph_sizes": (8, 32),
}
Keys = set[tuple[str, str]]
# Lengths of prompts: some end with a prefill size, some take several chunks, and eight of them fill a step.
LENGTHS = [1, 2, 7, 8, 9, 31, 32, 33, 64, 80, 1, 1, 3, 3, 3, 3, 3, 3, 17]


class Recorder:
    """In place of a kernel: keeps the keys of its launches."""

    def __init__(self, kernel: Any, keys: Keys) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.name: str = kernel.fn.__name__
        self.keys = keys
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            bound, specialization, more = self._bind(*args, **options)
            self.keys.add((self.name, f"{specialization} {sorted(more.items())}"))
            if "tokens_ptr" in bound:
                bound["tokens_ptr"].zero_()  # they are looked up in the embedding

        return launch


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The keys of all launches from now on."""
    jit = pytest.importorskip("triton.runtime.jit", reason="triton is not installed")
    found: Keys = set()
    for name in ("fused", "paged_decode", "paged_prefill", "sampling"):
        module = importlib.import_module(f"examples.colocate.engine.kernels.{name}")
        for kernel, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                monkeypatch.setattr(module, kernel, Recorder(value, found))
    monkeypatch.setattr(ops, "in_triton", lambda tensor: True)
    return found


def serve(engine: Engine, use_graphs: bool) -> None:
    """Prompts of which some begin alike, sampled greedily or not."""
    for temperature in (0.0, 1.0):
        prompts = [[(at + length) % 5 for at in range(length)] for length in LENGTHS]
        engine.generate(prompts, SamplingParams(temperature, 6), use_graphs)
        engine.generate(prompts[-1:], SamplingParams(temperature, 2), use_graphs)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefix_cache": False, "prefill_graph_sizes": ()},
        {"graph_batch_sizes": (), "prefill_graph_sizes": (), "max_prefill_tokens": 40},
        {"graph_batch_sizes": None},
    ],
    ids=["graphs", "no prefill graphs", "eager", "all sizes"],
)
def test_serving_reaches_no_kernel_that_a_capture_did_not(
    make_engine: MakeEngine, keys: Keys, config: dict[str, Any]
) -> None:
    model = dataclasses.replace(QWEN, dtype=torch.bfloat16)  # whole prompts go through torch's attention
    engine = make_engine(model, memory=HostGraphs(), **{**CONFIG, **config})
    engine.capture()
    warm = set(keys)
    for use_graphs in (True, False):
        engine.drop_prefix_cache()
        serve(engine, use_graphs)
    assert keys == warm
    assert {name for name, _ in warm} == KERNELS


def test_a_capture_leaves_requests_and_random_numbers_as_they_are(make_engine: MakeEngine) -> None:
    def completions(capture: bool) -> list[list[int]]:
        engine = make_engine(memory=HostGraphs(), **CONFIG)
        running = [engine.submit([3, 1, 4, 1, 5], SamplingParams(1.0, 8)) for _ in range(3)]
        for _ in range(3):
            engine.step(use_graphs=False)
        engine.settle()
        if capture:
            engine.capture()
            assert engine.counts.decode_replays == engine.counts.prefill_replays == 0
        while any(sequence.finish_reason is None for sequence in running):
            engine.step(use_graphs=False)
        return [sequence.tokens for sequence in running]

    assert completions(capture=True) == completions(capture=False)
