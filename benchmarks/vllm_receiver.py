"""Weights that a trainer's process writes into a vLLM engine's parameters, over the shared pool.

    python benchmarks/vllm_receiver.py [--model qwen3-8b] [--rounds 5]

Engine and trainer are processes of their own on one GPU. The engine has the worker extension WeightReceiver. In a round
it sleeps at level 2, wakes the weights, and makes the plan; the trainer attaches to the weights, writes a new version
of them, and detaches; the engine wakes its KV cache and generates. Then the engine clears its parameters and loads the
same version by vLLM's own ``load_weights``, and generates again. Prints milliseconds, and GB/s beside plain copies of
the trainer's weights on the device; then one JSON line. The exit status is 1 if tokens differ. Needs vLLM.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import memsaver
from support.arguments import count, parse, parser_for
from support.broker import broker
from support.environment import environment
from support.host import GIB
from support.processes import Process, Sample, ask_all
from support.servers.vllm_models import MODELS, UNCOMPILED

EXTENSION = "memsaver.drop_in.vllm.worker_extension.WeightReceiver"
WARM_UP = 1
Weights = dict[str, torch.Tensor]
KV_CACHE = 4 * GIB
SPARE = 4 * GIB  # of the pool, beyond weights and KV cache


def timed(call: Callable[[], object]) -> float:
    """Milliseconds, the device's work included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def clear(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def load(weights: Weights, model: Any) -> None:
    """vLLM's own load, from tensors on the GPU."""
    model.load_weights(iter(weights.items()))


def copy_plainly(weights: Weights, to: torch.Tensor) -> None:
    """Copies each weight to the same memory."""
    for weight in weights.values():
        to[: weight.nbytes].copy_(weight.view(-1).view(torch.uint8))


def engine(model: str, model_directory: str, pool_directory: str, plan_file: str) -> Iterator[Sample]:
    """By turns it sleeps, wakes its weights and writes the plan to a file; and answers with its tokens."""
    own = {"MEMSAVER_DROP_IN": "vllm", "MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": pool_directory,
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # fmt: skip
    os.environ.update(own)
    memsaver.configure(pool="shared")
    from vllm_sleep import Engine

    made = Engine(
        MODELS[model], model_directory, 0.1, "TRITON_ATTN",  # the share counts for nothing: the KV cache is fixed
        worker_extension_cls=EXTENSION, kv_cache_memory_bytes=KV_CACHE, compilation_config=UNCOMPILED,
    )  # fmt: skip
    specs = {name: (shape, "bfloat16") for name, shape in MODELS[model].shapes()}
    yield {"ready_s": made.ready_s, "tokens": made.tokens(), "weight_bytes": made.weight_bytes}
    for version in range(1, 1 << 30):
        made.llm.sleep(level=2)
        woke_ms = timed(lambda: made.llm.wake_up(tags=["weights"]))
        began = time.perf_counter()
        [plan] = made.llm.collective_rpc("memsaver_weight_plan", args=(specs,))
        plan_ms = (time.perf_counter() - began) * 1e3
        with open(plan_file, "wb") as file:
            file.write(plan)
        yield {"wake weights": woke_ms, "plan": plan_ms}
        woke_ms = timed(lambda: made.llm.wake_up(tags=["kv_cache"]))
        written = made.tokens()
        weights = dict(MODELS[model].weights(version, "cuda"))
        made.llm.apply_model(clear)
        own_ms = timed(partial(made.llm.apply_model, partial(load, weights)))
        del weights
        yield {"wake kv_cache": woke_ms, "own load": own_ms, "tokens": [written, made.tokens()]}


def trainer(model: str, pool_directory: str, plan_file: str) -> Iterator[Sample]:
    """Writes version after version into the engine's weights."""
    os.environ["MEMSAVER_POOL_DIR"] = pool_directory
    memsaver.configure(pool="shared")
    from memsaver.drop_in.vllm.weights import attached

    torch.cuda.init()
    largest = max(2 * math.prod(shape) for _, shape in MODELS[model].shapes())
    copies = torch.empty(largest, dtype=torch.uint8, device="cuda")
    yield {}
    for version in range(1, 1 << 30):
        weights = dict(MODELS[model].weights(version, "cuda"))
        with open(plan_file, "rb") as file:
            plan = file.read()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with attached(plan) as target:
            torch.cuda.synchronize()
            attach_ms = (time.perf_counter() - began) * 1e3
            write_ms = timed(partial(target.write, weights))
        whole_ms = (time.perf_counter() - began) * 1e3
        plain_ms = timed(partial(copy_plainly, weights, copies))
        yield {"attach": attach_ms, "write": write_ms, "attach, write, detach": whole_ms, "plain copies": plain_ms,
               "bytes": sum(weight.nbytes for weight in weights.values())}  # fmt: skip
        del weights


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(name for name, each in MODELS.items() if not each.experts),
                        default="qwen3-8b")  # fmt: skip
    parser.add_argument("--rounds", type=count, default=5, help="after one for warming up")
    options = parse(parser)
    model = options.model
    capacity = -(-(MODELS[model].nbytes() + KV_CACHE + SPARE) // GIB) * GIB
    rounds: list[Sample] = []
    with tempfile.TemporaryDirectory() as directory, broker("cuda:0", capacity) as pool:
        MODELS[model].write(directory)
        where = {"model": model, "pool_directory": pool, "plan_file": f"{directory}/plan"}
        serving = Process(engine, timeout_s=400.0, model_directory=directory, **where)
        training = None
        try:
            [first] = ask_all([serving])
            training = Process(trainer, **where)
            ask_all([training])
            for _ in range(WARM_UP + options.rounds):
                found: Sample = {}
                for process in (serving, training, serving):
                    found |= ask_all([process])[0]
                rounds.append(found)
        finally:
            serving.close()
            if training is not None:
                training.close()
    different = [number for number, each in enumerate(rounds, 1) if len(set(each["tokens"])) > 1]
    sequences = len({first["tokens"], *(each["tokens"][0] for each in rounds)})
    nbytes = rounds[0]["bytes"]
    medians = {
        name: statistics.median(each[name] for each in rounds[WARM_UP:])
        for name in rounds[0] if name not in ("tokens", "bytes")
    }  # fmt: skip
    print(f"{model}, {nbytes / GIB:.2f} GiB of weights; median of {options.rounds} rounds")
    for name, took in medians.items():
        moves = name in ("write", "attach, write, detach", "plain copies", "own load")
        print(f"{name:24}{took:10.1f} ms" + (f"{nbytes / took / 1e6:10.1f} GB/s" if moves else ""))
    print(f"{sequences} different sequences of tokens in {len(rounds)} rounds and before; different from those after "
          f"vLLM's own load in rounds {different or 'none'}")  # fmt: skip
    result = {"model": model, "rounds": options.rounds, "bytes": nbytes, "medians_ms": medians, "all": rounds,
              "first": first, "sequences": sequences, "different": different}  # fmt: skip
    print(json.dumps({"benchmark": "vllm_receiver", **environment("cuda:0"), **result}))
    sys.exit(bool(different) or sequences != len(rounds) + 1)


if __name__ == "__main__":
    main()
