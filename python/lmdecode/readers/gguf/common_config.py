"""Config entries that several architectures of GGUF files share: sizes, heads, rotary, experts."""

from __future__ import annotations

import math
from typing import Any

from lmdecode.readers.gguf.metadata import Facts, refused

__all__ = [
    "check_all_turned",
    "common",
    "expert_counts",
    "expert_size",
    "has_query_bias",
    "head_size_of",
    "layer_types",
    "layers_without_experts",
    "plain_rope",
    "rope_of",
]


def common(facts: Facts) -> dict[str, Any]:
    """Return the config entries that all models have."""
    vocab_size, size = facts.shape("token_embd.weight")
    return {
        "vocab_size": vocab_size,
        "hidden_size": size,
        "max_position_embeddings": facts.count("context_length"),
        "num_attention_heads": facts.size("attention.head_count"),
        "tie_word_embeddings": "output.weight" not in facts.file.tensors,
    }


def head_size_of(facts: Facts, default: int | None = None, suffix: str = "") -> int:
    """Return the features of a head of keys, which are those of values; ``suffix``: of the keys."""
    size = facts.size(f"attention.key_length{suffix}", default)
    if (values := facts.size(f"attention.value_length{suffix}", size)) != size:
        raise refused(facts.file, f"has values of {values} features; expected keys', {size}")
    return size


def check_all_turned(facts: Facts, key: str, head_size: int) -> None:
    """Refuse a file that turns a part of a head alone."""
    if (turned := facts.size(key, head_size)) != head_size:
        raise refused(
            facts.file, f"turns {turned} of {head_size} features of a head; expected all of them"
        )


def rope_of(facts: Facts, head_size: int | None = None) -> dict[str, Any]:
    """Return a rotary embedding as llama.cpp reads it, of all of a head where its size is given.

    A factor without a type is linear; yarn without a length takes the context's. Llama 3's factors
    are a tensor: see model.
    """
    if head_size is not None:
        check_all_turned(facts, "rope.dimension_count", head_size)
    kind = facts.text("rope.scaling.type", "linear")
    kind = "longrope" if "rope_factors_long.weight" in facts.file.tensors else kind
    if kind not in ("none", "linear", "yarn"):
        raise refused(
            facts.file,
            f"has a rotary embedding of the type {kind!r}; expected none, linear or yarn, whose "
            "frequencies do not depend on the length of the text",
        )
    is_stated = facts.has("rope.scaling.type") and kind != "none"
    is_old = facts.has("rope.scale_linear") and not facts.has("rope.scaling.factor")
    key = "rope.scale_linear" if is_old else "rope.scaling.factor"
    factor = facts.number(key, None if is_stated else 1.0)
    of_yarn = 1.0 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1.0 else 1.0
    for key in ("yarn_attn_factor", "yarn_ext_factor", "attn_factor"):
        stated = facts.number(f"rope.scaling.{key}", 1.0)
        # Files of OLMo 3 state what yarn has anyway.
        is_yarns = key == "yarn_attn_factor" and math.isclose(stated, of_yarn, rel_tol=1e-6)
        if stated != 1.0 and not is_yarns:
            raise refused(facts.file, f"has a rope.scaling.{key} other than 1; expected 1")
    length = facts.count("rope.scaling.original_context_length", facts.count("context_length"))
    yarn: dict[str, Any] = {"original_max_position_embeddings": length}
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        yarn[name] = facts.number(f"rope.scaling.yarn_{name}", default)
    rope = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 1e4)}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    return {**rope, **(yarn if kind == "yarn" else {}), "rope_type": kind, "factor": factor}


def plain_rope(facts: Facts, head_size: int | None = None) -> dict[str, Any]:
    """Return a rotary embedding without scaling: see ``rope_of``."""
    rope = rope_of(facts, head_size)
    if (kind := rope["rope_type"]) != "default":
        raise refused(facts.file, f"has a rotary embedding of the type {kind!r}; expected none")
    return rope


def layer_types(facts: Facts, layers: int, period: int) -> list[str]:
    """Return which layers have a window: by the file's list, or all but the last of a period."""
    key = "attention.sliding_window_pattern"
    if facts.is_list(key):
        slides = [s != 0 for s in facts.counts(key, layers)]
    else:
        period = facts.count(key, period, least=0)
        slides = [period == 0 or i % period < period - 1 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def has_query_bias(facts: Facts) -> bool:
    """Whether queries have a bias, in a tensor of their own or in one with keys and values."""
    return any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in facts.file.tensors)


def expert_counts(
    facts: Facts, name: str = "num_experts", chosen_name: str = "num_experts_per_tok"
) -> dict[str, int]:
    """Return the config entries of a layer's experts and of a token's, by these names."""
    count = facts.size("expert_count")
    chosen = facts.count("expert_used_count")
    if chosen > count:
        raise refused(facts.file, f"has {chosen} experts of a token; expected at most {count}")
    return {name: count, chosen_name: chosen}


def expert_size(facts: Facts, kind: str = "exps") -> int:
    """Return the inner features of an expert, or of a shared one: files need not tell."""
    return facts.shape(facts.of_first_layer(f"ffn_down_{kind}.weight"))[-1]


def layers_without_experts(facts: Facts, layers: int) -> list[int]:
    """Return the indices of the layers that have no router."""
    tensors = facts.file.tensors
    return [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in tensors]
