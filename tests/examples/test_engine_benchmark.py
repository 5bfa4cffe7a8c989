"""The engine's benchmark as a command, on a checkpoint of a tiny model."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="needs safetensors")

from safetensors.torch import save_file

from examples.colocate.engine import benchmark
from examples.colocate.model import ModelConfig, parameter_shapes

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SMALL = [
    "--device",
    "cpu",
    "--num-requests",
    "5",
    "--max-batch-size",
    "3",
    "--max-new-tokens",
    "7",
    "--block-size",
    "4",
]
ONCE = ["--warmup-runs", "0", "--repeat-runs", "1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    more = {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**SIZES, **more, "torch_dtype": "float32"}))
    model = ModelConfig(300, 32, 2, 4, 2, 16, 48, 64)
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(model).items()
    save_file({name: torch.randn(shape, generator=generator) for name, shape in shapes}, folder / "model.safetensors")
    return folder


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    benchmark.main(list(arguments))
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_an_offline_benchmark_reports_its_figures(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[benchmark.Run] = []
    serve = benchmark.serve

    def kept(*given: Any) -> benchmark.Run:
        runs.append(serve(*given))
        return runs[-1]

    monkeypatch.setattr(benchmark, "serve", kept)
    row = figures(capsys, "--model", str(checkpoint), *SMALL, "--no-stop-on-eos", "--repeat-runs", "2")
    assert len(runs) == 3  # the first is to warm up
    counted = [run.figures() for run in runs[1:]]
    for each in counted:
        assert each["completion_tokens"] == 5 * 7
        assert each["tokens_per_s_total"] == pytest.approx(35 / each["total_s"])
        assert 0 < each["decode_s"] <= each["total_s"]
        assert 0 < each["ttft_p50_ms"] <= each["latency_p50_ms"] <= 1e3 * each["total_s"]
        assert each["tpot_mean_ms"] > 0
    # Each figure is the median over the runs by itself: ratios of two of them are no figure of any run.
    assert {name: row[name] for name in counted[0]} == {
        name: statistics.median(each[name] for each in counted) for name in counted[0]
    }
    assert row["paused_bytes"] < row["active_bytes"]


def test_online_requests_are_timed_from_their_arrival(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mode", "online", "--request-rate", "200", "--prompt-tokens", "9", "--temperature", "1", "--pretok")
    row = figures(capsys, "--model", str(checkpoint), *SMALL, *ONCE, *options, "--no-stop-on-eos")
    assert row["completion_tokens"] == 5 * 7
    assert row["latency_p50_ms"] >= row["ttft_p50_ms"] > 0
