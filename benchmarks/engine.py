"""The promises of the example's engine, in nine parts, each measured beside its comparison.

    python benchmarks/engine.py [--only 1 2 3 4 5 6 7 8 9] [--device cuda:0] [--small]

1  GPT-2 small, 64 requests: decode with graphs on and off, and `transformers`' eager decode
2  Qwen3-0.6B: decode with graphs on and off at batch 1, 8, 32 and 128
3  Qwen3-8B, batch 64 and 1: a decode step against its bytes over the device's bandwidth, and where the rest goes
4  the same batches by `transformers`' `generate` with the static cache, compiled
5  with memsaver's regions and without, then the same after pauses
6  prefill with piecewise graphs and without, and the graphs' verification
7  the memory that a pause of everything leaves with the process
8  the first run of 256 ragged requests after `capture`, the second and the third, and the kernels compiled meanwhile
9  a prompt of 32,768 tokens prefilled in chunks of 4,096, and in one step

Weights are random, in bf16. Decode figures are those of `Engine.step` as it serves, with the scheduler. The
compared ways take turns in one process (part 4: one process for each, on a device that is otherwise idle), after a
round that does not count; medians, of ratios over the rounds. Bandwidth is that of a plain copy on the device, bytes
read plus bytes written.

Each part, and each of its models, is a process of its own; after its table comes its JSON line, and last of all the
promises. Some eight minutes on an H200; part 4 takes some 110 GiB of its memory. ``--small`` is for trying it out; with
``--device cpu`` it does so on the host driver, where there are no graphs: figures mean nothing there.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# For part 4, whose processes compile at the same time; each would start as many workers as there are cores.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

import torch  # noqa: E402

import memsaver  # noqa: E402
from examples.colocate.engine import Engine, SamplingParams  # noqa: E402
from examples.colocate.engine.model import Config  # noqa: E402
from examples.colocate.engine.profile import Profile, profile_replays  # noqa: E402
from examples.colocate.engine.verify import VerificationError, verify  # noqa: E402
from support import transformers_baseline  # noqa: E402
from support.arguments import add_device, add_small, parse, parser_for  # noqa: E402
from support.engine_loads import (  # noqa: E402
    TIMEOUT_S,
    Load,
    allow_backups,
    compilations,
    copy_bandwidth,
    decode_rate,
    in_full,
    make_engine,
    medians,
    promise,
    promise_line,
    ratio,
    served,
    step_ms,
    take_turns,
    tokens_of,
)
from support.environment import environment, listed_bytes, nvidia_smi  # noqa: E402
from support.host import GIB, MIB  # noqa: E402
from support.processes import Process, Sample, in_process, side_by_side  # noqa: E402

GPT2 = Load("gpt2", 64, 16, 512)
QWEN = [Load("qwen3-0.6b", batch, 128, 128) for batch in (1, 8, 32, 128)]
LARGE = [Load("qwen3-8b", batch, 992, 64) for batch in (1, 64)]  # a context of 1,024 in the middle of the decode
GAINS = {1: 1.5, 8: 1.3, 32: 1.2, 128: 1.1}  # promised of graphs, by batch
OF_THE_FLOOR = {1: 0.60, 64: 0.70}
EQUAL = 0.01
LEFT = 1.0 * GIB
ROUNDS = 3
READY_S = 400.0  # for all of part 4, which compile at the same time
REPLAYS = 20
PREFILLS = (512, 1024, 2048, 4096)
UNALIGNED = 1500  # between two of them: 1024, and the rest padded to 512; nothing is promised of it

RAGGED = Load("qwen3-0.6b", 256, 1024, 512)  # requests of 16 tokens to these, drawn evenly
SHORTEST = 16
OF_THE_THIRD = 0.95
LONG = Load("qwen3-0.6b", 1, 32768, 2)
CHUNK = 4096
TO_ONE_STEP = 1.2

# Of kernels by name, the first that fits; on the CPU of operators.
GROUPS = {
    "attention": r"_attend_part|_join_parts|_attend_chunk|flash",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|splitk|aten::(mm|addmm|bmm)",
    "norms, rotary, activation, KV writes": r"_add_rms_norm|_rotate|_swiglu|_write_kv|layer_norm",
    "copies": r"memcpy|memset",
    "sampling, and what else is torch's": r"_sample|at::|aten::",
    "others": r"",
}


def graphs_and_transformers(device: str, small: bool) -> Sample:
    """Part 1."""
    load = GPT2.scaled(small)
    engine = make_engine([load], device, small)
    model = transformers_baseline.build(load, device, small)
    ways = {
        "graphs on": partial(decode_rate, engine, load),
        "graphs off": partial(decode_rate, engine, load, use_graphs=False),
        "transformers, eager": partial(transformers_baseline.eager_rate, model, load),
    }
    samples = take_turns(ways, ROUNDS)
    rates = medians(samples)
    gain = ratio(samples, "graphs on", "graphs off")
    eager = ratio(samples, "graphs off", "transformers, eager")
    return {
        "lines": [str(load), *(f"  {way:20} {rate:12.1f} tokens/s" for way, rate in rates.items())],
        "tokens_per_s": samples,
        "promises": [
            promise(1, f"{load}, graphs on to off, at least 3", f"{gain:.2f}", in_full(small, gain >= 3)),
            promise(1, "graphs off to transformers' eager, at least 1", f"{eager:.2f}", in_full(small, eager >= 1)),
        ],
    }


def gain_by_batch(device: str, small: bool) -> Sample:
    """Part 2."""
    engine = make_engine([load.scaled(small) for load in QWEN], device, small)
    lines, rows, promises = [f"{QWEN[0].model}{'on':>15}{'off':>12} tokens/s"], [], []
    for full in QWEN:
        load = full.scaled(small)
        ways = {use: partial(decode_rate, engine, load, use_graphs=use == "on") for use in ("on", "off")}
        samples = take_turns(ways, ROUNDS)
        rates = medians(samples)
        gain, least = ratio(samples, "on", "off"), GAINS[full.batch]
        lines.append(f"  batch {full.batch:3}{rates['on']:16.1f}{rates['off']:12.1f}  {gain:.2f} times")
        rows.append({"batch": load.batch, "tokens_per_s": samples})
        what = f"{load}, graphs on to off, at least {least}"
        promises.append(promise(2, what, f"{gain:.2f}", in_full(small, gain >= least)))
    return {"lines": lines, "rows": rows, "promises": promises}


def against_the_floor(device: str, small: bool) -> Sample:
    """Part 3."""
    loads = [load.scaled(small) for load in LARGE]
    engine = make_engine(loads, device, small)
    bandwidth = copy_bandwidth(device, (4 * GIB) if not small else 8 * MIB)
    weight_bytes = bytes_of_weights(engine)
    lines, rows, promises = [f"bandwidth {bandwidth / 1e12:.3f} TB/s; weights {weight_bytes / 1e9:.2f} GB"], [], []
    for full, load in zip(LARGE, loads):
        served_ms = step_served(engine, load)
        kv_bytes = load.batch * load.mean_context * kv_bytes_of_a_token(engine.model_config)
        floors_ms = {"matrix products": 1e3 * weight_bytes / bandwidth, "attention": 1e3 * kv_bytes / bandwidth}
        floor_ms = sum(floors_ms.values())
        part, least = floor_ms / served_ms, OF_THE_FLOOR[full.batch]
        profile = profile_replays(engine, load.batch, REPLAYS, context=round(load.mean_context))
        groups = by_group(profile)
        lines += [
            f"{load}: step {served_ms:.3f} ms, a replay alone {1e3 * profile.seconds:.3f};"
            f" floor {floor_ms:.3f} = {100 * part:.1f} % of the step",
            f"  {'of a replay':38}{'us':>9}{'kernels':>9}{'of it':>8}{'floor us':>10}{'beyond it':>11}",
        ]
        for name, (calls, seconds) in groups.items():
            floor_us = 1e3 * floors_ms.get(name, 0.0)
            lines.append(
                f"  {name:38}{1e6 * seconds:9.1f}{calls:9g}{100 * seconds / profile.seconds:7.1f}%"
                f"{floor_us:10.1f}{1e6 * seconds - floor_us:11.1f}"
            )
        lines += [f"  {row}" for row in profile.table().splitlines()]
        rows.append(
            {
                "batch": load.batch,
                "step_ms": served_ms,
                "replay_ms": 1e3 * profile.seconds,
                "weight_bytes": weight_bytes,
                "kv_bytes": kv_bytes,
                "floor_ms": floor_ms,
                "part": part,
                "groups_us": {name: 1e6 * seconds for name, (_, seconds) in groups.items()},
            }
        )
        what = f"{load}, floor to step, at least {100 * least:.0f} %"
        promises.append(promise(3, what, f"{100 * part:.1f} %", in_full(small, part >= least)))
    return {"lines": lines, "bandwidth_bytes_per_s": bandwidth, "rows": rows, "promises": promises}


def bytes_of_weights(engine: Engine) -> int:
    """That a decode step reads. Of an embedding it reads a row for each token, unless it is the output's matrix too."""
    model = engine.model
    held = {name: weight.nbytes for name, weight in model.weights.items()}
    if "lm_head.weight" in held:
        del held[model.embedding]
    return sum(held.values())


def kv_bytes_of_a_token(shape: Config) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def by_group(profile: Profile) -> dict[str, tuple[float, float]]:
    """Of a step: kernels and seconds of each group, and last the time without a kernel, less overlaps of kernels."""
    found = dict.fromkeys(GROUPS, (0.0, 0.0))
    for kernel in profile.kernels:
        group = next(name for name, names in GROUPS.items() if re.search(names, kernel.name, re.IGNORECASE))
        calls, seconds = found[group]
        found[group] = calls + kernel.calls, seconds + kernel.seconds
    idle = profile.seconds - sum(kernel.seconds for kernel in profile.kernels)
    return {name: sums for name, sums in found.items() if sums[0]} | {"gaps": (0.0, idle)}


def against_transformers(device: str, small: bool) -> Sample:
    """Part 4, here: all of its processes get ready at the same time, and then measure one at a time."""
    by_model = [[GPT2], QWEN, LARGE]
    loads = [[full.scaled(small) for full in each] for each in by_model]
    if small:
        loads = [each[-1:] for each in loads]  # compiling is slow there
    common = {"device": device, "small": small}
    begin = time.monotonic()
    ours = [Process(our_steps, READY_S, loads=each, **common) for each in loads]
    theirs = {
        load: Process(transformers_baseline.compiled, READY_S, load=load, **common) for each in loads for load in each
    }
    every = [*ours, *theirs.values()]
    made = dict(zip(every, side_by_side(every)))
    lines = [f"compiled, and ready after {time.monotonic() - begin:.0f} s"]
    lines.append(f"{'tokens/s':34}{'ours':>12}{'transformers':>14}")
    rows, promises = [], []
    for process, each in zip(ours, loads):
        for load in each:
            other = theirs[load]
            samples = [asked.ask() if "error" not in made[asked] else made[asked] for asked in (process, other)]
            rates = [1e3 * load.batch / sample["step_ms"] if "error" not in sample else None for sample in samples]
            errors = [sample["error"] for sample in samples if "error" in sample]
            notes = errors or [f"{name.replace('_', ' ')} {value:.0f}" for name, value in made[other].items()]
            rows.append({"load": str(load), "tokens_per_s": rates, "samples": samples, "compiled": made[other]})
            cells = "".join(f"{'-' if rate is None else f'{rate:.1f}':>13}" for rate in rates)
            lines.append(f"  {load!s:32}{cells}  {'; '.join(notes)}")
            met, figure = None, "not measured"
            if rates[0] and rates[1]:
                figure, met = f"{rates[0] / rates[1]:.2f}", in_full(small, rates[0] > rates[1])
            what = f"{load}, ours to transformers' static cache, compiled, more than 1"
            promises.append(promise(4, what, figure, met))
    for process in every:
        process.close()
    return {"lines": lines, "rows": rows, "promises": promises}


def our_steps(loads: list[Load], device: str, small: bool) -> Iterator[Sample]:
    """First gets ready, then a sample for each load in turn."""
    engine = make_engine(loads, device, small)
    for load in loads:
        served(engine, load)
    _release(device)
    yield {}
    for load in loads:
        yield {"step_ms": step_served(engine, load)}


def step_served(engine: Engine, load: Load) -> float:
    """Milliseconds of a decode step: of a few runs the median of their medians."""
    return medians(take_turns({"": lambda: step_ms(served(engine, load))}, ROUNDS))[""]


def with_regions_and_without(device: str, small: bool, full: Load, pauses: int, rounds: int) -> Sample:
    """Part 5, of one model."""
    load = full.scaled(small)
    engines = {use: make_engine([load], device, small, use_regions=use == "with") for use in ("with", "without")}
    engine = engines["with"]
    allow_backups()
    ways = {use: partial(decode_rate, each, load) for use, each in engines.items()}
    before, tokens = take_turns(ways, rounds), tokens_of(served(engine, load))
    begin = time.perf_counter()
    for _ in range(pauses):
        engine.drain()
        memsaver.pause()
        memsaver.resume()
        engine.drop_prefix_cache()
    paused_s = time.perf_counter() - begin
    same = tokens_of(served(engine, load)) == tokens
    after = take_turns(ways, rounds)
    lines = [f"{load}, tokens/s{'with':>13}{'without':>13} regions"]
    promises, kept = [], []
    for when, samples in (("before", before), (f"after {pauses} pauses", after)):
        rates = medians(samples)
        kept.append(ratio(samples, "with", "without"))
        spread = max((max(each) - min(each)) / rates[use] for use, each in samples.items())
        lines.append(
            f"  {when:20}{rates['with']:21.1f}{rates['without']:13.1f}  {100 * (kept[-1] - 1):+.2f} %;"
            f" single runs within {100 * spread:.2f} %"
        )
        what = f"{load}, with regions to without, {when}, within 1 %"
        promises.append(promise(5, what, f"{kept[-1]:.4f}", in_full(small, abs(kept[-1] - 1) <= EQUAL)))
    lines.append(f"  {pauses} pauses and resumes took {paused_s:.2f} s")
    change = kept[1] / kept[0]  # the engine without regions was not paused: its change is drift
    what = f"{load}, after {pauses} pauses to before, less what changed without regions, within 1 %"
    promises.append(promise(5, what, f"{change:.4f}", in_full(small, abs(change - 1) <= EQUAL)))
    figure = "same" if same else "differ"  # a difference counts with every shape
    promises.append(promise(5, f"{load}, tokens after {pauses} pauses", figure, same and in_full(small, same)))
    return {
        "lines": lines,
        "load": str(load),
        "pauses": pauses,
        "pauses_s": paused_s,
        "same_tokens": same,
        "tokens_per_s": {"before": before, "after": after},
        "promises": promises,
    }


def prefill_in_pieces(device: str, small: bool, model: str) -> Sample:
    """Part 6, of one model."""
    sizes = PREFILLS if not small else (8, 16, 32, 64)
    counts = sorted((*sizes, UNALIGNED if not small else 24))
    # One request: a prompt of the largest count, and its token. The other engine neither captures nor pads.
    with_sizes = {"graphs": sizes, "eager": ()}
    engines = {
        use: make_engine([Load(model, 1, sizes[-1], 2)], device, small, prefill_graph_sizes=given)
        for use, given in with_sizes.items()
    }
    engine, rounds = engines["graphs"], 15 if not small else 2
    lines = [*engine.graphs.table().splitlines(), f"{model}, ms of a prefill{'graphs':>17}{'eager':>10}"]
    rows, promises = [], []
    for count in counts:
        prompt = Load(model, 1, count, 1).prompts(engine.model_config.vocab_size)[0]
        before = engine.prefill_runner.replays
        samples = take_turns({use: partial(prefill_ms, each, prompt) for use, each in engines.items()}, rounds)
        took, gain = medians(samples), ratio(samples, "eager", "graphs")
        steps = (engine.prefill_runner.replays - before) / (rounds + 1)
        lines.append(
            f"  {count:5} tokens{took['graphs']:29.3f}{took['eager']:10.3f}  {gain:.3f} times, {steps:g} steps"
        )
        rows.append({"tokens": count, "steps": steps, "ms": took})
        if count in sizes:
            what = f"{model}, {count} tokens, eager to graphs, at least 1 (equal: within 1 %)"
            promises.append(promise(6, what, f"{gain:.3f}", in_full(small, gain >= 1 - EQUAL)))
    figure, holds = "no graphs here", None
    try:
        verified = verify(engine)
        if verified:
            figure, holds = f"up to {max(row.difference for row in verified):.3g}", in_full(small, True)
        lines += [
            f"  {row.name}: {row.compared} tokens differ by up to {row.difference:.3g} of {row.tolerance:.3g}"
            for row in verified
        ]
    except VerificationError as error:
        figure, holds = str(error), False
    promises.append(promise(6, f"{model}, results by graphs and eagerly, within tolerance", figure, holds))
    return {"lines": lines, "model": model, "rows": rows, "promises": promises}


def prefill_ms(engine: Engine, prompt: list[int]) -> float:
    """From the request to its token on the host."""
    engine.drop_prefix_cache()
    begin = time.perf_counter()
    engine.generate([prompt], SamplingParams(0.0, 1))
    return 1e3 * (time.perf_counter() - begin)


def left_after_a_pause(device: str, small: bool) -> Sample:
    """Part 7: the device's bytes in use, less the bytes in use before this process began."""
    used = [driver_used(device)]
    if device != "cpu":
        torch.zeros(1, device=device)
    used.append(driver_used(device))
    load = LARGE[-1].scaled(small)
    sizes = PREFILLS if not small else (8,)
    # All of it: every batch size that is captured by default, and prefill.
    engine = make_engine([load], device, small, graph_batch_sizes=None, prefill_graph_sizes=sizes)
    allow_backups()
    tokens = tokens_of(served(engine, load))
    used.append(driver_used(device))
    engine.drain()
    gone = memsaver.pause()
    _release(device)
    used.append(driver_used(device))
    listed = listed_bytes(device)
    row = memsaver.stats().asdict()["devices"].get(device, {})
    in_torch = torch_cache_bytes() if device != "cpu" else 0
    memsaver.resume()
    engine.drop_prefix_cache()
    same = tokens_of(served(engine, load)) == tokens
    context, active, left = (after - used[0] for after in used[1:])
    figures = {
        "context alone": context,
        "active": active,
        "left by a pause of all": left,
        "of it torch's cache": in_torch,
        "of it chunks that memsaver keeps": row.get("retained_bytes", 0),
        "of it the rest: context, code, libraries' workspaces, graphs": left - in_torch - row.get("retained_bytes", 0),
        "released by that pause": gone.released_bytes,
    }
    lines = [f"{load}, device memory of the process, MiB"]
    lines += [f"  {name:62}{value / MIB:10.1f}" for name, value in figures.items()]
    if listed is not None:
        lines.append(f"  {'left by a pause of all, as nvidia-smi lists this process':62}{listed / MIB:10.1f}")
    lines.append(f"  tokens afterwards: {'same' if same else 'DIFFERENT'}")
    figure = left if listed is None else max(left, listed)
    what = f"{load.model}, left with the process, at most {LEFT / GIB:.1f} GiB"
    found = promise(7, what, f"{figure / GIB:.3f} GiB", in_full(small, figure <= LEFT))
    return {"lines": lines, "bytes": figures, "listed_bytes": listed, "same_tokens": same, "promises": [found]}


def first_runs(device: str, small: bool) -> Sample:
    """Part 8."""
    load = RAGGED.scaled(small)
    draw, least = random.Random(0), min(SHORTEST, load.prompt, load.new_tokens) // (4 if small else 1)
    lengths = [(draw.randint(least, load.prompt), draw.randint(least, load.new_tokens)) for _ in range(load.batch)]
    begin = time.perf_counter()
    with compilations() as before:
        engine = make_engine([load], device, small, graph_batch_sizes=None, max_prefill_tokens=CHUNK)
    ready_s = time.perf_counter() - begin
    with compilations() as names:
        rates = [ragged_rate(engine, lengths) for _ in range(3)]
    lines = [
        f"{load.batch} requests of {least} to {load.prompt} tokens, {least} to {load.new_tokens} new ones",
        f"  ready after {ready_s:.1f} s, {len(before)} kernels in Triton",
        "  tokens/s of three runs: " + ", ".join(f"{rate:.0f}" for rate in rates),
        f"  compiled meanwhile: {', '.join(names) or 'nothing'}",
    ]
    part, none = rates[0] / rates[2], "none" if not names else str(len(names))
    what = f"{load.model}, first run to third, at least {100 * OF_THE_THIRD:.0f} %"
    promises = [
        promise(8, what, f"{100 * part:.1f} %", in_full(small, part >= OF_THE_THIRD)),
        promise(8, f"{load.model}, kernels compiled after capture, none", none, in_full(small, not names)),
    ]
    row = {"tokens_per_s": rates, "compiled_before": sorted(before), "compiled_after": names, "ready_s": ready_s}
    return {"lines": lines, **row, "promises": promises}


def ragged_rate(engine: Engine, lengths: list[tuple[int, int]]) -> float:
    """Tokens per second, from the first request to the last token, of requests of these prompts and completions."""
    engine.drop_prefix_cache()
    draw, vocab = random.Random(1), engine.model_config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(prompt)] for prompt, _ in lengths]
    begin = time.perf_counter()
    for tokens, (_, new_tokens) in zip(prompts, lengths):
        engine.submit(tokens, SamplingParams(1.0, new_tokens))
    while engine.scheduler.busy:
        engine.step()
    engine.settle()
    return sum(new_tokens for _, new_tokens in lengths) / (time.perf_counter() - begin)


def prefill_in_chunks(device: str, small: bool) -> Sample:
    """Part 9."""
    load, chunk = (LONG, CHUNK) if not small else (replace(LONG, prompt=96), 16)
    in_chunks: dict[str, Any] = {"prefill_graph_sizes": (chunk,), "max_prefill_tokens": chunk}
    ways: dict[str, dict[str, Any]] = {
        "one step": {"prefill_graph_sizes": ()},
        "chunks": in_chunks,
        "chunks, contexts gathered": {**in_chunks, "use_kernel": False},
    }
    engines = {way: make_engine([load], device, small, **settings) for way, settings in ways.items()}
    prompt = load.prompts(engines["one step"].model_config.vocab_size)[0]
    measures = {way: partial(prefill_ms, engine, prompt) for way, engine in engines.items()}
    samples = take_turns(measures, 5 if not small else 2)
    ratios = {way: ratio(samples, way, "one step") for way in ways}
    lines = [f"{load.model}, {load.prompt} tokens, by {chunk} in chunks"]
    lines += [f"  {way:28}{took:10.1f} ms  {ratios[way]:.3f} times" for way, took in medians(samples).items()]
    what = f"{load.model}, {load.prompt} tokens in chunks of {chunk} to one step, at most {TO_ONE_STEP}"
    found = promise(9, what, f"{ratios['chunks']:.3f}", in_full(small, ratios["chunks"] <= TO_ONE_STEP))
    return {"lines": lines, "ms": samples, "ratios": ratios, "promises": [found]}


def torch_cache_bytes() -> int:
    """In torch's default pool; the regions' own pools count as reserved too, though their memory is gone."""
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == (0, 0))


def driver_used(device: str) -> int:
    """Bytes of the device in use, by all processes; asked without making a context."""
    if device == "cpu":
        row = memsaver.stats().asdict()["devices"].get(device)
        return row["total_bytes"] - row["free_bytes"] if row else 0
    return int(nvidia_smi(device, "--query-gpu=memory.used")[0]) * MIB


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _alone(function: Callable[..., Sample], **more: Any) -> Callable[..., Sample]:
    """The same in a process of its own."""
    return partial(in_process, function, timeout_s=TIMEOUT_S, **more)


PARTS: dict[int, list[Callable[..., Sample]]] = {
    1: [_alone(graphs_and_transformers)],
    2: [_alone(gain_by_batch)],
    3: [_alone(against_the_floor)],
    4: [against_transformers],
    5: [
        _alone(with_regions_and_without, full=QWEN[2], pauses=50, rounds=10),
        _alone(with_regions_and_without, full=Load("qwen3-8b", 64, 128, 128), pauses=50, rounds=5),
    ],
    6: [_alone(prefill_in_pieces, model=model) for model in (QWEN[0].model, LARGE[0].model)],
    7: [_alone(left_after_a_pause)],
    8: [_alone(first_runs)],
    9: [_alone(prefill_in_chunks)],
}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", type=int, choices=PARTS, default=list(PARTS))
    add_device(parser)
    add_small(parser)
    options = parse(parser)
    if options.device == "cpu":
        print("no graphs on the CPU: they are asked for, and every step is eager; figures say nothing of a GPU")
    where, begin = environment(options.device), time.monotonic()
    promises: list[Sample] = []
    for part in options.only:
        for measure in PARTS[part]:
            print(f"\n== part {part}", flush=True)
            since = time.monotonic()
            sample = measure(device=options.device, small=options.small)
            lines = sample.pop("lines", None) or [sample.get("traceback") or sample["error"]]
            promises += sample.get("promises") or [promise(part, "measured", sample["error"], None)]
            print("\n".join(lines))
            result = {"benchmark": "engine", "part": part, **where, "small": options.small, **sample}
            print(json.dumps({**result, "seconds": time.monotonic() - since}), flush=True)
    print(f"\ntook {time.monotonic() - begin:.0f} s\n" + "\n".join(map(promise_line, promises)))


if __name__ == "__main__":
    main()
