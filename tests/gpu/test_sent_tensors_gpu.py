"""Tensors of regions sent by torch.multiprocessing on a CUDA device, with and without a broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.broker_support import Running
from tests.pool_support import Worker
from tests.support import GIB

pytestmark = pytest.mark.gpu

IMPORTS = (
    # By name and before memsaver, as other libraries import it.
    "import gc, torch, zlib; from torch.multiprocessing.reductions import reduce_tensor",
    "from multiprocessing.reduction import ForkingPickler; from memsaver._torch.ipc import patches",
    "dumps = lambda value: print(bytes(ForkingPickler.dumps(value)).hex())",
)
TENSORS = (
    "weights", "weights.t()", "weights[3:, ::2]", "weights[2, 5]", "weights.flatten()[7:4099]",
    "weights.view(torch.int16)", "torch.nn.Parameter(weights[1])",
    "torch.nn.Parameter(weights[1], requires_grad=False)", "weights[0].detach().requires_grad_()",
    "weights[:0]", "region.empty((5, 6), torch.float8_e4m3fn).zero_()",
)  # fmt: skip
# Of a second and more, so that what does not wait is seen.
SLEEP = "torch.cuda._sleep(3_000_000_000)"
PATCHES = {"MEMSAVER_PATCHES": "captures,multiprocessing"}


@pytest.fixture(scope="module")
def broker() -> Iterator[Running]:
    with Running(str(4 * GIB), "--device", "cuda:0") as running:
        yield running


@pytest.fixture(scope="module", params=["process", "shared"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def owner(broker: Running, pool: str) -> Iterator[Worker]:
    with Worker(broker, *IMPORTS, MEMSAVER_POOL=pool, **PATCHES) as worker:
        worker.run("region = memsaver.region('weights', 'cuda:0', 'host')")
        worker.run("with region: weights = torch.arange(64 * 4096.0, device='cuda:0').view(64, 4096)")
        yield worker


@pytest.fixture(scope="module")
def other(broker: Running, pool: str) -> Iterator[Worker]:
    with Worker(broker, *IMPORTS, "torch.zeros(1, device='cuda:0')", MEMSAVER_POOL=pool, **PATCHES) as worker:
        yield worker


def send(owner: Worker, other: Worker, what: str) -> None:
    other.run(f"sent = bytes.fromhex({owner.run(f'dumps({what})')!r})")


def hand_over(owner: Worker, other: Worker, what: str, name: str = "got") -> None:
    send(owner, other, what)
    other.run(f"{name} = pickle.loads(sent)")


def test_tensors_arrive_as_they_were(owner: Worker, other: Worker) -> None:
    facts = "print(type({0}), {0}.shape, {0}.stride(), {0}.dtype, {0}.device, {0}.requires_grad, {0}.storage_offset())"
    for what in TENSORS:
        owner.run(f"sending = {what}")
        hand_over(owner, other, "sending")
        assert other.run(facts.format("got")) == owner.run(facts.format("sending")), what
        owner.run("kept = sending.detach().cpu()")
        other.run("kept = got.detach().cpu()")
        bits = "print(zlib.crc32(bytes(kept.contiguous().view(-1).view(torch.uint8).numpy())))"
        assert other.run(bits) == owner.run(bits), what
    # OpenRLHF, verl and vLLM send the pair, and set the seventh value.
    hand_over(owner, other, "reduce_tensor(weights)", "pair")
    other.run("function, args = pair; args = list(args); args[6] = 0; got = function(*args)")
    other.run("assert got[1, 1].item() == 4097")
    owner.run("plain = torch.arange(1000.0, device='cuda:0')")  # torch's own tensors travel as before
    hand_over(owner, other, "[plain, weights[0], plain[10:]]")
    other.run("assert got[0][999].item() == 999 and got[1][5].item() == 5 and got[2][0].item() == 10")
    assert "memsaver" not in owner.run("print(reduce_tensor(plain)[1][7])")
    other.run("del got, pair, args; gc.collect(); torch.cuda.ipc_collect()")
    owner.run("del plain, sending; memsaver.pause(reader_timeout=30); memsaver.resume()")


def test_work_of_both_processes_is_waited_for(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights", "first")
    other.run("first[1] = -1; torch.cuda.synchronize()")
    owner.run(f"assert (weights[1] == -1).all(); {SLEEP}; weights.fill_(5)")
    hand_over(owner, other, "weights")  # the storage is there already
    other.run("assert (got == 5).all() and got.untyped_storage()._cdata == first.untyped_storage()._cdata")
    other.run(f"{SLEEP}; got.fill_(9); del got, first; gc.collect()")
    owner.run("memsaver.pause(reader_timeout=30); memsaver.resume(); assert (weights == 9).all()")
    owner.run(f"{SLEEP}; weights.fill_(7)")
    hand_over(owner, other, "weights")
    other.run("assert (got == 7).all(); del got; gc.collect()")
    owner.run("memsaver.pause(reader_timeout=30); memsaver.resume()")


def test_a_tensor_dropped_in_a_capture_ends_its_lease_after_it(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    other.run("static = torch.zeros(8, device='cuda:0'); graph = torch.cuda.CUDAGraph(); torch.cuda.synchronize()")
    other.run("capture = torch.cuda.graph(graph); capture.__enter__()")
    other.run("static.add_(1); del got; gc.collect(); time.sleep(0.3); static.add_(1)")
    text = owner.fails("memsaver.pause(reader_timeout=0.1)")
    assert text.startswith("AttachedError") and f"(pid {other.pid})" in text
    other.run("capture.__exit__(None, None, None); graph.replay(); assert (static == 2).all()")
    owner.run("memsaver.pause(reader_timeout=30)")
    assert other.fails("pickle.loads(sent)").startswith("RegionPausedError")
    owner.run("memsaver.resume()")
    assert other.fails("pickle.loads(sent)").startswith("ReceiveError")


def test_a_device_is_found_by_its_uuid(broker: Running, owner: Worker, pool: str) -> None:
    if torch.cuda.device_count() < 2 or pool == "shared":
        pytest.skip("needs two CUDA devices, and one kind of pool")
    with Worker(broker, *IMPORTS, CUDA_VISIBLE_DEVICES="1,0") as swapped:
        hand_over(owner, swapped, "weights")
        assert swapped.run("print(got.device, got[1, 1].item())") == "cuda:1 " + owner.run(
            "print(weights[1, 1].item())"
        )
    with Worker(broker, *IMPORTS, CUDA_VISIBLE_DEVICES="1") as without:
        send(owner, without, "weights")
        text = without.fails("pickle.loads(sent)")
        assert text.startswith("ReceiveError") and "GPU-" in text
        assert without.run("print(error.reason)") == "device"


def test_a_killed_receiver_does_not_block_the_owner(owner: Worker, other: Worker) -> None:
    """The last test of a pair of processes."""
    hand_over(owner, other, "weights")
    other.run(f"{SLEEP}; got.fill_(3)")
    owner.send("memsaver.pause(reader_timeout=60)")
    other.kill()
    owner.answer()
