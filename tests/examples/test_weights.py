"""The trainer's weights are written directly into the engine's: bits, checks, and no staging memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.colocate.engine import Engine, EngineConfig
from examples.colocate.model import ModelConfig, parameter_shapes
from examples.colocate.trainer import TokenBatch, Trainer, TrainerConfig
from examples.colocate.trainer.process_group import join

MODEL = ModelConfig(
    vocab_size=17,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position=32,
)
TIED = replace(MODEL, tie_word_embeddings=True, qk_norm=False, dtype=torch.bfloat16)
SMALL = EngineConfig(max_batch_size=4, block_size=4, num_blocks=16)
Targets = dict[str, torch.Tensor]


def loaded(trainer: Trainer, model: ModelConfig) -> Engine:
    """An engine with the trainer's checkpoint."""
    engine = Engine(model, SMALL)
    for bucket in trainer.weight_buckets(4000, model.dtype):
        engine.load_weights(bucket.items(), partial=True)
    engine.load_weights(())
    return engine


def bits(tensors: Targets) -> dict[str, bytes]:
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    torch.set_num_threads(1)
    return Trainer(MODEL, TrainerConfig(seed=3), join("cpu"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(MODEL, SMALL)
    yield made
    made.close()


def fresh(model: ModelConfig, value: float = 7.0) -> Targets:
    return {name: torch.full(shape, value, dtype=model.dtype) for name, shape in parameter_shapes(model).items()}


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_that_of_a_checkpoint_load(trainer: Trainer, dtype: torch.dtype, gather: bool) -> None:
    model = replace(MODEL, dtype=dtype)
    expected, engines = loaded(trainer, model), [Engine(model, SMALL) for _ in range(2)]
    written = trainer.write_weights([each.model.parameters for each in engines], gather, dtype)
    assert written == 2 * sum(tensor.nbytes for tensor in expected.model.parameters.values())
    for each in engines:
        assert bits(each.model.weights) == bits(expected.model.weights)  # fused, as the forward pass uses them
        assert each.differing_weights(expected.model.parameters.items()) == []
    for each in (*engines, expected):
        each.close()


def test_tied_embeddings_share_one_weight() -> None:
    trainer = Trainer(TIED, TrainerConfig(seed=4), join("cpu"))
    names = [name for name, _ in trainer.model.named_parameters()]
    assert names == list(parameter_shapes(TIED))
    prompts, completions = [[1, 2], [3]], [[4, 5], [6, 7]]
    first = trainer.warm_up(TokenBatch.build(prompts, completions, 0), 1e-2)
    assert trainer.warm_up(TokenBatch.build(prompts, completions, 0), 1e-2).loss < first.loss
    assert [name for name, _ in trainer.model.named_parameters()] == names
    expected, engine = loaded(trainer, TIED), Engine(TIED, SMALL)
    trainer.write_weights([engine.model.parameters])
    assert bits(engine.model.weights) == bits(expected.model.weights)
    engine.close()
    expected.close()


def test_writing_weights_allocates_no_staging_memory(trainer: Trainer, engine: Engine) -> None:
    targets = [{name: view.to(torch.bfloat16) for name, view in engine.model.parameters.items()}]
    known = {tensor.untyped_storage().data_ptr() for tensor in targets[0].values()}

    class Made(TorchDispatchMode):
        calls, numel = 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inputs = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if torch.is_tensor(each)}
            out = func(*args, **(kwargs or {}))
            self.calls += "copy" in func.__name__
            for each in tree_leaves(out):
                if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in inputs | known:
                    self.numel += each.numel()
            return out

    with Made() as made:
        trainer.write_weights(targets, dtype=torch.bfloat16)
    assert (made.calls, made.numel) == (1, 0)  # one grouped copy for all


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda targets: targets.pop("model.norm.weight"), "missing: model.norm.weight; expected one for every"),
        (lambda targets: targets.update(extra=torch.zeros(1)), "unknown: extra; expected one for every"),
        (
            lambda targets: targets.update({"lm_head.weight": torch.zeros(17, 31)}),
            r"'lm_head.weight' is torch.float32 \(17, 31\); expected torch.float32 \(17, 32\)",
        ),
        (
            lambda targets: targets.update({"model.norm.weight": torch.zeros(32).half()}),
            r"'model.norm.weight' is torch.float16 \(32,\); expected torch.float32 \(32,\)",
        ),
        (
            lambda targets: targets.update({"model.norm.weight": torch.zeros(32, device="meta")}),
            "'model.norm.weight' is on meta; expected cpu",
        ),
        (lambda targets: targets.clear(), "missing: .* and 21 more"),
    ],
)
@pytest.mark.parametrize("gather", [False, True])
def test_mismatched_weights_are_refused_before_the_first_byte(
    trainer: Trainer, change: Any, match: str, gather: bool
) -> None:
    right, wrong = fresh(MODEL), fresh(MODEL)
    change(wrong)
    before = bits(right)
    with pytest.raises(ValueError, match=match):
        trainer.write_weights([right, wrong], gather)  # the wrong one comes second
    assert bits(right) == before


def test_differing_weights_are_named(trainer: Trainer, engine: Engine) -> None:
    trainer.write_weights([engine.model.parameters])
    (bucket,) = trainer.weight_buckets(1 << 30)
    assert engine.differing_weights(bucket.items()) == []
    bucket["model.norm.weight"][3] = -bucket["model.norm.weight"][3]
    bucket["model.layers.1.mlp.up_proj.weight"] = bucket["model.layers.1.mlp.up_proj.weight"].double()
    wrong = {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}
    assert set(engine.differing_weights(bucket.items())) == wrong
