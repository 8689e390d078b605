"""The config of transformers of a GGUF file of Gemma 4."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmdecode.formats.gguf.common_config import (
    check_all_turned,
    head_size_of,
    plain_rope,
)
from lmdecode.formats.gguf.expert_config import expert_counts
from lmdecode.formats.gguf.facts import Facts, refused

__all__ = ["gemma4", "unused_tensors"]

_UNTURNED = 1e29  # factors above it stand for pairs that are not turned


def _turned_share(facts: Facts, head_size: int) -> float:
    """Return the share of a head that layers without a window turn: a tensor tells."""
    if "rope_freqs.weight" not in facts.file.tensors:
        return 1.0
    factors = facts.file.tensor("rope_freqs.weight")
    assert isinstance(factors, Tensor)
    turned = int((factors == 1).sum())
    is_cut = bool((factors[turned:] > _UNTURNED).all())
    if factors.shape != (head_size // 2,) or not is_cut or not bool((factors[:turned] == 1).all()):
        raise refused(
            facts.file,
            f"has a rope_freqs.weight of shape {list(factors.shape)} with {turned} factors of 1; "
            f"expected [{head_size // 2}], first those of 1, then those of 1e30",
        )
    return 2 * turned / head_size


def _of_kind(facts: Facts, key: str, slides: list[bool], is_sliding: bool, default: int) -> int:
    """Return what layers of a kind have in common."""
    numbers = facts.counts(key, len(slides))
    found = {n for n, s in zip(numbers, slides, strict=True) if s == is_sliding} or {default}
    if len(found) > 1:
        raise refused(
            facts.file, f"has {sorted(found)} for {key} of layers of a kind; expected one number"
        )
    return found.pop()


def _ffn(facts: Facts, layers: int, shared: int) -> dict[str, Any]:
    sizes = facts.counts("feed_forward_length", layers)
    size = sizes[0]
    for factor in (1, 2):
        if sizes == [size] * (layers - shared) + [factor * size] * shared:
            return {"intermediate_size": size, "use_double_wide_mlp": factor == 2}
    raise refused(
        facts.file,
        f"has {sizes} inner features; expected the same in all layers, or twice of these in those "
        "without keys of their own",
    )


def _experts(facts: Facts) -> dict[str, Any]:
    if not facts.count("expert_count", 0, least=0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        **expert_counts(facts, chosen_name="top_k_experts"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
    }


def _softcap(facts: Facts) -> float | None:
    """Return what caps logits: 0 stands for nothing, and nothing for 30."""
    key = "final_logit_softcapping"
    is_none = facts.has(key) and facts.file.metadata[f"gemma4.{key}"] == 0
    return None if is_none else facts.number(key, 30.0)


def _shared_layers(facts: Facts, layers: int) -> int:
    """Return how many layers at the end take keys and values of those before them."""
    shared = facts.count("attention.shared_kv_layers", 0, least=0)
    if shared >= layers:
        raise refused(
            facts.file,
            f"has {shared} for gemma4.attention.shared_kv_layers; expected fewer than its "
            f"{layers} layers",
        )
    return shared


def _per_layer_size(facts: Facts, layers: int) -> int:
    """Return what a token gives to each layer: a row of the second table has it for all."""
    size = facts.count("embedding_length_per_layer_input", 0, least=0)
    if size and (columns := facts.shape("per_layer_token_embd.weight")[-1]) != layers * size:
        raise refused(
            facts.file,
            f"has a per_layer_token_embd.weight of {columns} columns; expected {layers} layers "
            f"of {size}",
        )
    return size


def unused_tensors(config: Any) -> set[str]:
    """Return tensors that a file may have: keys and values of layers that take those of others."""
    layers = range(config.num_hidden_layers)[
        config.num_hidden_layers - config.num_kv_shared_layers :
    ]
    names = ("attn_k", "attn_k_norm", "attn_v")
    return {f"blk.{i}.{name}.weight" for i in layers for name in names}


def gemma4(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Gemma 4's text."""
    vocab_size, size = facts.shape("token_embd.weight")
    tensors, layers = facts.file.tensors, facts.count("block_count")
    shared = _shared_layers(facts, layers)
    slides = [bool(s) for s in facts.counts("attention.sliding_window_pattern", layers)]
    head_size, global_size = head_size_of(facts, suffix="_swa"), head_size_of(facts)
    check_all_turned(facts, "rope.dimension_count_swa", head_size)
    first_full = slides.index(False) if False in slides else 0
    heads = facts.count("attention.head_count")
    kv_heads = _of_kind(facts, "attention.head_count_kv", slides, True, heads)
    global_heads = _of_kind(facts, "attention.head_count_kv", slides, False, kv_heads)
    keys_are_values = False in slides and f"blk.{first_full}.attn_v.weight" not in tensors
    # A count of its own goes with these alone in transformers' config.
    heads_of_full = {"num_key_value_heads": global_heads, "head_dim": global_size}
    return {
        "model_type": "gemma4_text",
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": size,
        "num_hidden_layers": layers,
        **_ffn(facts, layers, shared),
        **_experts(facts),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "per_layer_config": {i: heads_of_full for i, s in enumerate(slides) if not s},
        "max_position_embeddings": facts.count("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_size_per_layer_input": _per_layer_size(facts, layers),
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": shared,
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "final_logit_softcapping": _softcap(facts),
        "use_bidirectional_attention": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", 1e4),
            },
            "full_attention": {
                **plain_rope(facts, global_size),
                "rope_type": "proportional",
                "partial_rotary_factor": _turned_share(facts, global_size),
            },
        },
    }
