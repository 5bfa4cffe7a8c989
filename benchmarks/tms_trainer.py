"""A trainer whose memory is managed whole, by torch_memory_saver and by memsaver: FSDP2, one rank on each GPU.

    python benchmarks/tms_trainer.py [--original DIR] [--ranks 2] [--layers 16] [--width 4096] [--steps 4]

The trainer is the same in three ways: without a saver; with torch_memory_saver's library preloaded; with memsaver, as
``memsaver run`` starts it. After half of its steps it empties torch's cache and pauses everything, and resumes. Prints
for each way seconds of both calls, device memory in use while it is paused, by nvidia-smi, and whether the losses equal
those without a saver; and one JSON line. ``--original`` is a directory with torch_memory_saver, as made by
``pip install --no-deps --target DIR torch_memory_saver==0.0.10``; without it that way is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from memsaver.drop_in.tms import launch
from support.arguments import count, directory, parse, parser_for
from support.environment import environment, need_cuda, nvidia_smi

LIMIT_S = 150.0
CALLS = ("pause_s", "resume_s")
LIBRARY = "torch_memory_saver_hook_mode_preload_cu{major}.abi3.so"


def used_mib(rank: int) -> int:
    return int(nvidia_smi(f"cuda:{rank}", "--query-gpu=memory.used")[0])


def train(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """One rank. The code of the trainer: the saver is in it as in any user's."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    width = options.width
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )
        for _ in range(options.layers)
    ]
    model = torch.nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found: dict[str, Any] = {"losses": []}
    for step in range(options.steps):
        if step == options.steps // 2:
            found.update(paused(rank, options.way))
        generator = torch.Generator("cuda").manual_seed(options.ranks * step + rank)
        batch = torch.randn(2048, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        loss = (model(batch) - batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    dist.barrier()
    dist.destroy_process_group()
    return found


def paused(rank: int, way: str) -> dict[str, Any]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    full = used_mib(rank)
    if way == "none":
        return {"used_mib": full}
    from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found, unused-ignore]

    began = time.perf_counter()
    torch_memory_saver.pause()
    torch.cuda.synchronize()
    pause_s = time.perf_counter() - began
    left = used_mib(rank)
    began = time.perf_counter()
    torch_memory_saver.resume()
    torch.cuda.synchronize()
    resume_s = time.perf_counter() - began
    return {"used_mib": full, "paused_mib": left, "pause_s": pause_s, "resume_s": resume_s}


def variables(way: str, original: str | None, port: int) -> dict[str, str]:
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_CUMEM_ENABLE": "0"}
    if way == "memsaver":
        return launch.environment("host", base)
    base.pop("MEMSAVER_DROP_IN", None)
    if way == "tms":
        assert original is not None
        library = Path(original) / LIBRARY.format(major=(torch.version.cuda or "13").partition(".")[0])
        path = os.pathsep.join(filter(None, [original, base.get("PYTHONPATH", "")]))
        base.update(LD_PRELOAD=str(library), PYTHONPATH=path, TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")
    return base


def run(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all ranks. Ends the program if one fails."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    sizes = [f"--{name}={getattr(options, name)}" for name in ("ranks", "layers", "width", "steps")]
    command = [sys.executable, __file__, "--way", way, *sizes]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], env=variables(way, options.original, port), stdout=subprocess.PIPE
        )
        for rank in range(options.ranks)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{way}: ranks ended with {[rank.returncode for rank in ranks]}\n{''.join(said)}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--original", type=directory, help="a directory with torch_memory_saver")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--layers", type=count, default=16)
    parser.add_argument("--width", type=count, default=4096)
    parser.add_argument("--steps", type=count, default=4)
    parser.add_argument("--way", choices=("none", "tms", "memsaver"), help="with --rank: one rank of a way")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parse(parser)
    if options.rank is not None:
        print(json.dumps(train(options.rank, options)), flush=True)
        return
    need_cuda(count=options.ranks)
    ways = ["none", *(["tms"] if options.original else []), "memsaver"]
    found = {way: run(way, options) for way in ways}
    expected = [rank["losses"] for rank in found["none"]]
    print(f"\n{'':<10}{'rank':>5}{'in use':>10}{'paused':>10}{'pause':>10}{'resume':>10}  losses")
    for way, ranks in found.items():
        for rank, each in enumerate(ranks):
            calls = "".join(f"{each[name] * 1e3:>7.0f} ms" if name in each else f"{'':>10}" for name in CALLS)
            left = f"{each['paused_mib']:>6} MiB" if "paused_mib" in each else f"{'':>10}"
            losses = "equal" if each["losses"] == expected[rank] else "differ"
            print(f"{way:<10}{rank:>5}{each['used_mib']:>6} MiB{left}{calls}  {losses}")
    sizes = {name: getattr(options, name) for name in ("ranks", "layers", "width", "steps")}
    print(json.dumps({"benchmark": "tms_trainer", **environment(), **sizes, "ways": found}))
    if any(each["losses"] != expected[rank] for ranks in found.values() for rank, each in enumerate(ranks)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
