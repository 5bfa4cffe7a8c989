"""The trainer on the host driver: its memory, its arithmetic, its checkpoints, and the models that it loads."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memsaver
from examples.colocate.engine import Engine, EngineConfig, SamplingParams
from examples.colocate.model import ModelConfig, parameter_shapes
from examples.colocate.model.folder import FolderError, load_config
from examples.colocate.process_group import join
from examples.colocate.trainer.batch import RankBatch
from examples.colocate.trainer.causal_lm import token_logprobs
from examples.colocate.trainer.interface import (
    CheckpointError,
    NonFiniteError,
    Sample,
    TokenStatistics,
    TrainerConfig,
    standard_errors,
)
from examples.colocate.trainer.trainer import Trainer
from examples.colocate.trainer.trainer_memory import local
from tests.examples.model_support import LLAMA3, save_model
from tests.examples.trainer_support import MODEL, PLAIN, TAGS, addresses, samples, weights

QWEN2 = replace(MODEL, qk_norm=False, qkv_bias=True, tie_word_embeddings=True)
LLAMA = replace(MODEL, qk_norm=False, rope_theta=50.0)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    torch.set_num_threads(1)
    return Trainer(MODEL, PLAIN, join("cpu"))


def inside(region: memsaver.Region, address: int, nbytes: int) -> bool:
    return any(begin <= address and address + nbytes <= begin + size for begin, size in region._core.live())


def test_all_permanent_tensors_of_the_trainer_are_in_its_regions(trainer: Trainer) -> None:
    memory, shapes, found = trainer.memory, parameter_shapes(MODEL), addresses(trainer)
    regions = {"model": memory.params, "optimizer": memory.optimizer, "grads": memory.grads}
    assert len(found) == 5 * len(shapes)  # weight, gradient, two moments and a step counter
    for key, address in found.items():
        kind, name = key.split(".", 1)
        name = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        nbytes = 4 if name.endswith(".step") else 4 * torch.Size(shapes[name]).numel()
        assert inside(regions[kind], address, nbytes), key
    assert memory.tags == TAGS and [memsaver.region(tag, "cpu").backup for tag in TAGS] == ["host", "host", "none"]


def test_addresses_and_contents_outlive_steps_and_pauses(trainer: Trainer) -> None:
    before, held = addresses(trainer), memsaver.region("params", "cpu", "host").allocated_bytes
    for step in range(2):
        trainer.warm_up(samples(seed=step), 1e-3)
        sums, (expected, _) = trainer.checksums(), trainer.recompute(samples())
        memsaver.pause(TAGS)
        memsaver.resume(TAGS)
        assert trainer.checksums() == sums
        found, _ = trainer.recompute(samples())
        assert torch.equal(found.micro_batches[0].behaviour_N, expected.micro_batches[0].behaviour_N)
        trainer.train_step(found, 1e-3)
        assert trainer.checksums().keys() == sums.keys()
        assert all(trainer.checksums()[key] != sums[key] for key in sums)  # a step changes each of them
    assert addresses(trainer) == before
    assert memsaver.region("params", "cpu", "host").allocated_bytes == held


@pytest.mark.parametrize("key", ["model.model.norm.weight", "optimizer.model.norm.weight.exp_avg_sq"])
def test_a_checksum_sees_one_bit(trainer: Trainer, key: str) -> None:
    trainer.warm_up(samples(), 1e-3)
    before, tensor = trainer.checksums(), state(trainer)[key]
    tensor.view(torch.int32)[5] ^= 1
    assert {name for name, value in trainer.checksums().items() if value != before[name]} == {key}
    tensor.view(torch.int32)[5] ^= 1
    assert trainer.checksums() == before


def test_gradients_from_before_a_step_are_ignored(trainer: Trainer) -> None:
    for _ in range(2):
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
        assert trainer.warm_up(samples(), 1e-4).grad_norm > 0
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


VARIANTS: dict[str, dict[str, Any]] = {
    "rows of one sequence": {"micro_batch_tokens": 1},
    "rows of two or three, chunks of logits, layers computed again": {
        "micro_batch_tokens": 20, "checkpoint_layers": True, "logit_chunk": 3,
    },
}  # fmt: skip


def three_steps(config: TrainerConfig, given: list[Sample], model: ModelConfig = MODEL) -> tuple[list[float], Trainer]:
    trainer = Trainer(model, config, join("cpu"))
    dealt, statistics = trainer.recompute(given)
    metrics = [trainer.train_step(dealt, 1e-3), trainer.train_step(dealt, 1e-3), trainer.warm_up(given, 1e-3)]
    figures = [number for each in metrics for number in (each.loss, each.grad_norm, each.clipped)]
    return [*figures, float(statistics.gap_N.sum()), float(statistics.entropy_N.sum()), *statistics.surprise], trainer


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    figures, trainer = three_steps(PLAIN, samples())
    return figures, weights(trainer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packing_chunks_and_accumulation_change_nothing(plain: tuple[list[float], Any], variant: str) -> None:
    found, trainer = three_steps(replace(PLAIN, **VARIANTS[variant]), samples())
    assert found == pytest.approx(plain[0], rel=1e-4)
    for name, tensor in weights(trainer).items():
        assert torch.allclose(tensor, plain[1][name], atol=2e-5), name


def test_half_precision_computes_nearly_the_same_over_fp32_state(plain: tuple[list[float], Any]) -> None:
    found, trainer = three_steps(replace(PLAIN, dtype=torch.bfloat16, micro_batch_tokens=20), samples())
    assert found[:2] == pytest.approx(plain[0][:2], rel=0.05) and found != plain[0]
    assert all(tensor.dtype == torch.float32 for tensor in state(trainer).values())
    assert trainer.model.get_parameter("lm_head.weight").dtype == torch.float32


def test_rows_keep_to_their_budget_and_ranks_run_as_many() -> None:
    given = samples(9)
    for ranks in (1, 2, 3, 4, 16):
        dealt = [RankBatch.deal(given, rank, ranks, 16) for rank in range(ranks)]
        assert len({len(each.micro_batches) for each in dealt}) == 1
        assert {each.num_targets for each in dealt} == {sum(len(each.completion) for each in given)}
        rows = [part for each in dealt for part in each.micro_batches]
        assert sum(len(part.targets_N) for part in rows) == dealt[0].num_targets
        assert all(len(part.tokens_T) <= 16 for part in rows)
    (part,) = RankBatch.deal(given[:1], 0, 1, 1).micro_batches
    assert len(part.tokens_T) == given[0].length > 1  # longer than the budget: alone


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    generator, tokens, vocabulary, chunk = torch.Generator().manual_seed(0), 64, 1000, 8
    hidden = torch.randn(tokens, 16, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 16, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    grown = torch.randn(tokens, generator=generator)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(each.numel() for each in tree_leaves(out) if torch.is_tensor(each))])
            return out

    results = []
    for temperature in (1.0, 0.7):
        with Largest() as largest:
            found = token_logprobs(hidden, weight, targets, temperature, chunk, with_statistics=True)
            gradients = torch.autograd.grad(found[0] @ grown, (hidden, weight))
        assert largest.numel <= max(weight.numel(), chunk * vocabulary) < tokens * vocabulary
        logprobs = F.log_softmax(hidden @ weight.T / temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        variance = (logprobs.exp() * logprobs.square()).sum(-1) - entropy.square()
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        assert torch.allclose(found, torch.stack((chosen, entropy, variance)), atol=1e-4, rtol=1e-4)
        for one, other in zip(gradients, torch.autograd.grad(chosen @ grown, (hidden, weight))):
            assert torch.allclose(one, other, atol=1e-4)
        results.append(found)
    assert not torch.allclose(results[0], results[1])


def test_recomputed_behaviour_is_the_trainers_and_the_gap_becomes_weights(trainer: Trainer) -> None:
    given = samples(4)
    own = [trainer.recompute([each])[0].micro_batches[0].behaviour_N for each in given]
    shifts = [0.3, -0.3, 90.0, 0.0]  # less likely to the engine: its tokens count for more
    engine = [
        replace(each, logprobs=(mine - shift).tolist()) for each, mine, shift in zip(given, own, shifts, strict=True)
    ]
    for each, mine, shift in zip(engine, own, shifts):
        found, _ = trainer.recompute([each])
        assert torch.allclose(found.micro_batches[0].behaviour_N, mine, atol=1e-5)
        assert torch.allclose(found.micro_batches[0].weights_N, torch.tensor(min(math.exp(shift), 2.0)), rtol=1e-4)
    found, gap = trainer.recompute(engine)
    counts = [len(each.completion) for each in given]
    assert float(gap.gap_N.max()) == pytest.approx(90.0) and len(gap.gap_N) == found.num_targets == sum(counts)
    total = 0.3 * (counts[0] + counts[1]) + 90.0 * counts[2]
    assert float(gap.gap_N.sum()) == pytest.approx(total, rel=1e-4)
    assert int(gap.capped_N(2.0).sum()) == counts[2]
    # The policy is compared with itself: nothing is clipped, however far off the engine is.
    trainer.reset_optimizer()
    assert trainer.train_step(found, 0.0).clipped == 0.0
    assert trainer.train_step(trainer.deal(engine), 0.0).clipped > 0.0


def test_a_weight_scales_the_gradient_of_its_own_token() -> None:
    trainer = Trainer(MODEL, replace(PLAIN, max_grad_norm=1e9), join("cpu"))
    given = samples(3)
    (part,) = trainer.deal(given).micro_batches
    ordered = sorted(given, key=lambda each: each.length, reverse=True)
    assert part.advantages_N.tolist() == pytest.approx([each.advantage for each in ordered for _ in each.completion])

    def gradient(advantages_N: Tensor, weights_N: Tensor) -> Tensor:
        changed = replace(part, behaviour_N=own.behaviour_N, advantages_N=advantages_N, weights_N=weights_N)
        trainer.train_step(replace(dealt, micro_batches=[changed]), 0.0)
        return torch.cat([local(each.grad).flatten() for each in trainer.model.parameters() if each.grad is not None])

    dealt, _ = trainer.recompute(given)
    (own,) = dealt.micro_batches
    ones, weights_N = torch.ones_like(part.weights_N), torch.linspace(0.5, 1.5, len(part.weights_N))
    of_each = [gradient(part.advantages_N * chosen, ones) for chosen in torch.eye(len(ones))]
    expected = sum(weight * each for weight, each in zip(weights_N, of_each))
    assert torch.allclose(gradient(part.advantages_N, weights_N), expected, atol=1e-5)


def test_statistics_see_a_sampler_of_another_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 20, generator=generator)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * logprobs.square()).sum(-1) - entropy.square()

    def sampled(temperature: float) -> float:
        tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        policy = logprobs.gather(1, tokens)[:, 0]
        parts = [TokenStatistics(policy[part], policy[part], entropy[part], variance[part]) for part in halves]
        return standard_errors(*TokenStatistics.joined(parts).surprise)

    halves = (slice(0, 1000), slice(1000, 4000))
    assert abs(sampled(1.0)) < 3 and abs(sampled(1.0)) < 3
    assert sampled(0.9) < -4 and sampled(1.1) > 4


def test_a_gap_that_is_not_a_number_is_not_lost_beside_others() -> None:
    policy, ones = torch.tensor([-1.0, -2.0]), torch.ones(2)
    good = TokenStatistics(policy, policy, ones, ones)
    bad = TokenStatistics(policy, torch.tensor([-1.0, math.nan]), ones, ones)
    none = TokenStatistics(*torch.zeros(4, 0))
    for parts in ([good, bad, none], [bad, good], [none, good, bad, good]):
        joined = TokenStatistics.joined(parts)
        assert joined.gap_N.max().isnan() and joined.gap_N.mean().isnan()
    assert TokenStatistics.joined([good, none, good]).gap_N.tolist() == [0.0] * 4
    assert standard_errors(*good.surprise) == pytest.approx(1 / math.sqrt(2)) and standard_errors(*none.surprise) == 0.0


def poisoned(given: list[Sample], row: int) -> list[Sample]:
    """A batch with one advantage that is not a number."""
    return [replace(each, advantage=math.nan) if index == row else each for index, each in enumerate(given)]


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.reset_optimizer()
    trainer.warm_up(samples(), 1e-3)
    before = trainer.checksums()
    with pytest.raises(NonFiniteError, match="step 2 was not applied: the gradient norm is nan, the losses") as raised:
        trainer.train_step(trainer.deal(poisoned(samples(), 0)), 1e-3)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert "the losses of the ranks are [nan]; expected" in str(raised.value)
    with monkeypatch.context() as patch, pytest.raises(NonFiniteError, match="the gradient norm is inf, the losses"):
        patch.setattr(torch.nn.utils, "get_total_norm", lambda *_, **__: torch.tensor(math.inf))
        trainer.train_step(trainer.deal(samples()), 1e-3)
    assert trainer.checksums() == before
    trainer.warm_up(samples(), 1e-3)  # goes on
    assert trainer.steps_taken == 2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_agrees_about_tokens_it_sampled(temperature: float) -> None:
    trainer = Trainer(MODEL, replace(PLAIN, temperature=temperature, seed=2), join("cpu"))
    engine = Engine(MODEL, EngineConfig(max_batch_size=32, block_size=4, num_blocks=320))
    engine.model.load_weights(weights(trainer).items())
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]] * 8
    done = engine.generate(prompts, SamplingParams(temperature, max_new_tokens=12))
    _, statistics = trainer.recompute([Sample(each.prompt, each.tokens, each.logprobs) for each in done])
    assert len(statistics.gap_N) == 32 * 12 and float(statistics.gap_N.max()) < 1e-4
    assert abs(standard_errors(*statistics.surprise)) < 4


def test_a_trainer_continues_from_its_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    trainer.warm_up(samples(seed=1), 1e-3)
    trainer.save(tmp_path)
    before, where, taken = trainer.checksums(), addresses(trainer), trainer.steps_taken
    expected = trainer.warm_up(samples(seed=2), 1e-3)
    after = trainer.checksums()
    assert before != after
    trainer.load(tmp_path)
    assert trainer.checksums() == before
    assert addresses(trainer) == where and trainer.steps_taken == taken
    assert trainer.warm_up(samples(seed=2), 1e-3) == expected and trainer.checksums() == after


def test_loading_a_folder_that_is_no_checkpoint_raises(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the trainer's state could not be read from .*: rank 0: .*.metadata"):
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
    trainer.warm_up(samples(), 1e-4)


def test_a_sample_that_is_too_long_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="a sample has 33 tokens; expected at most 32"):
        trainer.deal([Sample([1] * 30, [2] * 4)])
    with pytest.raises(ValueError, match="there are no samples; expected one or more"):
        trainer.warm_up([], 1e-3)


def saved(config: ModelConfig, folder: Path, rope: dict[str, Any] | None = None, **saving: Any) -> Any:
    """A model of `transformers`, in a folder."""
    kind = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    same = ("vocab_size", "hidden_size", "head_dim", "intermediate_size", "tie_word_embeddings")
    sizes = {name: getattr(config, name) for name in same}
    sizes["rope_parameters"] = rope or {"rope_type": "default", "rope_theta": config.rope_theta}
    sizes |= {"max_position_embeddings": config.max_position, "rms_norm_eps": config.norm_eps}
    return save_model(folder, kind, saving, **sizes)


@pytest.mark.parametrize(
    ("config", "rope"), [(MODEL, None), (QWEN2, None), (LLAMA, LLAMA3)], ids=["qwen3", "qwen2.5, tied", "llama"]
)
def test_a_model_of_transformers_computes_and_learns_the_same(
    config: ModelConfig, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    reference = saved(config, tmp_path, rope, max_shard_size="20KB")
    stretched = load_config(tmp_path).rope_frequencies
    assert (stretched is None) == (rope is None)
    config = replace(config, rope_frequencies=stretched)
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 10
    trainer = Trainer(config, PLAIN, join("cpu"), tmp_path)
    given = samples()
    found = []
    for each in given:
        logits = reference(torch.tensor([[*each.prompt, *each.completion]])).logits[0, len(each.prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(each.completion)[:, None])[:, 0])
        ours = trainer.recompute([each])[0].micro_batches[0].behaviour_N
        assert torch.allclose(ours, found[-1], atol=1e-4)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=PLAIN.betas, weight_decay=0.0)
    loss = -torch.cat(found).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), PLAIN.max_grad_norm)
    optimizer.step()
    metrics = trainer.warm_up(given, 1e-3)
    assert (metrics.loss, metrics.grad_norm) == pytest.approx((loss.item(), norm.item()), rel=1e-4)
    expected = dict(reference.named_parameters())
    for name, tensor in weights(trainer).items():
        assert torch.allclose(tensor, expected[name], atol=1e-4), name


def test_a_folder_without_the_models_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="expected the model's parameters in safetensors"):
        Trainer(MODEL, PLAIN, join("cpu"), tmp_path)
    saved(MODEL, tmp_path)
    with pytest.raises(FolderError, match="model.layers.2"):
        Trainer(replace(MODEL, num_layers=3), PLAIN, join("cpu"), tmp_path)
    with pytest.raises(FolderError, match="Size mismatch .* for "):
        Trainer(replace(MODEL, vocab_size=17), PLAIN, join("cpu"), tmp_path)


def state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: local(tensor) for name, tensor in trainer.state().items()}
