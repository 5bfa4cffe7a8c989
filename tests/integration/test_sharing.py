"""Memory of one process in another: its contents, the waits for each other, and the death of either process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.broker_support import Running
from tests.pool_support import Worker, descriptors_of, is_whole, mappings_of, running
from tests.support import MIB, until

CAPACITY = 64 * MIB


@pytest.fixture
def broker() -> Iterator[Running]:
    with running(CAPACITY) as started:
        yield started


@pytest.fixture
def owner(broker: Running) -> Iterator[Worker]:
    with Worker(broker, "import torch; from memsaver import share, attach") as worker:
        worker.run("region = memsaver.region('weights', backup='host')")
        worker.run("weights = region.empty((3, 4, 5), torch.float32).copy_(torch.arange(60.0).view(3, 4, 5))")
        yield worker


@pytest.fixture
def other(broker: Running) -> Iterator[Worker]:
    with Worker(broker, "import torch; from memsaver import share, attach") as worker:
        yield worker


def hand_over(owner: Worker, other: Worker, what: str) -> None:
    """Shares something; the other process has the token, and is attached as ``tensors`` until ``leave()``."""
    pass_token(owner, other, what)
    other.run("attached = contextlib.ExitStack(); tensors = attached.enter_context(attach(token))")


def pass_token(owner: Worker, other: Worker, what: str) -> None:
    text = owner.run(f"token = share({what}); print(pickle.dumps(token).hex())")
    other.run(f"token = pickle.loads(bytes.fromhex({text!r}))")


def attached_bytes(broker: Running, worker: Worker) -> int:
    return int(broker.row(worker.pid)["attached_bytes"])


# Contents


def test_writes_of_owner_and_attached_process_are_shared(owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    other.run("assert torch.equal(tensors, torch.arange(60.0).view(3, 4, 5)); tensors[1] = -1")
    owner.run("assert (weights[1] == -1).all(); weights.fill_(7)")
    other.run("assert (tensors == 7).all()")
    other.run("attached.close()")
    owner.run("assert (weights == 7).all(); memsaver.pause(); memsaver.resume(); assert (weights == 7).all()")


def test_views_of_a_fused_tensor(owner: Worker, other: Worker) -> None:
    owner.run("qkv = region.empty((48, 16), torch.bfloat16).zero_(); q, k, v = qkv.split((16, 16, 16))")
    owner.run("grid = region.empty((8, 6), torch.int64).zero_(); column = grid[1:7:2, 4]; turned = grid.t()[2:4]")
    owner.run("scalar = region.empty((), torch.float64).fill_(0.25); one = grid[5, 5]")
    names = ("q", "k", "v", "column", "turned", "scalar", "one")
    hand_over(owner, other, "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}")
    assert owner.run("print(sorted(token.names))") == str(sorted(names))
    for name in names:
        expected = owner.run(f"print({name}.shape, {name}.stride(), {name}.dtype)")
        assert other.run(f"t = tensors[{name!r}]; print(t.shape, t.stride(), t.dtype)") == expected
    other.run("tensors['q'].fill_(1); tensors['k'].fill_(2); tensors['v'].fill_(3); tensors['column'].fill_(4)")
    other.run("tensors['turned'].add_(5); assert tensors['scalar'].item() == 0.25; tensors['one'].fill_(9)")
    owner.run("assert (q == 1).all() and (k == 2).all() and (v == 3).all()")
    owner.run("expected = torch.zeros(8, 6, dtype=torch.int64); expected[1:7:2, 4] = 4; expected.t()[2:4] += 5")
    owner.run("expected[5, 5] = 9; assert torch.equal(grid, expected)")
    other.run("attached.close()")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64", "uint8", "float16"])
def test_every_type_arrives_bit_by_bit(owner: Worker, other: Worker, dtype: str) -> None:
    owner.run(f"typed = region.empty((64, 4), torch.{dtype}); bits = typed.view(torch.uint8)")
    owner.run("bits.copy_(torch.arange(bits.numel()).remainder(2).view(bits.shape))")
    hand_over(owner, other, "typed")
    other.run("bits = tensors.view(torch.uint8); assert torch.equal(bits.flatten() % 2, bits.flatten())")
    assert other.run("print(tensors.dtype, bits.sum().item())") == owner.run("print(typed.dtype, bits.sum().item())")
    other.run("del bits; attached.close()")


def test_thousands_of_tensors_are_shared_at_once(owner: Worker, other: Worker, broker: Running) -> None:
    owner.run("block = region.empty((3000, 700), torch.float32); block.copy_(torch.arange(3000.0)[:, None])")
    hand_over(owner, other, "{f'layer.{n}.weight': row for n, row in enumerate(block)}")
    other.run("assert len(tensors) == 3000 and all((t == n).all() for n, t in enumerate(tensors.values()))")
    other.run("[t.neg_() for t in tensors.values()]; attached.close()")
    owner.run("assert torch.equal(block, -torch.arange(3000.0)[:, None].expand(3000, 700)); memsaver.pause()")
    until(lambda: is_whole(broker.status()))


def test_tensors_of_several_regions_are_shared_together(owner: Worker, other: Worker) -> None:
    owner.run("buffers = memsaver.region('buffers'); more = buffers.empty((1000, 1000), torch.float32).fill_(3)")
    hand_over(owner, other, "{'one': weights, 'two': more}")
    other.run("assert tensors['one'].sum() == 1770 and (tensors['two'] == 3).all(); tensors['two'].fill_(4)")
    assert owner.fails("memsaver.pause('buffers', reader_timeout=0.05)").startswith("AttachedError")
    assert owner.fails("memsaver.pause('weights', reader_timeout=0.05)").startswith("AttachedError")
    other.run("attached.close()")
    owner.run("assert (more == 4).all(); memsaver.pause()")


def test_a_pickled_token_is_small(owner: Worker, other: Worker) -> None:
    owner.run("block = region.empty((100, 700), torch.float32)")
    assert int(owner.run("print(len(pickle.dumps(share(weights))))")) < 1000
    assert int(owner.run("print(len(pickle.dumps(share({str(n): row for n, row in enumerate(block)}))))")) < 20_000
    assert owner.run("t = share(weights); print(pickle.loads(pickle.dumps(t)) == t, t.names, t.pid)") == (
        f"True ('',) {owner.pid}"
    )


def test_a_process_can_attach_to_its_own_region(owner: Worker) -> None:
    owner.run("attached = contextlib.ExitStack(); tensors = attached.enter_context(attach(share(weights)))")
    owner.run("assert tensors.data_ptr() != weights.data_ptr(); tensors.fill_(5); assert (weights == 5).all()")
    assert owner.fails("memsaver.pause(reader_timeout=0.05)").startswith("AttachedError")
    owner.run("attached.close(); memsaver.pause()")


def test_a_process_whose_own_memory_is_the_drivers_can_attach(broker: Running, owner: Worker) -> None:
    with Worker(broker, "import torch; from memsaver import attach", MEMSAVER_POOL="process") as other:
        hand_over(owner, other, "weights")
        other.run("tensors.fill_(8); attached.close()")
        other.run("assert not _core.in_pool('cpu'); held = hold('own', PAGE)")
        assert broker.row(other.pid)["held_bytes"] == 0
        owner.run("assert (weights == 8).all(); memsaver.pause()")


def test_the_tensors_are_empty_after_the_block(owner: Worker, other: Worker) -> None:
    pass_token(owner, other, "{'a': weights, 'b': weights[0]}")
    other.run("attached = contextlib.ExitStack(); tensors = attached.enter_context(attach(token))")
    other.run("kept = dict(tensors); attached.close()")
    assert other.run("print([t.numel() for t in kept.values()], kept['a'].dtype)") == "[0, 0] torch.float32"


def test_an_exception_in_the_block_comes_out_and_ends_the_lease(broker: Running, owner: Worker, other: Worker) -> None:
    pass_token(owner, other, "weights")
    other.run("held = contextlib.ExitStack(); held.enter_context(contextlib.suppress(KeyError))")
    other.run("held.enter_context(attach(token)); held.push(lambda *_: False)")
    assert attached_bytes(broker, other) > 0
    other.run("import sys; e = KeyError('mine'); assert held.__exit__(KeyError, e, None)")
    until(lambda: attached_bytes(broker, other) == 0)
    owner.run("memsaver.pause(reader_timeout=5)")


# Leases


def test_the_owners_pause_waits_for_the_attachment_and_goes_on(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    assert attached_bytes(broker, other) > 0
    owner.send("memsaver.pause(reader_timeout=60)")
    until(lambda: region_state(broker, owner) == "pausing")
    other.run("assert tensors.sum() == 1770; tensors.fill_(2); attached.close()")
    owner.answer()
    owner.run("memsaver.resume(); assert (weights == 2).all()")


def region_state(broker: Running, worker: Worker) -> str:
    return str(broker.row(worker.pid)["regions"][0]["state"])


@pytest.mark.parametrize("move", ["pause", "switch", "prepare_pause", "whole"])
def test_a_pause_that_times_out_names_the_attached_processes(owner: Worker, other: Worker, move: str) -> None:
    hand_over(owner, other, "weights")
    owner.run("coming = memsaver.region('coming'); coming.pause()")
    moves = {
        "pause": "memsaver.pause('weights', reader_timeout=0.1)",
        "switch": "memsaver.switch(pause='weights', resume='coming', reader_timeout=0.1)",
        "whole": "memsaver.pause('weights', timeout=0.1, reader_timeout=1e9)",
        "prepare_pause": "memsaver.transitions.prepare_pause('weights', reader_timeout=0.1)",
    }
    text = owner.fails(moves[move])
    assert text.startswith("AttachedError") and f"(pid {other.pid})" in text and "'weights'" in text
    assert text.endswith(" (stage 'readers'); nothing has changed")
    assert owner.run("e = repickled(error); print(e.tag, e.stage, e.holders)").startswith(
        f"weights readers [({other.pid}, "
    )
    assert owner.run("print(region.state, coming.state)") == "active paused"
    owner.run("weights.add_(1); region.empty((10,), torch.float32)")
    other.run("assert tensors.sum() == 1830; attached.close()")
    owner.run(moves[move].replace("0.1", "10") + (".commit()" if move == "prepare_pause" else ""))
    assert owner.run("print(region.state)") == "paused"


def test_a_region_that_others_are_attached_to_is_not_closed(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    owner.run("del weights")
    assert "'weights'" in owner.fails("region.close()")
    other.run("assert tensors.sum() == 1770; attached.close()")
    owner.run("import contextlib")
    # The owner learns of the end of an attachment a moment later, from the broker.
    until(lambda: owner.run("with contextlib.suppress(memsaver.Error): region.close(); print('closed')") == "closed")
    assert owner.fails("print(region.state)") == "Error: region 'weights' was closed"
    owner.run("weights = memsaver.region('weights', backup='host').empty((2,), torch.float32)")
    until(lambda: is_whole(broker.status()))


def test_bytes_of_a_pool_client_outside_of_regions_are_unknown(owner: Worker) -> None:
    text = owner.fails("region.empty((1 << 40,), torch.uint8)")
    assert text.startswith("OutOfMemoryError") and ", outside of regions an unknown amount; " in text
    assert owner.run("print(error.outside_bytes)") == "None"


def test_a_killed_attached_process_does_not_block_the_owner(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    owner.send("memsaver.pause(reader_timeout=60)")
    until(lambda: region_state(broker, owner) == "pausing")
    other.kill()
    owner.answer()
    until(lambda: is_whole(broker.status()))


@pytest.mark.parametrize("broker_dies", [False, True])
def test_the_owners_pause_waits_for_a_child_of_the_attached_process(
    broker: Running, owner: Worker, other: Worker, broker_dies: bool
) -> None:
    """Kernels of the dead process may still write to the owner's memory."""
    hand_over(owner, other, "weights")
    child = int(other.run("print(fork_sleeper())"))
    try:
        if broker_dies:
            broker.kill()
            other.kill()
            broker.start()
            until(lambda: len(broker.status()["clients"]) == 1)
        else:
            other.kill()
        text = owner.fails("memsaver.pause(reader_timeout=0.3)")
        assert text.startswith("AttachedError") and f"(pid {other.pid})" in text
        owner.send("memsaver.pause(timeout=60)")
        until(lambda: region_state(broker, owner) == "pausing")
    finally:
        os.kill(child, signal.SIGKILL)
    owner.answer()
    until(lambda: is_whole(broker.status()))


def test_the_memory_of_a_killed_owner_stays_with_attached_processes(broker: Running, owner: Worker) -> None:
    with Worker(broker, "import torch; from memsaver import attach") as other:
        hand_over(owner, other, "weights")
        theirs = attached_bytes(broker, other)
        owner.kill()
        until(lambda: owner.pid not in {row["pid"] for row in broker.status()["clients"]})
        status = broker.status()
        assert status["idle_bytes"] == status["total_bytes"] - theirs
        with Worker(broker, "region = memsaver.region('all')", "hooks = Hooks(region)") as third:
            assert third.run(f"print(hooks.alloc({CAPACITY}))") == "None"
            third.run(f"held = hold('most', {CAPACITY} - {theirs}, 'none', 1)")
            other.run("assert torch.equal(tensors, torch.arange(60.0).view(3, 4, 5)); tensors.fill_(1)")
            third.run("held.check(); memsaver.pause()")
            other.run("attached.close()")
            third.run("memsaver.resume('all')")
            until(lambda: broker.status()["idle_bytes"] == broker.status()["total_bytes"])
            assert third.run(f"print(hooks.alloc({CAPACITY}) is None)") == "False"


def test_a_token_of_an_earlier_residence_is_refused(owner: Worker, other: Worker) -> None:
    pass_token(owner, other, "weights")
    owner.run("memsaver.pause()")
    text = other.fails("attach(token).__enter__()")
    assert text.startswith("Error") and "paused" in text and str(owner.pid) in text
    owner.run("memsaver.resume()")
    text = other.fails("attach(token).__enter__()")
    assert text.startswith("Error") and "share again" in text
    hand_over(owner, other, "weights")
    other.run("attached.close()")


def test_a_token_of_a_dead_process_is_refused(owner: Worker, other: Worker) -> None:
    pass_token(owner, other, "weights")
    owner.kill()
    text = other.fails("attach(token).__enter__()")
    assert text.startswith("Error") and str(owner.pid) in text


def test_attaching_to_a_freed_tensor_raises(owner: Worker, other: Worker) -> None:
    owner.run("gone = region.empty((1000,), torch.float32)")
    pass_token(owner, other, "{'a': weights, 'gone': gone}")
    owner.run("del gone, token")
    text = other.fails("attach(token).__enter__()")
    assert text.startswith("Error") and "no longer holds" in text
    owner.run("memsaver.pause(reader_timeout=1)")  # nothing was lent


def test_a_frozen_region_can_be_shared_until_its_contents_are_kept(owner: Worker, other: Worker) -> None:
    owner.run("frozen = memsaver.region('frozen', backup='host', frozen=True)")
    owner.run("fixed = frozen.empty((100,), torch.float32).fill_(1)")
    hand_over(owner, other, "fixed")
    other.run("tensors.fill_(2); attached.close()")
    owner.run("frozen.pause(); frozen.resume(); assert (fixed == 2).all()")
    pass_token(owner, other, "fixed")
    text = other.fails("attach(token).__enter__()")
    assert text.startswith("Error") and "frozen" in text and "thaw" in text
    owner.run("frozen.thaw()")
    hand_over(owner, other, "fixed")
    other.run("tensors.fill_(3); attached.close()")
    owner.run("assert (fixed == 3).all()")


def test_several_processes_attach_at_once(broker: Running, owner: Worker, other: Worker) -> None:
    with Worker(broker, "import torch; from memsaver import attach") as third:
        hand_over(owner, other, "weights")
        hand_over(owner, third, "{'w': weights}")
        other.run("tensors.fill_(6)")
        third.run("assert (tensors['w'] == 6).all(); attached.close()")
        text = owner.fails("memsaver.pause(reader_timeout=0.1)")
        assert f"(pid {other.pid})" in text and f"(pid {third.pid})" not in text
        other.run("attached.close()")
        owner.run("memsaver.pause(reader_timeout=10)")


def test_a_stopped_owner_is_an_error_and_its_late_answer_leases_nothing(owner: Worker, other: Worker) -> None:
    pass_token(owner, other, "weights")
    owner.stop()
    other.fails("attach(token, timeout=0.2).__enter__()")
    owner.go_on()
    hand_over(owner, other, "weights")
    other.run("attached.close()")
    owner.run("memsaver.pause(reader_timeout=10)")


# Brokers that die


def test_an_attachment_outlives_the_broker_and_its_end_reaches_the_owner(
    broker: Running, owner: Worker, other: Worker
) -> None:
    hand_over(owner, other, "weights")
    broker.kill()
    other.run("tensors.fill_(4)")
    owner.run("assert (weights == 4).all()")
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 2 and attached_bytes(broker, other) > 0)
    assert owner.fails("memsaver.pause(reader_timeout=0.1)").startswith("AttachedError")
    other.run("tensors.fill_(5); attached.close()")
    owner.run("memsaver.pause(reader_timeout=10); memsaver.resume(memory_timeout=10); assert (weights == 5).all()")
    until(lambda: is_whole(broker.status()))


@pytest.mark.parametrize("first", ["owner", "other"])
def test_an_attachment_can_end_without_a_broker(broker: Running, owner: Worker, other: Worker, first: str) -> None:
    """Whichever of the two meets the next broker first."""
    hand_over(owner, other, "weights")
    broker.kill()
    other.run("attached.close()")
    late = other if first == "owner" else owner
    late.stop()
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 1)
    late.go_on()
    until(lambda: len(broker.status()["clients"]) == 2)
    owner.run("memsaver.pause(reader_timeout=10)")
    until(lambda: is_whole(broker.status()))


def test_an_attachment_ends_if_its_process_dies_without_a_broker(broker: Running, owner: Worker, other: Worker) -> None:
    hand_over(owner, other, "weights")
    broker.kill()
    other.kill()
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 1)
    owner.run("memsaver.pause(reader_timeout=10)")


def test_a_lease_that_was_not_delivered_ends(broker: Running, owner: Worker, other: Worker) -> None:
    """The broker dies after it asks the owner and before it answers the attaching process, which continues."""
    pass_token(owner, other, "weights")
    owner.stop()
    other.send("print(type(raised(lambda: attach(token).__enter__())).__name__)")
    time.sleep(0.3)  # until the broker has asked the owner
    broker.kill()
    assert other.answer() == "BrokerError"
    owner.go_on()
    broker.start()
    until(lambda: len(broker.status()["clients"]) == 2)
    owner.run("memsaver.pause(reader_timeout=10)")


# Arguments


def test_sharing_invalid_tensors_raises(owner: Worker) -> None:
    owner.run("token = share(weights)")
    expected = {
        "share({})": "ValueError",
        "share(torch.zeros(3))": "ValueError",
        "share({'a': weights, 'b': torch.zeros(3)})": "ValueError",
        "share(weights[:0])": "ValueError",
        "share({'s': weights.to_sparse()})": "ValueError",
        "share(3)": "TypeError",
        "share([weights])": "TypeError",
        "share({1: weights})": "TypeError",
        "attach('token').__enter__()": "TypeError",
        "attach(token, timeout='1').__enter__()": "TypeError",
        "attach(token, timeout=-1).__enter__()": "ValueError",
    }
    for statement, kind in expected.items():
        assert owner.run(f"print(type(raised(lambda: {statement}, Exception)).__name__)") == kind, statement
    owner.run("memsaver.pause()")
    assert owner.fails("share(weights)").startswith("RegionPausedError")


def test_memory_of_the_driver_cannot_be_shared(broker: Running) -> None:
    with Worker(broker, "import torch; from memsaver import share", MEMSAVER_POOL="process") as worker:
        worker.run("tensor = memsaver.region('a').empty((10,), torch.float32)")
        text = worker.fails("share(tensor)")
        assert text.startswith("ConfigError") and "pool" in text
        worker.run("memsaver.configure(pool='shared')")
        with Worker(broker, "from memsaver import attach") as other:
            text = worker.fails("share(tensor)")
            assert text.startswith("ConfigError: region 'a' holds memory that it took from the driver")
            assert worker.run("print(error.option, error.value)") == "pool shared"
            worker.run("memsaver.pause(); memsaver.resume(memory_timeout=10); tensor.fill_(3)")
            pass_token(worker, other, "tensor")
            assert other.run("with attach(token) as it: print(it.sum().item())") == "30.0"


def test_a_token_of_an_invisible_device_raises(owner: Worker, broker: Running) -> None:
    text = owner.run("print(pickle.dumps(share(weights)).hex())")
    with Worker(broker, "from memsaver import attach", MEMSAVER_HOST_DEVICE="96MiB") as other:
        other.run(f"token = pickle.loads(bytes.fromhex({text!r}))")
        assert "does not see" in other.fails("attach(token).__enter__()")


# Leaks


def test_two_hundred_attachments_leave_nothing_behind(broker: Running, owner: Worker, other: Worker) -> None:
    owner.run("block = region.empty((20, 1000, 1000), torch.uint8)")
    pass_token(owner, other, "{str(n): row for n, row in enumerate(block)}")
    pids = (owner.pid, other.pid, broker.process.pid)
    figures = []
    for count in (20, 200):
        other.run(f"for _ in range({count}): attach_and_leave(token)")
        until(lambda: attached_bytes(broker, other) == 0)
        figures.append([(descriptors_of(pid), mappings_of(pid)) for pid in pids])
    for pid, (files_before, mappings_before), (_, mappings) in zip(pids, *figures):
        until(lambda: descriptors_of(pid) <= files_before, within_s=10)  # noqa: B023
        assert mappings <= mappings_before + 8
    owner.run("memsaver.pause(reader_timeout=10)")
    until(lambda: is_whole(broker.status()))
