"""The trainer's weights are written directly into the engine's: bits, checksums, and no staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memsaver
from examples.colocate.engine.decoder import Decoder
from examples.colocate.model import EngineWeights, ModelConfig, checksums, parameter_shapes, weight_layout
from examples.colocate.process_group import join
from examples.colocate.trainer.trainer import Trainer
from examples.colocate.trainer.weights import WeightWriter
from examples.colocate.vllm_engine import Asleep, VllmEngine, _places
from tests.examples.trainer_support import MODEL, PLAIN, samples, weights

MODELS = {
    "qwen3": MODEL,
    "qwen2.5": replace(MODEL, qk_norm=False, qkv_bias=True),
    "llama, tied": replace(MODEL, qk_norm=False, tie_word_embeddings=True),
    "a vocabulary that is not shared": replace(MODEL, vocab_size=17),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    torch.set_num_threads(1)
    return Trainer(MODEL, replace(PLAIN, seed=3), join("cpu"))


def decoders(model: ModelConfig, size: int = 1) -> list[Decoder]:
    """An engine's ranks, in this process, with other weights than the trainer's."""
    region = SimpleNamespace(empty=lambda shape, dtype: torch.full(shape, 7, dtype=dtype))
    ranks: list[Any] = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [Decoder(model, region, region, rank) for rank in ranks]


def shared(decoders: Sequence[Decoder]) -> list[EngineWeights]:
    return [EngineWeights(each.parameters, each.layout) for each in decoders]


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_every_tensor_is_that_of_a_checkpoint_load(model: ModelConfig, size: int) -> None:
    trainer = Trainer(model, replace(PLAIN, seed=3), join("cpu"))
    trainer.warm_up(samples(), 1e-2)  # biases are not zero any more
    for dtype in DTYPES:
        writer, typed = WeightWriter(trainer.model, dtype), replace(model, dtype=dtype)
        full = {name: tensor.to(dtype) for name, tensor in weights(trainer).items()}
        assert {name: tuple(tensor.shape) for name, tensor in full.items()} == parameter_shapes(model)
        expected = decoders(typed, size)
        for each in expected:
            each.load_weights(full.items())
        for gather in (False, True):
            engines = [decoders(typed, size), decoders(typed, size)]
            written = writer.write([rank for engine in engines for rank in shared(engine)], gather)
            assert written == 2 * sum(tensor.nbytes for each in expected for tensor in each.parameters.values())
            for engine in engines:
                for mine, other in zip(engine, expected):
                    assert bits(mine.weights) == bits(other.weights)  # fused, as the forward pass uses them
        for each in expected:
            assert writer.checksums(each.layout) == checksums(each.parameters)


@pytest.mark.parametrize(("size", "calls"), [(1, 1), (2, 4)])
def test_writing_weights_allocates_no_staging_memory(trainer: Trainer, size: int, calls: int) -> None:
    engines = shared(decoders(replace(MODEL, dtype=torch.bfloat16), size))
    writer = WeightWriter(trainer.model, torch.bfloat16)
    known = {tensor.untyped_storage().data_ptr() for engine in engines for tensor in engine.tensors.values()}

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
        writer.write(engines)
    assert (made.calls, made.numel) == (calls, 0)  # one grouped copy for all, and one for slices of columns


def test_gathered_weights_are_cast_before_they_are_sent(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, gather = list[int](), DTensor.full_tensor

    def counting(mine: DTensor) -> Tensor:
        sent.append(mine.to_local().nbytes)
        return gather(mine)

    monkeypatch.setattr(DTensor, "full_tensor", counting)
    WeightWriter(trainer.model, torch.bfloat16).write(
        shared(decoders(replace(MODEL, dtype=torch.bfloat16))), gather=True
    )
    assert sum(sent) == sum(2 * torch.Size(shape).numel() for shape in parameter_shapes(MODEL).values())


def test_a_checksum_sees_one_bit_and_a_step_before(trainer: Trainer) -> None:
    (decoder,) = decoders(MODEL)
    trainer.weights.write(shared([decoder]))

    def differing() -> set[str]:
        expected = trainer.weights.checksums(decoder.layout)
        return {name for name, found in checksums(decoder.parameters).items() if found != expected[name]}

    assert differing() == set()
    decoder.parameters["model.norm.weight"].view(torch.int32)[3] ^= 1
    assert differing() == {"model.norm.weight"}
    trainer.warm_up(samples(), 1e-5)
    assert differing() == decoder.parameters.keys()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_each_weight_has_its_rows_in_the_fused_parameters_of_vllm(model: ModelConfig) -> None:
    shapes, fused = parameter_shapes(model), dict[str, list[Tensor]]()
    expected = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(shapes.items(), start=1)}
    for name, each in expected.items():
        place = name
        for part, whole in {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.items():
            place = place.replace(f".{part}_proj.", f".{whole}_proj.")
        fused.setdefault(place, []).append(each)
    fused["model.embed_tokens.weight"].append(torch.full((3, model.hidden_size), -1.0))  # padding
    parameters = {name: torch.nn.Parameter(torch.cat(parts)) for name, parts in fused.items()}
    layout = weight_layout(model)
    found, padding = _places(SimpleNamespace(named_parameters=parameters.items), layout)  # type: ignore[arg-type]
    assert {name: tuple(each.shape) for name, each in found.items()} == shapes
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert [(each.shape[0], bool((each == -1).all())) for each in padding] == [(3, True)]
    assert found["model.norm.weight"].data_ptr() == parameters["model.norm.weight"].data_ptr()
    for name, text in (("model.norm.weight", "expected those of a dense model"), ("model.layers.0", "rows; expected")):
        other = dict(parameters)
        if name in other:
            del other[name]
        else:
            name = next(each for each in other if each.startswith(name))
            other[name] = torch.nn.Parameter(torch.cat((other[name], other[name])))
        with pytest.raises(ValueError, match=f"{name}.*{text}"):
            _places(SimpleNamespace(named_parameters=other.items), layout)  # type: ignore[arg-type]


def test_vllms_own_sleep_mode_follows_the_pauses_of_its_tags() -> None:
    said = list[Any]()
    llm = SimpleNamespace(sleep=lambda level: said.append(level), wake_up=said.append)
    guests = [Asleep(llm, tag) for tag in VllmEngine.tags]
    memsaver.pause(VllmEngine.tags)
    for each in guests:
        memsaver.resume(each.tags)
    assert said == [1, ["weights"], ["kv_cache"]]
