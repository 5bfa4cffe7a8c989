"""Makes a cache of Hugging Face's hub in which AReaL's test finds its models without a network.

    python model.py AREAL HF_HOME

AREAL: a checkout of AReaL. The model of the test, Qwen/Qwen3-0.6B, gets random weights, the layers of the original, a
vocabulary of 8,192, and a tokenizer of a few words. AReaL's helper module asks for the paths of more models at its
import: they get empty folders. A model that exists is kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MODEL = "Qwen/Qwen3-0.6B"
REVISION = "0" * 40
PATHS = "areal/utils/testing_utils.py"  # it has the names of all models


def folder(home: Path, model: str) -> Path:
    """Makes the folder of a model in the cache, at the revision that `main` names."""
    repository = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


def make_model(target: Path) -> None:
    """Saves a random Qwen3 model of 450 million parameters, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "one": 3, "two": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(target)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)


def main() -> None:
    areal, home = Path(sys.argv[1]), Path(sys.argv[2])
    names = set(re.findall(r'"(Qwen/[^"]+)"', (areal / PATHS).read_text()))
    if MODEL not in names:
        raise ValueError(f"expected {MODEL} in {PATHS}, found {sorted(names)}")
    for name in sorted(names):
        folder(home, name)
    target = folder(home, MODEL)
    if not (target / "complete").exists():
        make_model(target)
        (target / "complete").touch()


if __name__ == "__main__":
    main()
