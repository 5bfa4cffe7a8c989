"""Tensors of regions sent by torch.multiprocessing: their contents, leases, and refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.broker_support import Running
from tests.pool_support import Worker, chunks_of, descriptors_of, is_whole, mappings_of, running
from tests.support import MIB, environment, until

CAPACITY = 128 * MIB
IMPORTS = (
    "import gc, torch; from torch.multiprocessing import reductions; from memsaver._torch.ipc import patches, receiver",
    "from multiprocessing.reduction import ForkingPickler",
    "dumps = lambda value: print(bytes(ForkingPickler.dumps(value)).hex())",
    # torch.multiprocessing's functions for CUDA, with storages of the host.
    "torch.cuda._lazy_init = lambda: None",
    """cuda = lambda t: (reductions.rebuild_cuda_tensor, (type(t), t.size(), t.stride(), t.storage_offset(), """
    """type(t._typed_storage()), t.dtype, *(s := t._typed_storage()._share_cuda_())[:4], t.requires_grad, *s[4:]))""",
    "rebuilt = lambda pair: pair[0](*pair[1])",
)


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> str:
    """The source of the owner's chunks: ``"process"``, or the parameter of a test."""
    return str(getattr(request, "param", "process"))


in_both_pools = pytest.mark.parametrize("pool", ["process", "shared"], indirect=True)
in_a_shared_pool = pytest.mark.parametrize("pool", ["shared"], indirect=True)


@pytest.fixture
def broker(pool: str) -> Iterator[Running]:
    """The broker of a shared pool. Without one, only the environment of the processes."""
    if pool == "shared":
        with running(CAPACITY) as started:
            yield started
    else:
        yield SimpleNamespace(environment=environment())  # type: ignore[misc]


@pytest.fixture
def owner(broker: Running, pool: str) -> Iterator[Worker]:
    with Worker(broker, *IMPORTS, MEMSAVER_POOL=pool, MEMSAVER_PATCHES="multiprocessing") as worker:
        worker.run("region = memsaver.region('weights', 'cpu', 'host')")
        worker.run("weights = region.empty((3, 4, 5), torch.float32).copy_(torch.arange(60.0).view(3, 4, 5))")
        yield worker


@pytest.fixture
def other(broker: Running) -> Iterator[Worker]:
    """A receiver, which is no client of a pool, and in which the first receipt prepares torch."""
    with Worker(broker, *IMPORTS, MEMSAVER_POOL="process") as worker:
        yield worker


def send(owner: Worker, other: Worker, what: str) -> None:
    """The other process has the pickled value as ``sent``."""
    other.run(f"sent = bytes.fromhex({owner.run(f'dumps({what})')!r})")


def hand_over(owner: Worker, other: Worker, what: str, name: str = "got") -> None:
    send(owner, other, what)
    other.run(f"{name} = pickle.loads(sent)")


def pause_in_thread(owner: Worker) -> None:
    owner.run("import threading; paused = threading.Thread(target=memsaver.pause); paused.start()")
    until(lambda: owner.run("print(region.state)") == "pausing")


# Contents


@in_both_pools
def test_both_processes_have_the_same_memory(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    other.run("assert torch.equal(got, torch.arange(60.0).view(3, 4, 5)); got[1] = -1")
    owner.run("assert (weights[1] == -1).all() and region.owns(weights.data_ptr()); weights.fill_(7)")
    other.run("assert (got == 7).all(); del got")
    owner.run("memsaver.pause(); memsaver.resume(); assert (weights == 7).all()")


TENSORS = (
    "weights.transpose(0, 2)", "weights[1:, ::2, 3]", "weights[2, 3, 4]", "weights.flatten()[7:19]", "weights.detach()",
    "torch.nn.Parameter(weights[1])", "torch.nn.Parameter(weights[1], requires_grad=False)",
    "weights[0].detach().requires_grad_()", "weights.view(torch.int16)", "weights[:0]",
    "region.empty((5, 6), torch.float8_e4m3fn).zero_()",
)  # fmt: skip


@pytest.mark.parametrize("way", ["host", "cuda"])
def test_tensors_arrive_as_they_were(owner: Worker, other: Worker, way: str) -> None:
    facts = "print(type({0}), {0}.shape, {0}.stride(), {0}.dtype, {0}.requires_grad, {0}.untyped_storage().nbytes())"
    bits = "print(bytes({}.detach().contiguous().view(-1).view(torch.uint8).tolist()).hex())"
    for what in TENSORS:
        owner.run(f"sending = {what}")
        if way == "host":
            hand_over(owner, other, "sending")
        else:
            hand_over(owner, other, "cuda(sending)", "pair")
            other.run("got = rebuilt(pair)")
        for look in (facts, bits):
            assert other.run(look.format("got")) == owner.run(look.format("sending")), what


def test_tensors_of_one_storage_arrive_with_one_storage(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "{'all': weights, 'row': weights[1], 'again': weights}")
    other.run("assert len({each.untyped_storage()._cdata for each in got.values()}) == 1; got['row'].fill_(5)")
    other.run("assert (got['all'][1] == 5).all()")
    hand_over(owner, other, "weights[2]", "more")
    other.run("assert more.untyped_storage()._cdata == got['all'].untyped_storage()._cdata")


def test_other_memory_at_the_same_address_is_another_storage(owner: Worker, other: Worker) -> None:
    """After a pause, and after a free."""
    make = "one = region.empty((1000,), torch.float32).fill_({})"
    owner.run(f"{make.format(1)}; where = one.data_ptr()")
    send(owner, other, "one")
    other.run("old = [sent]")
    owner.run("del one; memsaver.pause(); memsaver.resume()")
    owner.run(f"{make.format(2)}; assert one.data_ptr() == where")
    hand_over(owner, other, "one")
    other.run("assert (got == 2).all(); old.append(sent); del got")
    owner.run("del one")
    until(lambda: owner.run(f"{make.format(3)}; print(one.data_ptr() == where)") == "True")
    hand_over(owner, other, "one")
    other.run("assert (got == 3).all()")
    for each in range(2):
        assert other.fails(f"pickle.loads(old[{each}])").startswith("ReceiveError")


@in_both_pools
def test_a_storage_of_several_chunks_comes_in_several_messages(owner: Worker, other: Worker) -> None:
    owner.run("from memsaver._torch.ipc import server; server.CHUNKS_AT_ONCE = 1")
    owner.run("large = region.empty((75 << 18,), torch.float32); large.copy_(torch.arange(75 << 18))")
    assert int(owner.run("print(len(region._core.chunks))")) > 2
    hand_over(owner, other, "large")
    other.run("assert torch.equal(got, torch.arange(75 << 18).float()); del got")
    owner.run("memsaver.pause(reader_timeout=30)")


def test_torch_passes_the_handles_as_its_own(owner: Worker, other: Worker) -> None:
    """SGLang replaces the seventh value, vLLM and verl set it, and all of them call the function themselves. Some
    serializers know no subclasses of bytes.
    """
    owner.run("pair = cuda(weights); plain = [bytes(each) if isinstance(each, bytes) else each for each in pair[1]]")
    hand_over(owner, other, "(pair, plain)", "pair")
    other.run("args = list(pair[0][1]); args[6] = 5; got = pair[0][0](*args); assert got.sum() == 1770; got.fill_(3)")
    other.run("more = reductions.rebuild_cuda_tensor(*pair[1]); assert (more == 3).all()")
    owner.run("assert (weights == 3).all()")
    # A second send of the storage: torch releases the counter of a storage that it has.
    hand_over(owner, other, "cuda(weights[1])", "pair")
    other.run("row = rebuilt(pair); assert row.untyped_storage()._cdata == got.untyped_storage()._cdata")
    owner.run("del weights, pair, plain")
    other.run("del got, more; gc.collect(); assert (row == 3).all()")
    assert int(owner.run("print(region.allocated_bytes)")) > 0
    other.run("del row, args, pair")
    until(lambda: owner.run("print(region.allocated_bytes)") == "0")


def test_a_process_receives_its_own_storage(owner: Worker) -> None:
    owner.run("got = pickle.loads(bytes(ForkingPickler.dumps(weights)))")
    owner.run("assert got.data_ptr() == weights.data_ptr(); pair = cuda(weights); assert rebuilt(pair).sum() == 1770")
    owner.run("memsaver.pause(reader_timeout=5)")


# Other tensors


def test_a_process_receives_its_own_storage_while_another_thread_pauses(owner: Worker) -> None:
    owner.run("data = bytes(ForkingPickler.dumps(weights)); reductions.shared_cache.clear()")
    owner.run("sent = patches._sender.sent; claim = sent.claim; end = memsaver.pause")
    owner.run("sent.claim = lambda *of: (claim(*of), end())[0]; got = pickle.loads(data); sent.claim = claim")
    assert "is paused" in owner.fails("pickle.loads(data)")
    owner.run("memsaver.resume(); assert got.sum() == 1770 and got.data_ptr() == weights.data_ptr()")


def test_tensors_outside_of_regions_are_sent_by_torch(owner: Worker) -> None:
    owner.run("plain = torch.ones(4); kind, args = reductions.reduce_storage(plain.untyped_storage())")
    assert owner.run("print(kind.__module__, kind.__name__)") == "torch.multiprocessing.reductions rebuild_storage_fd"
    owner.run("kind, args = reductions.reduce_storage(torch.empty(0).untyped_storage())")
    assert owner.run("print(kind.__name__)") == "rebuild_storage_empty"
    owner.run("raised(plain.untyped_storage()._share_cuda_, RuntimeError)")
    # In a forked child, as workers of a DataLoader do.
    owner.run("child = os.fork() or (ForkingPickler.dumps(plain), os._exit(0))")
    assert owner.run("print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))") == "0"


def test_reductions_that_are_registered_again_keep_regions_in_place(owner: Worker, other: Worker) -> None:
    owner.run("reductions.init_reductions()")
    hand_over(owner, other, "weights")
    other.run("assert got.sum() == 1770; got.zero_()")
    owner.run("assert (weights == 0).all() and region.owns(weights.data_ptr())")


def test_a_forked_child_cannot_receive_and_frees_nothing_of_its_parent(owner: Worker, other: Worker) -> None:
    """Another thread may have held the lock of torch's allocator at the fork."""
    hand_over(owner, other, "weights")
    other.run("read, write = os.pipe()")
    other.run("child = os.fork() or (os.write(write, str(raised(lambda: pickle.loads(sent))).encode()), os._exit(0))")
    assert "forked" in other.run("print(os.read(read, 10000).decode())")
    # Memory of a receiver that could not be unmapped.
    other.run("import weakref; memory = type('Memory', (), {})(); weak = weakref.ref(memory)")
    other.run("patches._receiver._mapped.append(memory); del memory")
    other.run("again = os.fork() or os._exit(weak() is None)")
    assert other.run("print([os.waitpid(each, 0)[1] for each in (child, again)])") == "[0, 0]"
    other.run("assert got.sum() == 1770; del got")
    send(owner, other, "weights")
    owner.run("weak = reductions.StorageWeakRef(weights.untyped_storage()); del weights; gc.collect()")
    # Its thread's frame would stay in the child, with all that it refers to.
    owner.run("patches._sender.stop(); patches._sender.thread.join()")
    owner.run("child = os.fork() or (gc.collect(), os._exit(weak.expired()))")
    assert owner.run("print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), weak.expired())") == "0 False"


def test_the_same_pid_in_another_container_is_another_process(owner: Worker, other: Worker) -> None:
    other.run("memsaver.configure(patches='multiprocessing'); own = memsaver.region('own', 'cpu').empty((4,))")
    other.run("ForkingPickler.dumps(own)")  # it has sent tensors too
    other.run(f"import types; patches.os = types.SimpleNamespace(getpid=lambda: {owner.pid})")
    hand_over(owner, other, "[weights, weights[1]]")
    other.run("assert got[0].sum() == 1770; more = pickle.loads(sent)")


def test_a_received_tensor_is_not_sent_on(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    for call in ("ForkingPickler.dumps(got[1])", "cuda(got)"):
        assert "clone the tensor before sending it on" in other.fails(call)
    other.run("bytes(ForkingPickler.dumps(got.clone())); del got, error")
    owner.run("memsaver.pause(reader_timeout=30)")


# Leases


def test_a_pause_waits_for_the_receiver_and_goes_on(broker: Running, owner: Worker, other: Worker) -> None:
    """Nobody receives meanwhile, and the pause of another region does not wait."""
    owner.run("kv = memsaver.region('kv', 'cpu'); cache = kv.empty((16,), torch.float32)")
    hand_over(owner, other, "weights")
    owner.run("memsaver.pause('kv', reader_timeout=0.1)")
    with Worker(broker, *IMPORTS, MEMSAVER_POOL="process") as third:
        send(owner, third, "weights")
        pause_in_thread(owner)
        text = third.fails("pickle.loads(sent)")
        assert text.startswith("RegionPausedError") and "'weights'" in text
        assert third.run("print(repickled(error).state)") == "pausing"
        other.run("assert got.sum() == 1770; got.fill_(2); del got")
        owner.run("paused.join(); assert region.state == 'paused'")
        text = third.fails("pickle.loads(sent)")
        assert text.startswith("RegionPausedError") and "have to be sent again" in text
    owner.run("memsaver.resume(); assert (weights == 2).all()")


@pytest.mark.parametrize(
    "move",
    [
        "memsaver.pause('weights', reader_timeout=0.1)",
        "memsaver.switch(pause='weights', resume='coming', reader_timeout=0.1)",
        "memsaver.pause('weights', timeout=0.1, reader_timeout=1e9)",
        "memsaver.transitions.prepare_pause('weights', reader_timeout=0.1)",
    ],
    ids=["pause", "switch", "whole", "prepare_pause"],
)
def test_a_pause_that_times_out_names_the_receivers(owner: Worker, other: Worker, move: str) -> None:
    hand_over(owner, other, "[weights, region.empty((4,), torch.float32)]")
    owner.run("coming = memsaver.region('coming', 'cpu'); coming.pause()")
    text = owner.fails(move)
    assert text.startswith("AttachedError") and f"(pid {other.pid})" in text and "'weights'" in text
    assert text.endswith(" (stage 'readers'); nothing has changed")
    assert owner.run("e = repickled(error); print(e.tag, e.stage, e.holders)").startswith(
        f"weights readers [({other.pid}, "
    )
    assert owner.run("print(region.state, coming.state)") == "active paused"
    send(owner, other, "weights")  # it goes on as before
    other.run("again = pickle.loads(sent); assert again.sum() == 1770; del got, again")
    owner.run(move.replace("0.1", "30") + (".commit()" if "prepare" in move else ""))
    assert owner.run("print(region.state)") == "paused"


def test_a_region_that_others_are_attached_to_is_not_closed(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    owner.run("del weights")
    assert "'weights'" in owner.fails("region.close()")
    other.run("assert got.sum() == 1770; del got")
    # The owner learns of the end of an attachment a moment later.
    until(lambda: owner.run("with contextlib.suppress(memsaver.Error): region.close(); print('closed')") == "closed")
    assert owner.fails("print(region.state)") == "Error: region 'weights' was closed"


def test_a_killed_receiver_does_not_block_the_owner(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    owner.send("memsaver.pause(reader_timeout=60)")
    other.kill()
    owner.answer()


def test_the_pause_waits_for_a_child_of_a_killed_receiver(owner: Worker, other: Worker) -> None:
    """Kernels of the dead process may still write to the owner's memory."""
    hand_over(owner, other, "weights")
    child = int(other.run("print(fork_sleeper())"))
    try:
        other.kill()
        text = owner.fails("memsaver.pause(reader_timeout=0.3)")
        assert text.startswith("AttachedError") and f"(pid {other.pid})" in text
        owner.send("memsaver.pause(timeout=60)")
    finally:
        os.kill(child, signal.SIGKILL)
    owner.answer()


@in_a_shared_pool
def test_the_memory_of_a_killed_owner_stays_with_the_receiver(broker: Running, owner: Worker, other: Worker) -> None:
    """The receiver's process has no part in the pool. Other processes get all other memory of the device."""
    hand_over(owner, other, "weights")
    with Worker(broker, "region = memsaver.region('other', 'cpu')") as claimant:  # for which the pool keeps idle chunks
        owner.kill()
        until(lambda: [row["pid"] for row in broker.status()["clients"]] == [claimant.pid])
        claimant.run(f"claim({2 * MIB})")
        other.run("assert torch.equal(got, torch.arange(60.0).view(3, 4, 5)); got.fill_(1)")
        claimant.run(f"claim({CAPACITY})")
        other.run("assert (got == 1).all(); del got")
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and str(owner.pid) in text
    assert other.run("print(repickled(error).reason, error.pid)") == f"exited {owner.pid}"
    until(lambda: chunks_of(other.pid) == 0)


@in_a_shared_pool
def test_a_lease_outlives_the_broker(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    broker.kill()
    other.run("got.fill_(4)")
    owner.run("assert (weights == 4).all()")
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 1)
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    other.run("got.fill_(5); del got")
    owner.run("memsaver.pause(reader_timeout=30); memsaver.resume(memory_timeout=10); assert (weights == 5).all()")
    until(lambda: is_whole(broker.status()))


@in_a_shared_pool
def test_memory_of_a_broker_that_has_ended_is_sent_after_a_resume(
    broker: Running, owner: Worker, other: Worker
) -> None:
    send(owner, other, "weights")
    broker.kill()
    assert other.fails("pickle.loads(sent)").startswith("BrokerError: no broker")
    broker.start()
    mapped = int(owner.run("print(region.mapped_bytes)"))
    until(lambda: [row["held_bytes"] for row in broker.status()["clients"]] == [mapped])
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("BrokerError") and "from a broker that has ended: pause and resume the region" in text
    assert other.run("print(repickled(error).path)") == str(broker.path)
    until(lambda: owner.run("print(len(patches._sender.claims))") == "0")
    owner.run("memsaver.pause(reader_timeout=0); memsaver.resume(memory_timeout=10)")
    hand_over(owner, other, "weights")
    other.run("assert got.sum() == 1770; got.fill_(5); del got")
    owner.run("assert (weights == 5).all(); memsaver.pause(reader_timeout=30)")


def test_a_storage_is_kept_from_each_send_to_its_receipt_and_by_receivers(owner: Worker, other: Worker) -> None:
    send(owner, other, "weights")  # which the owner keeps
    other.run("for _ in range(3): got = pickle.loads(sent); assert got.sum() == 1770; del got; gc.collect()")
    owner.run("del weights; block = region.empty((1 << 20,), torch.float32).fill_(3)")
    send(owner, other, "block")
    other.run("first = sent")
    send(owner, other, "block[1:]")
    owner.run("del block; gc.collect()")
    other.run("got = pickle.loads(first); del got; gc.collect()")
    until(lambda: owner.run("print(len(patches._sender.claims))") == "0")
    other.run("got = pickle.loads(sent); again = pickle.loads(sent); assert (got == 3).all()")
    assert int(owner.run("print(region.allocated_bytes)")) == 4 << 20
    other.run("del got, again")
    until(lambda: owner.run("print(region.allocated_bytes)") == "0")
    assert other.fails("pickle.loads(sent)").startswith("ReceiveError")
    assert other.run("print(error.reason)") == "unknown"


def test_a_storage_over_the_memory_of_another_is_sent_as_one_with_it(owner: Worker, other: Worker) -> None:
    """torch.from_dlpack() makes a second storage over the memory of a tensor."""
    owner.run("second = torch.from_numpy(weights.numpy())")
    send(owner, other, "second")
    other.run("first = sent")
    owner.run("del second; gc.collect()")  # the send keeps it
    send(owner, other, "weights")
    other.run("got = [pickle.loads(first), pickle.loads(sent)]; assert all(each.sum() == 1770 for each in got)")
    other.run("assert got[0].data_ptr() == got[1].data_ptr(); del got")
    owner.run("memsaver.pause(reader_timeout=30)")


def test_what_was_sent_and_not_received_is_kept_until_a_pause(owner: Worker, other: Worker) -> None:
    owner.run("del weights; block = region.empty((1 << 20,), torch.float32).fill_(3)")
    send(owner, other, "block")
    owner.run("del block; gc.collect()")
    assert int(owner.run("print(region.allocated_bytes)")) == 4 << 20
    owner.run("memsaver.pause(); memsaver.resume()")
    assert int(owner.run("print(region.allocated_bytes)")) == 0
    assert other.fails("pickle.loads(sent)").startswith("ReceiveError")
    assert other.run("print(error.reason)") == "stale"


def test_a_receipt_that_fails_does_not_keep_the_storage(owner: Worker, other: Worker) -> None:
    before = owner.run("print(region.allocated_bytes)")
    owner.run("block = region.empty((1 << 20,), torch.float32).fill_(3)")
    send(owner, other, "block")
    # As after a pause and a resume between the claim and the loan.
    owner.run("lend = _core.lend; _core.lend = lambda core, span, residence, *of: lend(core, span, residence + 1, *of)")
    text = other.fails("pickle.loads(sent)")
    assert "was paused and resumed since the tensor was sent" in text
    owner.run("_core.lend = lend; del block; gc.collect()")
    assert owner.run("print(region.allocated_bytes)") == before


def test_nothing_is_left_of_many_receipts(owner: Worker, other: Worker) -> None:
    def state() -> tuple[int, ...]:
        return tuple(look(each.pid) for each in (owner, other) for look in (descriptors_of, chunks_of, mappings_of))

    def receive(times: int) -> None:
        for _ in range(times):
            hand_over(owner, other, "[weights, region.empty((100,), torch.float32).fill_(1)]")
            other.run("assert got[0].sum() == 1770 and got[1].sum() == 100; del got, sent; gc.collect()")
        until(lambda: other.run("print(patches._receiver._received)") == "set()")
        owner.run("memsaver.pause(reader_timeout=30); memsaver.resume()")
        # A receiver releases its claim after it has left the memory, for which the pause waits.
        left = "print(len(patches._sender.claims), len(patches._sender.sent._by_token))"
        until(lambda: owner.run(left) == "0 0")

    receive(3)
    before = state()
    receive(20)
    until(lambda: all(now <= then + 4 for now, then in zip(state(), before)))


def test_memory_that_the_driver_does_not_unmap_keeps_its_lease(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    other.run("from tests import controls; controls.arm(1, 'error', 'cuMemUnmap'); del got; gc.collect()")
    ends = lambda: owner.run("print(len(patches._sender.claims))") == "0"  # noqa: E731
    until(lambda: other.run("print(len(patches._receiver._mapped))") == "1" or ends())
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")


# Refusals


def test_paused_frozen_and_earlier_contents_are_not_sent(owner: Worker, other: Worker) -> None:
    owner.run("frozen = memsaver.region('frozen', 'cpu', 'host', frozen=True); f = frozen.empty((4,)).fill_(1)")
    hand_over(owner, other, "f")
    other.run("assert got.sum() == 4; del got")
    send(owner, other, "weights")
    owner.run("memsaver.pause(reader_timeout=30)")
    for call in ("ForkingPickler.dumps(weights)", "cuda(weights)"):
        text = owner.fails(call)
        assert text.startswith("RegionPausedError") and "send its tensors" in text
    assert other.fails("pickle.loads(sent)").startswith("RegionPausedError")
    owner.run("memsaver.resume()")
    assert "thaw()" in owner.fails("ForkingPickler.dumps(f)")
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and "residence 1, now 2" in text
    assert other.run("print(repickled(error).reason, error.pid)") == f"stale {owner.pid}"
    hand_over(owner, other, "weights")
    other.run("assert got.sum() == 1770")


def test_a_wrong_token_or_device_is_refused(owner: Worker, other: Worker) -> None:
    send(owner, other, "weights")
    token = owner.run("print(next(iter(patches._sender.sent._by_token)))")
    text = other.fails(f"pickle.loads(sent.replace({token!r}.encode(), b'0' * 32))")
    assert text.startswith("ReceiveError") and "the token is wrong" in text
    uuid = owner.run("print(_core.device_uuid('cpu'))")
    text = other.fails(f"pickle.loads(sent.replace({uuid!r}.encode(), {'x' * len(uuid)!r}.encode()))")
    assert text.startswith("ReceiveError") and "x" * len(uuid) in text and "does not see" in text
    assert other.run("print(error.reason)") == "device"
    owner.run("memsaver.pause(reader_timeout=0)")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(broker: Running, owner: Worker, other: Worker) -> None:
    """By the receiver, by the owner, and where another user has the name of an owner that has exited."""
    send(owner, other, "weights")
    other.run("_core.device_uuid('cpu'); os.seteuid(65534)")
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and "expected user" in text
    assert other.run("print(error.reason)") == "user"
    other.run("from memsaver.broker import caller; import types; own = caller.os")
    other.run("caller.os = types.SimpleNamespace(geteuid=lambda: 0, getpid=os.getpid)")
    assert f"process {other.pid} belongs to user 65534" in other.fails("pickle.loads(sent)")
    owner.run("memsaver.pause(reader_timeout=0)")
    address = owner.run("print(patches._sender.address())")
    owner.kill()
    other.run("os.seteuid(0); caller.os = own")
    with Worker(broker, "from memsaver.broker import protocol; listener = protocol.new_socket()") as thief:
        thief.run(f"os.seteuid(65534); listener.bind(chr(0) + {address!r}); listener.listen(1)")
        text = other.fails("pickle.loads(sent)")
        assert text.startswith("ReceiveError") and "belongs to user 65534" in text


def test_an_owner_that_does_not_answer_is_named_and_can_be_asked_again(owner: Worker, other: Worker) -> None:
    send(owner, other, "weights")
    other.run("pickle.loads(sent); gc.collect(); receiver.ANSWER_S = 0.2")
    owner.stop()
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and f"process {owner.pid}, did not answer within 0.2 s" in text
    assert other.run("print(error.reason)") == "timeout"
    owner.go_on()
    other.run("receiver.ANSWER_S = 60; got = pickle.loads(sent); assert got.sum() == 1770; del got")
    owner.run("memsaver.pause(reader_timeout=30)")  # the claim that got no answer has ended too


@pytest.fixture
def second(broker: Running, pool: str) -> Iterator[Worker]:
    """Another owner."""
    with Worker(broker, *IMPORTS, MEMSAVER_POOL=pool, MEMSAVER_PATCHES="multiprocessing") as worker:
        worker.run("region = memsaver.region('second', 'cpu', 'host')")
        worker.run("block, more = (region.empty((8,), torch.float32).fill_(2) for _ in range(2))")
        yield worker


def test_an_owner_that_does_not_answer_delays_nothing_of_others(owner: Worker, second: Worker, other: Worker) -> None:
    hand_over(second, other, "block", "block")
    hand_over(owner, other, "weights", "rest")
    owner.run("late = region.empty((4,), torch.float32).fill_(3)")
    send(owner, other, "late")
    other.run("first = sent; receiver.ANSWER_S = 60; late = []")
    send(second, other, "more")
    owner.stop()
    # A thread that waits for the answer of a stopped owner.
    other.run("import threading; waiting = threading.Thread(target=lambda: late.append(pickle.loads(first)))")
    other.run("waiting.start()")
    until(lambda: other.run("print(any(each.lock.locked() for each in patches._receiver._owners.values()))") == "True")
    other.run("got = pickle.loads(sent); assert got.sum() == 16; del got")  # a receipt
    other.run("del rest; gc.collect(); time.sleep(0.1); del block; gc.collect()")  # releases
    second.run("memsaver.pause(reader_timeout=20)")
    other.run("assert waiting.is_alive()")
    owner.go_on()
    other.run("waiting.join(); assert late[0].sum() == 12; late.clear()")
    owner.run("memsaver.pause(reader_timeout=30)")  # the release was sent later


def test_a_process_without_free_descriptors_raises_and_sends_its_releases_later(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "[weights, region.empty((4,), torch.float32)]")
    other.run("from memsaver.broker import protocol; import errno; socket_of, tries = protocol.new_socket, []")
    other.run("def exhausted(): tries.append(1); raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))")
    other.run("protocol.new_socket = exhausted; [each.close() for each in patches._receiver._owners.values()]")
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and "Too many open files" in text
    assert other.run("print(repickled(error).reason, error.pid)") == f"exhausted {owner.pid}"
    other.run("del got, error; gc.collect()")
    until(lambda: other.run("print(len(tries) > 2)") == "True")
    other.run("protocol.new_socket = socket_of")
    owner.run("memsaver.pause(reader_timeout=30)")


def test_an_owner_without_free_descriptors_refuses_and_can_be_asked_again(owner: Worker, other: Worker) -> None:
    send(owner, other, "weights")
    owner.run("import resource; limit = resource.getrlimit(resource.RLIMIT_NOFILE)")
    owner.run("resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, limit[1]))")
    text = other.fails("pickle.loads(sent)")
    assert text.startswith("ReceiveError") and f"process {owner.pid} is out of file descriptors" in text
    assert other.run("print(error.reason)") == "exhausted"
    owner.run("resource.setrlimit(resource.RLIMIT_NOFILE, limit)")
    other.run("got = pickle.loads(sent); assert got.sum() == 1770")


def test_the_sockets_of_owners_that_have_exited_are_closed(owner: Worker, second: Worker, other: Worker) -> None:
    hand_over(second, other, "block")
    other.run("del got; [old] = patches._receiver._owners.values()")
    # A release after the end of the owner would look for a connection again.
    until(lambda: second.run("print(len(patches._sender.claims))") == "0")
    second.kill()
    other.run("until(lambda: old._caller.has_ended)")
    hand_over(owner, other, "weights")
    other.run("assert len(patches._receiver._owners) == 1")


def test_nothing_is_left_of_an_owner_that_exits_before_its_receiver_drops_the_tensor(
    owner: Worker, other: Worker
) -> None:
    hand_over(owner, other, "weights")
    owner.kill()
    other.run("assert got.sum() == 1770; del got; gc.collect()")
    until(lambda: other.run("print(len(patches._receiver._owners))") == "0")


def test_each_failing_call_of_the_receivers_driver_leaves_nothing(owner: Worker, other: Worker) -> None:
    owner.run("large = region.empty((9 << 18,), torch.float32).fill_(3)")
    other.run("_core.device_uuid('cpu'); from tests import controls")
    send(owner, other, "large")
    for nth in range(1, 100):
        other.run(f"controls.arm({nth}); failed = None")
        other.run("with contextlib.suppress(memsaver.Error): failed = True; got = pickle.loads(sent); failed = False")
        reached = other.run(f"print(controls.calls() >= {nth}); controls.disarm()")
        if reached == "False":
            break
        assert other.run("print(failed)") == "True"
    assert nth > 3
    other.run("assert (got == 3).all(); del got")
    owner.run("memsaver.pause(reader_timeout=30)")
    until(lambda: chunks_of(other.pid) == 0)


def test_strangers_do_not_disturb_the_owner(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    address, claim = owner.run("print(patches._sender.address(), *patches._sender.claims)").split()
    with Worker(broker, "from memsaver.broker import caller", MEMSAVER_POOL="process") as third:
        third.run(f"files = [_core.sentinel()]; address = chr(0) + {address!r}")
        for message in ("'usage', 1", "'chunks', 1, 5, 0", "'receive', 1, 2, 3", f"'release', {claim}"):
            third.run("stranger = caller.Caller(address, '', 10.0, files)")
            third.run(f"stranger.tell({message})")
            assert third.run("print(raised(lambda: stranger.answer('', 1), caller.RefusedError).code)") == "malformed"
    assert owner.fails("memsaver.pause(reader_timeout=0)").startswith("AttachedError")
    other.run("assert got.sum() == 1770; del got")
    owner.run("memsaver.pause(reader_timeout=30)")
