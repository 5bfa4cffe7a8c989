"""Small and large models of random weights for vLLM: their directories, and their weights by name in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEAD = 128  # elements of an attention head
KV_HEADS = 8
LORA_RANK = 8
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

WAYS = {"vllm": {"MEMSAVER_DROP_IN": ""}, "memsaver": {"MEMSAVER_DROP_IN": "vllm"}}
"""Variables of vLLM's own sleep mode, and of the drop-in."""

UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
"""vLLM's compilation_config: graphs of decode steps, and no torch.compile. Engines start sooner."""


def prompt(number: int) -> list[int]:
    """Tokens that every model has."""
    return [(number * 7919 + at * 104729) % 31000 + 5 for at in range(64)]


@dataclass(frozen=True)
class Model:
    """The shape of a model, and the options that its engine needs."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 32000
    tied: bool = True
    experts: int = 0
    lora: bool = False
    kv_cache_dtype: str = "auto"

    def config(self) -> dict[str, Any]:
        """config.json."""
        found: dict[str, Any] = {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD, "vocab_size": self.vocabulary, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": self.tied,
            "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        if self.experts:
            found |= {
                "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": self.experts,
                "num_experts_per_tok": 2, "moe_intermediate_size": self.intermediate, "decoder_sparse_step": 1,
                "norm_topk_prob": True, "mlp_only_layers": [],
            }  # fmt: skip
        return found

    def engine_options(self) -> dict[str, Any]:
        """Arguments of vllm.LLM."""
        lora = {"enable_lora": True, "max_lora_rank": LORA_RANK} if self.lora else {}
        return {"kv_cache_dtype": self.kv_cache_dtype, **lora}

    def write(self, directory: str) -> None:
        """Writes config.json and a tokenizer whose tokens are numbers."""
        Path(directory, "config.json").write_text(json.dumps(self.config()))
        vocabulary = {f"t{number}": number for number in range(self.vocabulary)}
        splits = {"type": "WhitespaceSplit"}
        tokenizer: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": splits, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        }  # fmt: skip
        Path(directory, "tokenizer.json").write_text(json.dumps(tokenizer))
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
        Path(directory, "tokenizer_config.json").write_text(json.dumps(described))

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a checkpoint's weights. Not for mixtures of experts."""
        assert not self.experts
        width, kv_width = self.heads * HEAD, KV_HEADS * HEAD
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            each = f"model.layers.{layer}."
            yield each + "input_layernorm.weight", (self.hidden,)
            yield each + "self_attn.q_proj.weight", (width, self.hidden)
            yield each + "self_attn.k_proj.weight", (kv_width, self.hidden)
            yield each + "self_attn.v_proj.weight", (kv_width, self.hidden)
            yield each + "self_attn.q_norm.weight", (HEAD,)
            yield each + "self_attn.k_norm.weight", (HEAD,)
            yield each + "self_attn.o_proj.weight", (self.hidden, width)
            yield each + "post_attention_layernorm.weight", (self.hidden,)
            yield each + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield each + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield each + "mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def nbytes(self) -> int:
        """Of a checkpoint."""
        return sum(2 * math.prod(shape) for _, shape in self.shapes())

    def weights(self, version: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The random weights of a version, by their names in a checkpoint. Equal in each process."""
        generator = torch.Generator(device=device)
        for number, (name, shape) in enumerate(self.shapes()):
            generator.manual_seed(version * 1_000_003 + number)
            weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            yield name, (weight * 0.02 if len(shape) > 1 else 1 + weight * 0.1).to(torch.bfloat16)

    def write_lora_configs(self, directory: str, device: str) -> None:
        """Writes configs of vLLM's LoRA kernels that add nothing by atomics, for VLLM_TUNED_CONFIG_FOLDER.

        vLLM's own split the sum of a shrink over 8 or 64 programs, whose order differs from call to call.
        """
        shrink = {"block_m": 32, "block_n": 16, "block_k": 256, "split_k": 1, "num_warps": 4, "num_ctas": 1,
                  "group_size_m": 8, "num_stages": 2, "max_nreg": None}  # fmt: skip
        # By tokens, input and output. vLLM takes the nearest.
        by_shape = {"1": {str(self.hidden): {str(LORA_RANK): shrink}}}
        by_slices = {str(slices): by_shape for slices in (1, 2, 3)}  # of a fused projection
        name = device.replace(" ", "_").replace("-", "_")
        Path(directory, f"{name}_SHRINK.json").write_text(json.dumps({"1": by_slices}))

    def write_adapter(self, directory: str) -> str:
        """Writes a LoRA adapter of random weights. Returns its directory."""
        from safetensors.torch import save_file

        adapter = Path(directory, "adapter")
        adapter.mkdir(exist_ok=True)
        described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK,
                     "lora_dropout": 0.0, "bias": "none", "target_modules": list(LORA_TARGETS)}  # fmt: skip
        Path(adapter, "adapter_config.json").write_text(json.dumps(described))
        generator = torch.Generator().manual_seed(11)
        tensors = {}
        for name, shape in self.shapes():
            if any(target in name for target in LORA_TARGETS):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                for part, size in {"lora_A": (LORA_RANK, shape[1]), "lora_B": (shape[0], LORA_RANK)}.items():
                    tensors[f"{stem}.{part}.weight"] = torch.randn(size, generator=generator).mul(0.05).bfloat16()
        save_file(tensors, str(Path(adapter, "adapter_model.safetensors")))
        return str(adapter)


MODELS = {
    "tiny": Model(1024, 3072, 8, 16),
    "fp8-kv-cache": Model(1024, 3072, 8, 16, kv_cache_dtype="fp8"),
    "lora": Model(1024, 3072, 8, 16, lora=True),
    "moe": Model(1024, 768, 8, 16, experts=16),
    "wide": Model(4096, 12288, 12, 32),
    "qwen3-0.6b": Model(1024, 3072, 28, 16, vocabulary=151936),
    "qwen3-8b": Model(4096, 12288, 36, 32, vocabulary=151936, tied=False),
}
