"""After a capture serving launches no Triton kernel that would have to be compiled, by Triton's own keys.

Nothing is launched here: the engine runs on the CPU, and each kernel is replaced by a record of the key under which
Triton would look up the compiled kernel for a Hopper GPU. No test reads elements that kernels leave undefined.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from examples.colocate.engine import Engine, EngineConfig, SamplingParams, ops
from tests.examples.engine_support import QWEN, engines, one_thread  # noqa: F401
from tests.examples.test_engine import GPT2, with_host_graphs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

MODULES = ("fused_kernels", "paged_kernel", "prefill_kernel", "sampling_kernel")
KERNELS = {
    "_add_rms_norm", "_rotate", "_swiglu", "_write_kv", "_attend_part", "_join_parts", "_attend_chunk",
    "_sample_part", "_sample_joined",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "max_batch_size": 12,
    "block_size": 4,
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
    from triton.runtime.jit import JITFunction

    found: Keys = set()
    for name in MODULES:
        module = importlib.import_module(f"examples.colocate.engine.{name}")
        for kernel, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, kernel, Recorder(value, found))
    monkeypatch.setattr(ops, "in_triton", lambda tensor: True)
    return found


def serve(engine: Engine, lengths: list[int], use_graphs: bool | None) -> None:
    """Prompts of which some begin alike, sampled greedily or not."""
    for temperature in (0.0, 1.0):
        prompts = [[(at + length) % 5 for at in range(length)] for length in lengths]
        engine.generate(prompts, SamplingParams(temperature, 6), use_graphs)
        engine.generate(prompts[-1:], SamplingParams(temperature, 2), use_graphs)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (QWEN, {}),
        (QWEN, {"prefix_cache": False, "prefill_graph_sizes": ()}),
        (QWEN, {"use_graphs": False, "max_prefill_tokens": 40}),
        (QWEN, {"graph_batch_sizes": None}),
        (GPT2, {}),
    ],
    ids=["graphs", "no prefill graphs", "eager", "all sizes", "gpt2"],
)
def test_serving_reaches_no_kernel_that_a_capture_did_not(
    engines: list[Engine],  # noqa: F811
    keys: Keys,
    model: Any,
    more: dict[str, Any],
) -> None:
    engine = with_host_graphs(Engine(model, EngineConfig(**{**CONFIG, **more}), "cpu"))
    engines.append(engine)
    engine.capture()
    warm = set(keys)
    for use_graphs in (None, False):
        engine.drop_prefix_cache()
        serve(engine, LENGTHS, use_graphs)
    assert keys == warm
    assert model is not QWEN or {name for name, _ in warm} == KERNELS - (set() if splits(engine) else {"_join_parts"})


def splits(engine: Engine) -> bool:
    from examples.colocate.engine.paged_kernel import num_splits

    return num_splits(1, engine.model.num_kv_heads) > 1


def test_a_capture_leaves_requests_and_random_numbers_as_they_are(engines: list[Engine]) -> None:  # noqa: F811
    def completions(capture: bool) -> list[list[int]]:
        engine = with_host_graphs(Engine(QWEN, EngineConfig(**CONFIG), "cpu"))
        engines.append(engine)
        running = [engine.submit([3, 1, 4, 1, 5], SamplingParams(1.0, 8)) for _ in range(3)]
        for _ in range(3):
            engine.step(use_graphs=False)
        engine.settle()
        if capture:
            engine.capture()
            assert engine.replays == engine.prefill_runner.replays == 0
        while any(sequence.finish_reason is None for sequence in running):
            engine.step(use_graphs=False)
        return [sequence.tokens for sequence in running]

    assert completions(capture=True) == completions(capture=False)
