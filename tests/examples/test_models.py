"""Models from checkpoints that transformers wrote, against the results of transformers."""

from __future__ import annotations

import functools
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.colocate.engine.decoder import Decoder
from examples.colocate.model.folder import FolderError, load_config, load_parameters
from tests.examples.engine_support import CPU, DenseAttention
from tests.examples.model_support import LLAMA3, save_model

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough for clear winners among the logits
}
# Class of transformers, its configuration, how it is saved.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
    "qwen2 tied sharded": ("Qwen2", {"tie_word_embeddings": True}, {"max_shard_size": "10KB"}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
    "qwen3 tied sharded": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {"max_shard_size": "10KB"}),
    "llama": ("Llama", {"rms_norm_eps": 1e-5}, {}),
    "llama tied llama3": ("Llama", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3}, {}),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
Save = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A case's checkpoint, written once, and its model."""

    @functools.cache
    def make(case: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Any]:
        kind, settings, saving = CASES[case]
        folder = tmp_path_factory.mktemp("checkpoint")
        more = {"attn_implementation": "eager", "bos_token_id": 0, "eos_token_id": [7, 8]}
        reference = save_model(folder, kind, saving, **SIZES, **settings, **more)
        if dtype != torch.float32:
            for parameter in reference.parameters():  # these alone: rotary frequencies stay exact
                parameter.data = parameter.data.to(dtype)
            reference.save_pretrained(folder, **saving)
        return folder, reference

    make("qwen3")
    gc.freeze()  # objects of the imports stay out of each test's collection
    return make


@pytest.fixture
def qwen3(saved: Save, tmp_path: Path) -> Path:
    """A sharded checkpoint, in a folder of the test's own."""
    return Path(shutil.copytree(saved("qwen3 tied sharded")[0], tmp_path / "checkpoint"))


def loaded(folder: Path, dtype: torch.dtype | None = None) -> Decoder:
    model = Decoder(load_config(folder, dtype), CPU, CPU)
    load_parameters(model.parameters, folder)
    return model


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ... removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


@torch.no_grad()
def check_against(reference: Any, model: Decoder, atol: float = 1e-5) -> None:
    """Logits of a prefill in two parts and of decode steps, and the greedy tokens."""
    tokens, attention, parts = list(PROMPT), DenseAttention(), []
    for start, stop in ((0, 12), (12, len(PROMPT)), *((at, at + 1) for at in range(len(PROMPT), len(PROMPT) + 10))):
        hidden = model.forward(torch.tensor(tokens[start:stop]), torch.arange(start, stop), attention)
        parts.append(model.logits(hidden))
        if stop >= len(PROMPT):
            tokens.append(int(parts[-1][-1].argmax()))
    logits = torch.cat(parts).float()
    expected = reference(torch.tensor([tokens[:-1]])).logits[0].float()
    assert expected.std() > 0.2  # something to compare
    torch.testing.assert_close(logits, expected, atol=atol * max(1.0, float(expected.std())), rtol=0)
    if atol < 1e-3:
        assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(saved: Save, case: str) -> None:
    folder, reference = saved(case)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("sharded" in case)
    check_against(reference, loaded(folder))


@pytest.mark.parametrize("case", ["qwen2", "llama tied llama3"])
def test_a_bf16_checkpoint_loads(saved: Save, case: str) -> None:
    folder, reference = saved(case, torch.bfloat16)
    model = loaded(folder)
    assert {weight.dtype for weight in model.weights.values()} == {torch.bfloat16}
    check_against(reference.float(), model, atol=0.1)  # the same weights; rounding is all that differs
    check_against(reference, loaded(folder, torch.float32))  # converted on the way in


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma", "layer_types": ...}, "model_type is 'gemma'; expected one of qwen2, qwen3, llama"),
        ({"attention_bias": True}, "attention_bias is True; expected False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; expected 'default' or 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"dtype": "float64"}, "dtype is torch.float64; expected one of torch.float32, torch.bfloat16"),
        ({"vocab_size": "61"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads, 3"),
    ],
)
def test_an_unsupported_config_raises(qwen3: Path, changes: dict[str, Any], message: str) -> None:
    edit(qwen3 / "config.json", **changes)
    with pytest.raises(FolderError, match=message) as raised:
        load_config(qwen3)
    assert str(qwen3) in str(raised.value)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: next(folder.glob("*2-of*.safetensors")).unlink(), "safetensors: rank 0: .*Missing key"),
        (lambda folder: _truncate(next(folder.glob("*2-of*.safetensors"))), "expected .* in safetensors"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "expected the config.json of a model"),
        (lambda folder: folder.rename(folder.with_name("elsewhere")), "expected the config.json of a model"),
    ],
)
def test_a_broken_checkpoint_raises(qwen3: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(qwen3)
    with pytest.raises(FolderError, match=message):
        loaded(qwen3)
