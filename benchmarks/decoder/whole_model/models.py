"""The models: shapes of known ones with random weights, in folders that every engine reads."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder.whole_model.process import peers_folder

_SEED = 1
_CHECKED_TOKENS, _CHECKED_STEPS = 64, 3
BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 4.5}  # of a weight, scales counted

_QWEN: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# Next to nothing but attention.
_SLIM = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "A": _QWEN,
    "B": _LLAMA,
    "tiny": {
        **_QWEN, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "A, window": {
        **_QWEN, "num_hidden_layers": 4, "vocab_size": 1024, "use_sliding_window": True,
        "sliding_window": 1024, "max_window_layers": 0,
    },
    "A, 6 layers": {**_QWEN, "num_hidden_layers": 6},
    "heads of A": {
        **_LLAMA, **_SLIM, "num_hidden_layers": 24, "hidden_size": 112,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "heads of B": {**_LLAMA, **_SLIM},
}  # fmt: skip


def prompt(name: str, length: int) -> list[int]:
    """Return random tokens of a model, the same ones in every run."""
    vocab = MODELS[name]["vocab_size"]
    generator = random.Random(5)
    return [generator.randrange(3, vocab) for _ in range(length)]


def linear_weights(name: str) -> int:
    """Count the weights that a token is multiplied with, those of the head included."""
    c = MODELS[name]
    size, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head_size = c.get("head_dim", size // heads)
    attention = 2 * heads * head_size + 2 * kv_heads * head_size
    layer = size * (attention + 3 * c["intermediate_size"])
    return c["num_hidden_layers"] * layer + c["vocab_size"] * size


def products_of_prompt(name: str, tokens: int) -> int:
    """Count the products with weights that are done for the logits behind a prompt.

    What follows the attention of the last layer is done for the last token alone.
    """
    c = MODELS[name]
    size, heads = c["hidden_size"], c["num_attention_heads"]
    queries = heads * c.get("head_dim", size // heads)
    last = size * (queries + 3 * c["intermediate_size"] + c["vocab_size"])
    return tokens * (linear_weights(name) - last) + last


def cache_values(name: str) -> int:
    """Count the keys and values of a position, all layers."""
    c = MODELS[name]
    head_size = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_size


def bytes_of_step(name: str, number_format: str, rows: int, keys: int) -> int:
    """Count what a step has to read: weights, and the keys and values of its rows."""
    cached = 4 if number_format == "float32" else 2
    weights = linear_weights(name) * BITS[number_format] / 8
    return math.ceil(weights) + rows * keys * cache_values(name) * cached


def make_config(name: str) -> Any:
    """Return the ``transformers`` config."""
    from transformers import AutoConfig

    settings = dict(MODELS[name])
    theta, scaling = settings.pop("rope_theta"), settings.pop("rope_scaling", {})
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **scaling}
    settings |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lmdecode-whole-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model_folder(name: str) -> Path:
    """Return a folder with the model, written where it is not there yet.

    It stays where peers have a folder; else it is gone with this process.
    """
    kept = peers_folder()
    settings = json.dumps([MODELS[name], _SEED, _CHECKED_TOKENS, _CHECKED_STEPS], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
    root = kept / "models" if kept else _scratch()
    folder = root / f"{name.replace(', ', '_').replace(' ', '_')}-{digest}"
    if not (folder / "expected.npz").exists():
        _write(name, folder)
    return folder


@torch.no_grad()
def _write(name: str, folder: Path) -> None:
    """Write random weights, and what float32 gives for some tokens: by transformers."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32).eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("norm.weight"):
            value.uniform_(0.8, 1.2)
        elif parameter.endswith("bias"):
            value.normal_(0, 0.02)
    model.save_pretrained(folder)
    # Older transformers, which some peers bring, have other names for the rotary embedding.
    file = folder / "config.json"
    config = json.loads(file.read_text())
    names = ("rope_theta", "rope_scaling")
    config |= {key: MODELS[name][key] for key in names if key in MODELS[name]}
    file.write_text(json.dumps(config, indent=1))
    tokens = prompt(name, _CHECKED_TOKENS)
    logits = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].numpy()
    np.savez(folder / "expected.npz", tokens=tokens, steps=_CHECKED_STEPS, logits=logits)
