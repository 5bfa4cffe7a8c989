"""A vLLM engine and a trainer on one GPU, which hand the memory of their regions to each other by the shared pool.

    python benchmarks/vllm_trainer.py [--model qwen3-8b] [--turns 10] [--capacity 100]

The engine sleeps at level 1, so its weights go to host memory and its KV cache is discarded. The trainer has state of
as many bytes, which host memory keeps as well, and activations in the rest of the pool but for 2 GiB. In each turn both
calls are made at the same moment. Contents are compared: the engine's tokens, and the trainer's state. Prints
milliseconds of the turns beside plain pinned copies of the same bytes, both ways at once, and one JSON line. The exit
status is 1 if contents differ. Needs vLLM. ``--capacity`` is the pool's, in GiB.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

import memsaver
from support.arguments import count, parse, parser_for
from support.broker import broker
from support.environment import environment
from support.host import GIB, MIB
from support.limits import Limit
from support.processes import Process, Sample, ask_all
from support.servers.vllm_models import MODELS

WARM_UP = 2
WAIT_S = 60.0


def engine(model: str, model_directory: str, pool_directory: str, share: float) -> Iterator[Sample]:
    """Yields the figures of the engine, then sleeps and wakes up by turns."""
    own = {"MEMSAVER_DROP_IN": "vllm", "MEMSAVER_POOL": "shared", "MEMSAVER_POOL_DIR": pool_directory,
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # fmt: skip
    os.environ.update(own)
    memsaver.configure(pool="shared")
    from vllm_sleep import Engine

    made = Engine(MODELS[model], model_directory, share, "TRITON_ATTN")
    said = made.introduction()
    regions = {each.tag: each.mapped_bytes for each in memsaver.stats().devices["cuda:0"].regions}
    yield {**said, "regions": regions}
    while True:
        yield timed(lambda: made.llm.sleep(level=1))
        yield {**timed(made.llm.wake_up), "tokens": made.tokens()}


def trainer(pool_directory: str, state_bytes: int, activation_bytes: int) -> Iterator[Sample]:
    """Makes its state, then resumes and pauses by turns.

    Between both it checks and changes its state, and fills its activations.
    """
    os.environ["MEMSAVER_POOL_DIR"] = pool_directory
    memsaver.configure(pool="shared")
    torch.cuda.init()
    regions = memsaver.region("state", backup="host"), memsaver.region("activations")
    with regions[0]:
        state = [torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(state_bytes // (64 * MIB))]
    memsaver.pause(regions)
    yield {}
    activations: list[torch.Tensor] = []
    for turn in range(1, 1 << 30):
        found = timed(lambda: memsaver.resume(regions, memory_timeout=WAIT_S))
        if not activations:  # the first turn
            with regions[1]:
                activations = [
                    torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(activation_bytes // GIB)
                ]
        for number, tensor in enumerate(state):
            if int(tensor.min()) != (turn - 1) % 251 or int(tensor.max()) != (turn - 1) % 251:
                raise AssertionError(f"state {number} differs in turn {turn}")
            tensor.fill_(turn % 251)
        for tensor in activations:
            tensor.fill_(0xA5)
        torch.cuda.synchronize()
        yield found
        yield timed(lambda: memsaver.pause(regions))


def timed(call: Any) -> Sample:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return {"span": (began, time.perf_counter())}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="qwen3-8b")
    parser.add_argument("--turns", type=count, default=10, help="in each direction, after two for warming up")
    parser.add_argument("--capacity", type=count, default=100, help="of the pool, in GiB")
    options = parse(parser)
    state_bytes = MODELS[options.model].nbytes() // (64 * MIB) * 64 * MIB
    # The KV cache takes the rest of the pool, but for a margin.
    share = (options.capacity - 6) * GIB / torch.cuda.mem_get_info()[1]
    ms: dict[str, list[float]] = {"to the trainer": [], "to the engine": []}
    limit = Limit(4 * GIB, "cuda:0")
    limit.measure()
    with tempfile.TemporaryDirectory() as models, broker("cuda:0", options.capacity * GIB) as pool:
        MODELS[options.model].write(models)
        serving = Process(
            engine, timeout_s=400.0, model=options.model, model_directory=models, pool_directory=pool, share=share
        )
        training = None
        try:
            # The engine first: it takes the pool's idle chunks for free memory of its own when it counts its blocks.
            [first] = ask_all([serving])
            ask_all([serving])  # sleeps
            training = Process(trainer, pool_directory=pool, state_bytes=state_bytes,
                               activation_bytes=options.capacity * GIB - state_bytes - 2 * GIB)  # fmt: skip
            ask_all([training])
            [awake] = ask_all([serving])
            held = sum(first["regions"].values())
            print(f"{options.model}: {first['weight_bytes'] / GIB:.2f} GiB of weights, {held / GIB:.1f} in regions, "
                  f"pool {options.capacity} GiB, trainer's state {state_bytes / GIB:.2f} GiB", flush=True)  # fmt: skip
            tokens = {first["tokens"], awake["tokens"]}
            for _ in range(WARM_UP + options.turns):
                for direction in ms:
                    spans = ask_all([serving, training])
                    begin, end = zip(*(each["span"] for each in spans))
                    ms[direction].append(1e3 * (max(end) - min(begin)))
                    tokens |= {each["tokens"] for each in spans if "tokens" in each}
            limit.measure()
        finally:
            serving.close()
            if training is not None:
                training.close()
    plain = limit.milliseconds("both", state_bytes)
    limit.close()
    assert plain is not None
    medians = {direction: statistics.median(each[WARM_UP:]) for direction, each in ms.items()}
    print(f"plain copies of the state both ways at once: {plain:.1f} ms")
    for direction, took in medians.items():
        moved = first["weight_bytes"] + state_bytes
        share = plain * moved / (2 * state_bytes) / took
        print(f"{direction:16}{took:10.1f} ms, {moved / took / 1e6:.1f} GB/s, {share:.1%} of the plain copies' rate")
    print("tokens: all equal" if len(tokens) == 1 else f"tokens: {len(tokens)} different sequences")
    result = {"model": options.model, "weight_bytes": first["weight_bytes"], "state_bytes": state_bytes,
              "capacity_bytes": options.capacity * GIB, "regions": first["regions"], "kv_blocks": first["kv_blocks"],
              "ms": ms, "medians_ms": medians, "plain_ms": plain, "equal": len(tokens) == 1}  # fmt: skip
    print(json.dumps({"benchmark": "vllm_trainer", **environment("cuda:0"), **result}))
    sys.exit(len(tokens) != 1)


if __name__ == "__main__":
    main()
