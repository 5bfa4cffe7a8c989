"""memsaver in one file: pause a model, overwrite the memory that it released, resume the model.

    python -m examples.quickstart

On a GPU the model runs as a CUDA graph. The graph stays valid because no address changes. Without a GPU, the same runs
without the graph on the host driver, a device made of host memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import memsaver

MIB = 1 << 20
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
WIDTH, LAYERS, CACHE_MIB, MARGIN_MIB = (4096, 32, 8192, 1024) if ON_GPU else (1024, 8, 64, 32)
BATCH = 8


def main() -> int:
    if ON_GPU:
        print(f"device: {torch.cuda.get_device_name(0)}; the model runs as a CUDA graph")
    else:
        print("device: none with CUDA, so this is the host driver; the model runs without a graph")
        if "MEMSAVER_HOST_DEVICE" not in os.environ:
            memsaver.configure(host_device="128MiB")
    torch.manual_seed(0)

    # Regions. Torch allocates inside `with region:` from the region. Its policy decides over the contents in a pause.
    weights = memsaver.region("weights", device=DEVICE, backup="host")
    kv_cache = memsaver.region("kv_cache", device=DEVICE)  # "none": undefined after a resume, and nothing to copy
    with weights:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(LAYERS))).requires_grad_(False)
    cache = kv_cache.empty((CACHE_MIB * MIB // 4 // WIDTH, WIDTH), torch.float32)
    inputs = torch.randn(BATCH, WIDTH, device=DEVICE)

    def forward() -> Tensor:
        cache[-BATCH:] = inputs  # written before it is read, as a cache has to be after a resume
        hidden: Tensor = model(cache[-BATCH:])
        return hidden

    run, outputs = capture(forward) if ON_GPU else (forward, None)
    expected = run().clone()
    addresses = [cache.data_ptr(), *(parameter.data_ptr() for parameter in model.parameters())]
    before = report("the model has run")
    held = weights.mapped_bytes + kv_cache.mapped_bytes

    # Pause. The driver has the memory back. A use of the paused regions raises an error.
    paused = memsaver.pause()
    free = report(f"pause: {', '.join(paused.paused)}; {paused.copied_bytes // MIB} MiB copied out", paused.seconds)
    try:
        if ON_GPU:
            run()
        else:
            kv_cache.__enter__()
        print("FAILED: a paused region could be used")
        return 1
    except memsaver.RegionPausedError as error:
        print(f"refused: {error}")

    # Another region takes all free memory and overwrites it.
    other = memsaver.region("other", device=DEVICE)
    taken = []
    for _ in range((free // MIB - MARGIN_MIB) // 32):
        taken.append(other.empty(32 * MIB, torch.uint8).random_())
    report(f"another region overwrote {len(taken) * 32} MiB with random bytes")
    try:
        memsaver.resume(["weights", "kv_cache"])  # too early: this raises, changes nothing, and can be tried again
        print("FAILED: a resume found memory that is in use")
        return 1
    except memsaver.OutOfMemoryError as error:
        print(f"refused: {error}")
    other.pause()

    # Resume. The addresses are the same, the weights have their contents, and the graph replays.
    resumed = memsaver.resume(paused.paused)
    report(f"resume: {', '.join(resumed.resumed)}; {resumed.copied_bytes // MIB} MiB copied in", resumed.seconds)
    if outputs is not None:
        outputs.zero_()
    same_addresses = addresses == [cache.data_ptr(), *(parameter.data_ptr() for parameter in model.parameters())]
    same_outputs = torch.equal(run(), expected)
    gained = free - before >= held
    print(f"same addresses: {same_addresses}; same outputs, bit for bit: {same_outputs}; memory was free: {gained}")
    return 0 if same_addresses and same_outputs and gained else 1


def capture(forward: Callable[[], Tensor]) -> tuple[Callable[[], Tensor], Tensor]:
    """A function that replays `forward` as a graph, and the tensor with its outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries initialise in their first calls, which must not be captured
        forward()
    torch.cuda.current_stream().wait_stream(side)

    graph = memsaver.CUDAGraph()
    with memsaver.graph(graph, region="cuda_graph", needs=["weights", "kv_cache"]):
        outputs = forward()

    def run() -> Tensor:
        graph.replay()
        return outputs

    return run, outputs


def report(event: str, seconds: float | None = None) -> int:
    """Print an event and the free memory by the driver's figure. Returns the free bytes."""
    free = memsaver.stats().devices[DEVICE].free_bytes or 0
    took = "" if seconds is None else f", {seconds * 1e3:.0f} ms"
    print(f"{free // MIB:>7} MiB free | {event}{took}")
    return free


if __name__ == "__main__":
    sys.exit(main())
