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


def test_benchmark_options_reach_the_engine(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    build = benchmark.build_engine

    def spy(*given: Any) -> Any:
        made = build(*given)
        seen.append((made[0].config, made[2]))
        return made

    monkeypatch.setattr(benchmark, "build_engine", spy)
    common = ("--model", str(checkpoint), *SMALL, *ONCE)
    figures(capsys, *common)
    row = figures(
        capsys, *common, "--no-cuda-graph", "--no-paged-attn", "--no-prefix-cache", "--no-stop-on-eos", "--no-regions",
        "--graph-sizes", "1,3", "--dtype", "bfloat16",
    )  # fmt: skip
    (default, asked), (changed, asked_without) = seen
    assert default.use_graphs and default.use_kernel and default.prefix_cache and default.use_regions
    assert not (changed.use_graphs or changed.use_kernel or changed.prefix_cache or changed.use_regions)
    assert changed.batch_sizes() == (1, 3)
    assert (asked.stop_tokens, asked_without.stop_tokens) == ((2,), ())
    assert row["captures"] == row["verified"] == []
    assert "paused_bytes" not in row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-requests", "0"], "--num-requests: '0', expected an integer of 1 or more"),
        (["--repeat-runs", "-1"], "expected an integer of 1 or more"),
        (["--block-size", "x"], "--block-size: 'x', expected"),
        (["--request-rate", "0"], "--request-rate: '0', expected a positive number"),
        (["--graph-sizes", "1,abc"], "--graph-sizes: 'abc', expected"),
    ],
)
def test_wrong_options_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(options)
    assert said in capsys.readouterr().err


def test_errors_of_the_engine_end_the_benchmark_with_their_text(checkpoint: Path) -> None:
    common = ["--model", str(checkpoint), *SMALL]
    with pytest.raises(SystemExit, match="a size in graph_batch_sizes is 9; expected an integer from 1 to 3"):
        benchmark.main([*common, "--graph-sizes", "9"])
    with pytest.raises(SystemExit, match="free"):  # the needed bytes, the free bytes, and the holders of the rest
        benchmark.main([*common, "--num-blocks", "1000000000"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "tpu"], "--device is 'tpu'; expected 'cpu', 'cuda'"),
        (["--temperature", "-1"], "temperature is -1.0; expected"),
        (["--prompt", ""], "prompt has 0 tokens; expected 1 to"),
        (["--num-blocks", "2", "--block-size", "2"], "a request of up to .* needs .* KV blocks; expected at most"),
        (["--max-new-tokens", "1000"], "make 10.. tokens; expected at most the model's 64"),
    ],
)
def test_impossible_request_options_end_the_benchmark_with_an_error(
    checkpoint: Path, options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        benchmark.main(["--model", str(checkpoint), *SMALL, *options])


def test_steps_are_profiled_and_without_graphs_nothing_is_verified(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(checkpoint), *SMALL, *ONCE, "--verify", "--profile", "2"]
    benchmark.main(arguments)
    said = capsys.readouterr().out.splitlines()
    assert "nothing to verify without graphs" in said
    row = json.loads(said[-1])
    assert row["profile"]["size"] == 3 and not row["profile"]["by_graph"] and row["profile"]["kernels"]


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a checkpoint's folder, or one of gpt2, qwen3-0.6b"):
        benchmark.main(["--model", str(tmp_path / "none"), "--device", "cpu"])
