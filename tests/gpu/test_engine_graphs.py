"""The engine's graphs on a GPU: their nodes, the pieces of a prefill, torch.compile, and their memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from examples.colocate.engine import Engine, SamplingParams
from examples.colocate.model import ModelConfig
from tests.examples.engine_support import MakeEngine, engine_maker, fill_with_random_context, graph_differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

MODEL = ModelConfig(1000, 256, 3, 8, 2, 64, 512, 2048, dtype=torch.bfloat16)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    sizes: dict[str, Any] = {"max_batch_size": 6, "block_size": 16, "num_blocks": 1024}
    with engine_maker("cuda", deviation=0.02, **sizes, prefill_graph_sizes=()) as make:
        yield lambda model=MODEL, **config: make(model, **config)


def prompts(lengths: list[int]) -> list[list[int]]:
    return [[(7 * length + 3 * at) % MODEL.vocab_size for at in range(length)] for length in lengths]


def tokens_of(engine: Engine, lengths: list[int], use_graphs: bool = True) -> list[list[int]]:
    engine.drop_prefix_cache()
    return [each.tokens for each in engine.generate(prompts(lengths), GREEDY, use_graphs)]


def test_a_graph_is_the_same_at_every_context_length(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Node by node: kernels in their order, grids and blocks, and the addresses of copies."""
    size = 5
    engine = make_engine(graph_batch_sizes=(size,))
    engine.capture()
    pool = torch.cuda.MemPool()
    dumps: list[list[str]] = []
    for context in (1, 1, 300, 2047):  # the first makes the pool's memory, which the others find
        fill_with_random_context(engine, [context] * size)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.enable_debug_mode()
        with torch.no_grad(), torch.cuda.graph(graph, pool=pool.id):  # type: ignore[arg-type]
            engine.runner.decode_step(size)
        path = tmp_path / f"{len(dumps)}.dot"
        graph.debug_dump(str(path))
        dumps.append(nodes(path.read_text()))
        del graph
        torch.cuda.synchronize()
    assert len(dumps[1]) > 10 * MODEL.num_layers
    assert dumps[1] == dumps[2] == dumps[3]


def nodes(dot: str) -> list[str]:
    """The nodes of a dump, without numbers that are each graph's own."""
    found = re.findall(r'"graph_\d+_node_\d+"\[(.*?)\];', dot, flags=re.DOTALL)
    # Handles of nodes and functions stand first in a row of values; addresses of memory stay as they are.
    handles = r"(handle\} \| \{(?:\d+ \(topoId: \d+\) \| )?)0x[0-9a-fA-F]+(?: \| 0x[0-9a-fA-F]+)?"
    return [re.sub(handles, r"\1", each) for each in found]


def test_graphs_equal_eager_for_every_size_also_after_pauses(make_engine: MakeEngine) -> None:
    engine = make_engine(prefill_graph_sizes=(256, 512), max_prefill_tokens=512)
    engine.capture()
    for _ in range(2):
        found = graph_differences(engine)
        assert [found.pop(f"decode {size}") for size in range(1, 7)] == [0.0] * 6
        prefills = ["prefill 256 of 256", "prefill 249 of 256", "prefill 512 of 512", "prefill 505 of 512"]
        assert set(found) == set(prefills)
        assert all(difference <= 0.1 for difference in found.values())  # not NaN; padding may change a product's order
        engine.drain()
        memsaver.pause()
        memsaver.resume()


def test_prefill_in_pieces_gives_the_same_tokens(make_engine: MakeEngine) -> None:
    model = dataclasses.replace(MODEL, dtype=torch.float32)  # rounding does not choose tokens
    engine = make_engine(model, prefill_graph_sizes=(128, 512), max_prefill_tokens=512)
    lengths = [100, 700, 3, 1300]  # longer ones in segments
    expected = tokens_of(engine, lengths, use_graphs=False)
    engine.capture()
    assert tokens_of(engine, lengths) == expected
    assert engine.counts.prefill_replays > 3
    engine.drain()
    memsaver.pause()
    memsaver.resume()
    assert tokens_of(engine, lengths) == expected


def test_padded_prefills_give_the_same_tokens_in_every_way(make_engine: MakeEngine) -> None:
    model = dataclasses.replace(MODEL, dtype=torch.float32, qk_norm=False, qkv_bias=True)
    lengths = [100, 7, 300]
    expected = tokens_of(make_engine(model), lengths, use_graphs=False)
    engine = make_engine(model, prefill_graph_sizes=None)
    assert engine.runner.prefill_graphs.sizes == (512, 1024, 2048, 4096)
    assert tokens_of(engine, lengths, use_graphs=False) == expected  # before there are graphs
    engine.capture()
    for use_graphs in (False, True):
        assert tokens_of(engine, lengths, use_graphs) == expected
    assert engine.counts.prefill_replays > 0


# Of shapes that no other test has: a kernel that another one compiled would not be compiled again.
ODD = {
    hidden: ModelConfig(1003 + hidden, hidden, 2, 10, 5, head_dim, 2 * hidden, 2048, dtype=torch.bfloat16)
    for hidden, head_dim in ((320, 32), (448, 40))
}


@pytest.mark.parametrize(("hidden", "prefill_sizes"), [(320, None), (448, ())])
def test_nothing_compiles_after_a_capture(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, hidden: int, prefill_sizes: tuple[int, ...] | None
) -> None:
    """By Triton's own hook, which is also called for kernels from its cache on disk."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: compiled.append(given["fn"].name))
    sizes: dict[str, Any] = {"graph_batch_sizes": (1, 2, 4, 8), "prefill_graph_sizes": prefill_sizes}
    engine = make_engine(ODD[hidden], max_batch_size=20, **sizes)
    engine.capture()
    assert {"_write_kv", "_sample_part", "_attend_part", "_attend_chunk"} <= set(compiled)
    compiled.clear()
    lengths = [1, 3, 15, 16, 17, 95, 97, 383, 500, 1024, 1800] + [5] * 12
    for use_graphs in (True, False):
        for temperature in (0.0, 1.0):
            engine.generate(prompts(lengths), SamplingParams(temperature, 24), use_graphs)
        engine.drop_prefix_cache()
    assert compiled == []
