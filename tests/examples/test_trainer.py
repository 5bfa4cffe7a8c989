"""The trainer on the host driver: its memory, its arithmetic, and the weights it sends."""

from __future__ import annotations

import math
import pickle
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.model import ModelConfig, parameter_shapes
from examples.colocate.trainer import CheckpointError, LogprobGap, NonFiniteError, TokenBatch, Trainer, TrainerConfig
from examples.colocate.trainer.process_group import join
from tests.ranks_support import ranks

TAGS = ("params", "optimizer", "grads")
PAD = 0
MODEL = ModelConfig(
    vocab_size=16,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position=32,
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    torch.set_num_threads(1)
    return Trainer(MODEL, TrainerConfig(), join("cpu"))


def batch(rows: int = 8, seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, MODEL.vocab_size, (rows, 9), generator=generator).tolist()
    prompts = [row[: 2 + index % 3] for index, row in enumerate(tokens)]
    completions = [row[2 + index % 3 : 5 + index % 5] for index, row in enumerate(tokens)]
    logprobs = [[-2.0] * len(completion) for completion in completions]
    return TokenBatch.build(prompts, completions, PAD, logprobs, torch.randn(rows, generator=generator))


def weights(trainer: Trainer, max_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in trainer.weight_buckets(max_bytes) for name, tensor in bucket.items()}


def inside(region: memsaver.Region, address: int, nbytes: int) -> bool:
    return any(begin <= address and address + nbytes <= begin + size for begin, size in region._core.live())


def test_all_permanent_tensors_of_the_trainer_are_in_its_region(trainer: Trainer) -> None:
    regions = {"params": trainer.memory.params, "optimizer": trainer.memory.optimizer, "grads": trainer.memory.grads}
    shapes = parameter_shapes(MODEL)
    addresses = trainer.addresses()
    assert len(addresses) == 5 * len(shapes)  # weight, gradient, two moments and a step counter
    for key, address in addresses.items():
        tag, name = key.split("/")[:2]
        nbytes = 4 if key.endswith("/step") else 4 * torch.Size(shapes[name]).numel()
        assert inside(regions[tag], address, nbytes), key
    assert [regions[tag].backup for tag in TAGS] == ["host", "host", "none"]


def test_addresses_outlive_steps_and_pauses(trainer: Trainer) -> None:
    before, held = trainer.addresses(), {tag: memsaver.region(tag, "cpu", "host").allocated_bytes for tag in TAGS[:2]}
    for step in range(3):
        trainer.warm_up(batch(seed=step), 1e-3)
        memsaver.pause(TAGS)
        memsaver.resume(TAGS)
        trainer.train_step(batch(seed=step), 1e-3)
        trainer.logprobs(batch())
    assert trainer.addresses() == before
    assert held == {tag: memsaver.region(tag, "cpu", "host").allocated_bytes for tag in held}


def test_a_pause_keeps_weights_moments_and_logprobs(trainer: Trainer) -> None:
    before, moments = weights(trainer), {key: value.clone() for key, value in state(trainer).items()}
    expected = trainer.logprobs(batch())
    memsaver.pause(TAGS)
    memsaver.resume(TAGS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert all(torch.equal(tensor, moments[key]) for key, tensor in state(trainer).items())
    assert torch.equal(trainer.logprobs(batch()), expected)


def test_gradients_from_before_a_step_are_ignored(trainer: Trainer) -> None:
    for _ in range(2):
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
        metrics = trainer.train_step(batch(), 1e-4)
        assert metrics.grad_norm > 0
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


def test_zero_advantages_change_nothing(trainer: Trainer) -> None:
    trainer.warm_up(batch(), 1e-3)
    trainer.reset_optimizer()
    before = weights(trainer)
    given = batch()
    zero = TokenBatch(given.tokens_BT, given.mask_BT, given.behaviour_BT, torch.zeros(len(given)))
    for _ in range(3):
        assert trainer.train_step(zero, 1e-2).grad_norm == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_recomputed_behaviour_is_the_trainers_and_the_gap_becomes_weights(trainer: Trainer) -> None:
    given = batch()
    own = trainer.logprobs(given)
    shift = torch.zeros_like(own)
    shift[0] = 0.3  # less likely to the engine: its tokens count for more
    shift[1] = -0.3
    shift[2] = 90.0
    engine = TokenBatch(given.tokens_BT, given.mask_BT, (own - shift) * given.mask_BT, given.advantages_B)
    found, gap = trainer.recompute(engine)
    assert torch.equal(found.rows.behaviour_BT, own) and found.num_targets == given.num_targets
    assert found.rows.weights_BT is not None
    for row, weight in enumerate((math.exp(0.3), math.exp(-0.3), 2.0, 1.0)):
        assert torch.allclose(found.rows.weights_BT[row][given.mask_BT[row]], torch.tensor(weight), rtol=1e-4)
    counts = given.mask_BT.sum(1).tolist()
    assert gap.largest == pytest.approx(90.0) and gap.tokens == given.num_targets
    assert gap.mean == pytest.approx((0.3 * (counts[0] + counts[1]) + 90.0 * counts[2]) / given.num_targets, rel=1e-4)
    assert (gap.truncated, gap.truncated_share) == (counts[2], counts[2] / given.num_targets)
    # The policy is compared with itself: nothing is clipped, however far off the engine is.
    trainer.reset_optimizer()
    assert trainer.train_step(found, 0.0).clipped == 0.0
    assert trainer.train_step(engine, 0.0).clipped > 0.0


def test_weights_scale_the_gradient_of_a_token(trainer: Trainer) -> None:
    given = batch(1)
    behaviour, advantages = trainer.logprobs(given), torch.ones(1)
    halves = torch.where(given.mask_BT, 0.5, 99.0)
    norms = [
        trainer.train_step(TokenBatch(given.tokens_BT, given.mask_BT, behaviour, advantages, weights), 0.0).grad_norm
        for weights in (None, halves)
    ]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)


def test_a_gap_that_is_not_a_number_is_not_lost_beside_others() -> None:
    mask = torch.tensor([[False, True, True]])
    policy, nan = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -1.0, math.nan]])
    good, bad = LogprobGap.of(policy, policy, mask, 2.0), LogprobGap.of(policy, nan, mask, 2.0)
    assert (good.largest, good.mean, good.tokens) == (0.0, 0.0, 2)
    for parts in ([good, bad], [bad, good], [good, bad, good]):
        joined = LogprobGap.joined(parts)
        assert math.isnan(joined.largest) and math.isnan(joined.mean)
    assert LogprobGap.joined([good, good]) == LogprobGap(0.0, 0.0, 0, 4)
    # Those that are masked out do not count.
    assert LogprobGap.of(policy, nan, torch.tensor([[False, True, False]]), 2.0) == LogprobGap(0.0, 0.0, 0, 1)


def poisoned(given: TokenBatch, row: int) -> TokenBatch:
    """A batch with one advantage that is not a number."""
    advantages = given.advantages_B.clone()
    advantages[row] = math.nan
    return TokenBatch(given.tokens_BT, given.mask_BT, given.behaviour_BT, advantages)


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(trainer: Trainer) -> None:
    trainer.reset_optimizer()
    trainer.train_step(batch(), 1e-3)
    before, moments = weights(trainer), {key: value.clone() for key, value in state(trainer).items()}
    with pytest.raises(NonFiniteError, match="step 2 was not applied .rank 0.: the gradient norm is nan") as raised:
        trainer.train_step(poisoned(batch(), 0), 1e-3)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.step, error.rank) == (2, 0) and math.isnan(error.grad_norm)
    assert str(error) == str(raised.value)
    assert set(error.ranks) == {0} and math.isnan(error.ranks[0].loss)
    assert set(error.ranks[0].parameters) == set(parameter_shapes(MODEL))
    assert f"{len(parameter_shapes(MODEL))} parameters" in str(error)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert all(torch.equal(tensor, moments[key]) for key, tensor in state(trainer).items())
    trainer.train_step(batch(), 1e-3)  # goes on
    assert trainer.steps_taken == 2


def test_log_probabilities_are_those_of_a_softmax(trainer: Trainer) -> None:
    given = batch()
    logprobs = trainer.logprobs(given)
    assert torch.equal(logprobs != 0, given.mask_BT)
    row, position = 3, int(given.mask_BT[3].int().argmax())
    others = given.tokens_BT[row].repeat(MODEL.vocab_size, 1)
    others[:, position] = torch.arange(MODEL.vocab_size)
    every = TokenBatch(
        others, given.mask_BT[row].expand_as(others), torch.zeros(others.shape), torch.zeros(len(others))
    )
    assert trainer.logprobs(every)[:, position].exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_the_engine_agrees_about_tokens_it_sampled(trainer: Trainer) -> None:
    engine = Engine(MODEL, EngineConfig(max_batch_size=4, block_size=4, num_blocks=32))
    for bucket in trainer.weight_buckets(2000):
        engine.load_weights(bucket.items(), partial=True)
    engine.load_weights(())
    done = engine.generate([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], SamplingParams(max_new_tokens=6))
    given = TokenBatch.build(
        [each.prompt for each in done], [each.tokens for each in done], PAD, [each.logprobs for each in done]
    )
    assert (trainer.logprobs(given) - given.behaviour_BT).abs().max() < 1e-4
    engine.close()


def test_a_trainer_continues_from_its_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    trainer.warm_up(batch(seed=1), 1e-3)
    trainer.save(tmp_path)
    before, addresses, taken = weights(trainer), trainer.addresses(), trainer.steps_taken
    moments = {key: value.clone() for key, value in state(trainer).items()}
    expected = trainer.train_step(batch(seed=2), 1e-3)
    after = weights(trainer)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    trainer.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert all(torch.equal(tensor, moments[key]) for key, tensor in state(trainer).items())
    assert trainer.addresses() == addresses and trainer.steps_taken == taken
    assert trainer.train_step(batch(seed=2), 1e-3) == expected
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(trainer).items())


def test_loading_a_folder_that_is_no_checkpoint_raises(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no file '.metadata'; expected a folder that a trainer wrote"):
        trainer.load(tmp_path)
    trainer.save(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="the trainer's state could not be read from .*: rank 0: ") as raised:
        trainer.load(tmp_path)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the trainer's state could not be written to .*file"):
        trainer.save(tmp_path / "file")
    trainer.reset_optimizer()
    trainer.train_step(batch(), 1e-4)


@pytest.mark.parametrize("max_bytes", [1, 3000, 1 << 30])
def test_buckets_are_bounded(trainer: Trainer, max_bytes: int) -> None:
    buckets = list(trainer.weight_buckets(max_bytes))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= max_bytes
    found = {name: tuple(tensor.shape) for bucket in buckets for name, tensor in bucket.items()}
    assert found == parameter_shapes(MODEL)
    assert len(buckets) == (1 if max_bytes == 1 << 30 else len(found) if max_bytes == 1 else len(buckets))


def test_two_ranks_train_the_same_as_one(trainer: Trainer, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with ranks(train_rank, 2, meeting, tmp_path):
        alone = Trainer(MODEL, TrainerConfig(seed=7), join("cpu"))
        norms = train_a_little(alone)
    expected = weights(alone)
    for rank in range(2):
        found, metrics, refused, restored = torch.load(tmp_path / f"rank{rank}")
        assert restored
        # One row of rank 1's is poisoned: both refuse the same step, and name the rank of the loss.
        assert refused == ("optimizer step 3", rank, [False, True])
        assert metrics == pytest.approx(norms, rel=1e-4)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.allclose(tensor, expected[name], atol=1e-4), name


def train_a_little(trainer: Trainer) -> list[float]:
    """Runs steps with a pause between them. Returns their metrics."""
    metrics = [trainer.warm_up(batch(9), 1e-3)]
    memsaver.pause(TAGS)
    memsaver.resume(TAGS)
    metrics += [trainer.train_step(batch(9), 1e-3)]
    return [figure for each in metrics for figure in (each.loss, each.grad_norm, each.clipped)]


def train_rank(rank: int, meeting: str, folder: Path) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(MODEL, TrainerConfig(seed=7), join("cpu", rank, 2, meeting))
    metrics = train_a_little(trainer)
    with pytest.raises(NonFiniteError) as refused:
        trainer.train_step(poisoned(batch(9), 1), 1e-3)
    error = refused.value
    losses = [math.isnan(error.ranks[each].loss) for each in range(2)]
    told = (str(error).split(" was")[0], error.rank, losses)
    found = weights(trainer, 4000)
    trainer.save(folder / "saved")
    trainer.train_step(batch(9), 1e-3)
    trainer.load(folder / "saved")
    restored = all(torch.equal(tensor, found[name]) for name, tensor in weights(trainer, 4000).items())
    torch.save((found, metrics, told, restored), folder / f"rank{rank}")
    dist.destroy_process_group()


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor
        for name, parameter in trainer.model.named_parameters()
        for key, tensor in trainer.optimizer.state[parameter].items()
    }
