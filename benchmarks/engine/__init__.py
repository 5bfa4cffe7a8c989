"""The example's engine: loads, CUDA graphs, the floor of a decode step, regions, two GPUs, attention.

- loads: completion tokens/s of even and of ragged loads, and by vLLM in a process of its own, where it is installed.
- graphs: decode with graphs and without.
- floor: a decode step of Qwen3-8B, and its bytes over the device's bandwidth.
- regions: with memsaver's regions and without, then the same after 50 pauses.
- parallel: two GPUs, tensor parallel, that pause at the same time: tokens before and after, on both ranks.
- kernels: paged decode, bytes over time.

Weights are random. Decode figures are those of Engine.step as it serves, with the scheduler. The compared ways take
turns after a round that does not count, and ratios are medians over the rounds. The checks are the promises of the
engine (examples/colocate/promises.md). On the CPU there are no graphs: they are asked for, and each step is eager.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import memsaver
from benchmarks.engine.by_vllm import by_vllm
from benchmarks.engine.kernels import kernels
from benchmarks.engine.loads import LARGE, QWEN, RAGGED, Load, make_engine, served
from benchmarks.harness.command import Options, Run
from benchmarks.harness.machine import GIB, MIB, visible_gpus
from benchmarks.harness.processes import Process, Sample, ask_all, in_process, processes
from benchmarks.harness.work import copy_rate, median, ratio, take_turns
from examples.colocate.engine import Engine, SamplingParams
from examples.colocate.engine.tensor_parallel import ONE_RANK, Parallel
from examples.colocate.process_group import join

DEVICES = ("cuda", "cpu")
GAINS = {1: 1.5, 8: 1.3, 32: 1.2, 128: 1.1}  # promised of graphs, by batch
OF_THE_FLOOR = {1: 0.60, 64: 0.70}
EQUAL = 0.01
ROUNDS = 3
PROFILED = 20  # steps
FIRST = 8  # tokens that are decoded anew after each pause of two ranks
READY_S = 600.0  # for a process that captures graphs


def options(parser: Options) -> None:
    parser.choice("--only", tuple(PARTS), "the parts")


def measure(run: Run) -> None:
    run.parts(PARTS)


def alone(run: Run, function: Callable[..., Any], **given: Any) -> Any:
    """The result of a function in a process of its own."""
    return in_process(function, device=run.device, small=run.small, timeout_s=READY_S, **given)


def loads(run: Run) -> None:
    others = importlib.util.find_spec("vllm") is not None and run.device != "cpu"
    if not others:
        run.say("\nloads: without vLLM, which is not installed here, or has no GPU")
    for of_a_model in ([*QWEN, RAGGED[0]], [*LARGE, RAGGED[1]]):
        ways = {"engine": Process(our_rates, READY_S, loads=of_a_model, device=run.device, small=run.small)}
        if others:
            ways["vLLM"] = Process(by_vllm, READY_S, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, loads=of_a_model)
        samples: dict[str, dict[str, list[float]]] = {str(load): {way: [] for way in ways} for load in of_a_model}
        with processes(*ways.values()):
            for number in range(1 + ROUNDS):
                for each, (way, process) in itertools.product(samples.values(), ways.items()):
                    rate = process.ask()["tokens_per_s"]
                    each[way] += [rate] if number else []
        rows: dict[str, dict[str, Any]] = {name: dict(_medians(each)) for name, each in samples.items()}
        for name, each in samples.items() if others else ():
            rows[name]["engine to vLLM"] = ratio(each, "engine", "vLLM")
        run.table(f"{of_a_model[0].model}, completion tokens/s", rows)


def our_rates(loads: list[Load], device: str, small: bool) -> Iterator[Sample]:
    """Completion tokens per second of each load in turn."""
    loads = [load.scaled(small) for load in loads]
    engine = make_engine(loads, device, small, graph_batch_sizes=None)
    for load in itertools.cycle(loads):
        yield {"tokens_per_s": served(engine, load).rate}


def graphs(run: Run) -> None:
    found = alone(run, gains)
    run.table("tokens/s of decode", {name: _medians(each) for name, each in found.items()})
    run.keep(graphs=found)
    for load, (name, samples) in zip(QWEN, found.items()):
        gain, least = ratio(samples, "graphs", "eager"), GAINS[load.batch]
        run.check(f"{name}: graphs to eager, at least {least:g}", gain >= least, gain, at_full_size=True)


def _medians(samples: dict[str, list[float]]) -> dict[str, float | None]:
    return {way: median(each) for way, each in samples.items()}


def gains(device: str, small: bool) -> dict[str, dict[str, list[float]]]:
    loads, found = {str(load): load.scaled(small) for load in QWEN}, {}
    engine = make_engine(loads.values(), device, small)
    for name, load in loads.items():
        ways = {"graphs": partial(decode_rate, engine, load), "eager": partial(decode_rate, engine, load, False)}
        found[name] = take_turns(ways, ROUNDS)
    return found


def decode_rate(engine: Engine, load: Load, use_graphs: bool = True) -> float:
    """Tokens per second of decode steps."""
    return served(engine, load, use_graphs).decode_rate


def floor(run: Run) -> None:
    found = alone(run, against_the_floor)
    for name, row in found.items():
        run.table(f"{name}, the longest kernels of a step", row.pop("kernels"))
    run.table("decode steps of Qwen3-8B", found)
    for load, (name, row) in zip(LARGE, found.items()):
        share, least = row["floor, ms"] / row["step, ms"], OF_THE_FLOOR[load.batch]
        run.check(f"{name}: floor to step, at least {least:g}", share >= least, share, at_full_size=True)


def against_the_floor(device: str, small: bool) -> dict[str, dict[str, Any]]:
    engine, found = make_engine([load.scaled(small) for load in LARGE], device, small), dict[str, dict[str, Any]]()
    bandwidth = copy_rate(device, 8 * MIB if small else 4 * GIB)
    held = {name: weight.nbytes for name, weight in engine.model.weights.items()}
    if "lm_head.weight" in held:  # of an embedding that is not the output's matrix too, a step reads a row a token
        del held["model.embed_tokens.weight"]
    shape = engine.model_config
    kv_bytes_of_a_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    for full in LARGE:
        load = full.scaled(small)
        served_ms = median(take_turns({"": partial(step_ms, engine, load)}, ROUNDS)[""])
        nbytes = sum(held.values()) + load.batch * load.mean_context * kv_bytes_of_a_token
        found[str(full)] = {
            "step, ms": served_ms, "floor, ms": 1e3 * nbytes / bandwidth, "copy, TB/s": bandwidth / 1e12,
            "kernels": longest_kernels(engine, load),
        }  # fmt: skip
    return found


def step_ms(engine: Engine, load: Load) -> float:
    """The median of the decode steps of one run."""
    return served(engine, load).step_ms


def longest_kernels(engine: Engine, load: Load) -> dict[str, dict[str, float]]:
    """Microseconds of a decode step at the load's start, by kernel, and of all of them; on the CPU by operator."""
    engine.drop_prefix_cache()
    for prompt in load.prompts(engine.model_config.vocab_size):
        engine.submit(prompt, SamplingParams(0.0, load.new_tokens))
    steps = min(PROFILED, load.new_tokens // 2)
    while len(engine.scheduler.decoding) < load.batch:
        engine.step()
    activity = ProfilerActivity.CPU if engine.device.type == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity], acc_events=True) as profiler:  # without it torch warns of cycles, here one
        for _ in range(steps):
            engine.step()
        engine.drain()
    engine.scheduler.waiting.clear()
    time_of = "self_cpu_time_total" if engine.device.type == "cpu" else "self_device_time_total"
    rows = sorted(((getattr(row, time_of) / steps, row.key) for row in profiler.key_averages()), reverse=True)
    return {name[:90]: {"us": us} for us, name in [(sum(us for us, _ in rows), "all"), *rows[:12]]}


def regions(run: Run) -> None:
    for full, rounds in ((QWEN[2], 10), (Load("qwen3-8b", 64, 128, 128), 5)):
        pauses, rounds = (2, 2) if run.small else (50, rounds)
        found = alone(run, with_regions, load=full.scaled(run.small), pauses=pauses, rounds=rounds)
        run.table(f"{full}, tokens/s of decode", {when: _medians(found[when]) for when in ("before", "after")})
        run.keep(**{f"regions, {full}": found})
        kept = {when: ratio(found[when], "regions", "none") for when in ("before", "after")}
        for when, each in kept.items():
            what = f"{full}: with regions to without, {when} the pauses, within 1 %"
            run.check(what, abs(each - 1) <= EQUAL, each, at_full_size=True)
        run.check(f"{full}: tokens after the pauses are the same", found["same"])


def with_regions(load: Load, pauses: int, rounds: int, device: str, small: bool) -> Sample:
    ways = {"regions": True, "none": False}
    engines = {way: make_engine([load], device, small, regions=use) for way, use in ways.items()}
    engine, rates = engines["regions"], {way: partial(decode_rate, each, load) for way, each in engines.items()}
    before, expected = take_turns(rates, rounds), served(engine, load).tokens
    begin = time.perf_counter()
    for _ in range(pauses):
        _pause_and_resume(engine)
    paused_s, same = time.perf_counter() - begin, served(engine, load).tokens == expected
    return {"before": before, "after": take_turns(rates, rounds), "same": same, "pauses_s": paused_s}


def _pause_and_resume(engine: Engine) -> None:
    engine.drain()
    memsaver.pause()
    memsaver.resume()
    engine.drop_prefix_cache()


def parallel(run: Run) -> None:
    if run.device != "cpu" and visible_gpus() < 2:
        run.say("\nparallel: not measured, since there is no second GPU")
        return
    load, pauses = Load("qwen3-8b", 64, 128, 128).scaled(run.small), 2 if run.small else 20
    devices = ["cpu"] * 2 if run.device == "cpu" else ["cuda:0", "cuda:1"]
    how: dict[str, Any] = {"load": load, "small": run.small, "timeout_s": READY_S}
    one = in_process(rank, number=0, store="", device=devices[0], pauses=0, **how)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        how |= {"store": store, "pauses": pauses}
        both = [Process(rank, number=number, device=each, **how) for number, each in enumerate(devices)]
        with processes(*both):
            found = ask_all(both)
    rows = {"one GPU": one, **{f"rank {number}": each for number, each in enumerate(found)}}
    run.table(f"{load}, tokens/s of decode", {name: each["rates"] for name, each in rows.items()})
    same = all(each["same"] for each in found) and found[0]["tokens"] == found[1]["tokens"]
    run.check(f"tokens of both ranks, before and after {pauses} pauses, are the same", same)


def rank(number: int, store: str, load: Load, pauses: int, device: str, small: bool) -> Sample:
    """Without a ``store`` it is alone."""
    group = ONE_RANK
    if device != "cpu":
        torch.cuda.set_device(device)
    if store:
        group = Parallel(join(device.partition(":")[0], number, 2, f"file://{store}").get_group())
    engine = make_engine([load], device, small, group)
    expected, same, rates = served(engine, load).tokens, True, dict[str, float | None]()
    for when in ("before", "after"):
        runs = [served(engine, load) for _ in range(ROUNDS)]
        rates[when] = median([each.decode_rate for each in runs])
        same = same and all(each.tokens == expected for each in runs)
        first = replace(load, new_tokens=FIRST)
        for _ in range(pauses if when == "before" else 0):
            if store:
                dist.barrier()
            _pause_and_resume(engine)
            same = same and served(engine, first).tokens == [each[: first.length] for each in expected]
    return {"tokens": expected, "same": same, "rates": rates}


PARTS = {"loads": loads, "graphs": graphs, "floor": floor, "regions": regions, "parallel": parallel, "kernels": kernels}
