"""The configs of transformers of GGUF files with layers of Mamba-2."""

from __future__ import annotations

from typing import Any

from lmdecode.formats.gguf.common_config import (
    common,
    has_query_bias,
    head_size_of,
    plain_rope,
)
from lmdecode.formats.gguf.expert_config import expert_counts
from lmdecode.formats.gguf.facts import Facts, refused
from lmdecode.formats.gguf.state_configs import key_heads_of

__all__ = ["falcon_h1", "granite_scales", "granitehybrid"]


def granite_scales(facts: Facts, head_size: int) -> dict[str, float]:
    """Return the factors that all kinds of Granite have."""
    return {
        "attention_multiplier": facts.number("attention.scale", head_size**-0.5),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _any(facts: Facts, ending: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(ending) for name in facts.file.tensors)


def _sizes(facts: Facts) -> dict[str, int]:
    """Return the sizes of Mamba-2: rows of its projection must be what they say.

    Else products of large ones would be a vector of their size in a model without weights.
    """
    inner, heads = facts.size("ssm.inner_size"), facts.size("ssm.time_step_rank")
    groups, state = facts.size("ssm.group_count"), facts.size("ssm.state_size")
    for whole, part, what in (
        (inner, heads, "heads of Mamba-2"),
        (heads, groups, "groups of its heads of Mamba-2"),
    ):
        if whole % part:
            raise refused(facts.file, f"has {part} {what}; expected a divisor of {whole}")
    name = facts.of_first_layer("ssm_in.weight")
    expected = 2 * (inner + groups * state) + heads
    if (rows := facts.shape(name)[0]) != expected:
        raise refused(
            facts.file,
            f"has {name} of {rows} rows; expected {expected}, of {inner} features, {groups} groups "
            f"with states of {state}, and {heads} heads",
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
    }


def _common(facts: Facts) -> dict[str, Any]:
    """Return what both models have: sizes, and heads of attention and of Mamba-2."""
    entries = common(facts)
    size, heads = entries["hidden_size"], entries["num_attention_heads"]
    return {
        **entries,
        "num_hidden_layers": facts.count("block_count"),
        "head_dim": head_size_of(facts, max(1, size // heads)),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": has_query_bias(facts),
        **_sizes(facts),
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_conv_bias": _any(facts, ".ssm_conv1d.bias"),
        "mamba_proj_bias": False,
    }


def granitehybrid(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Granite 4; layers without key heads are Mamba-2."""
    size, inner = facts.count("embedding_length"), facts.size("ssm.inner_size")
    if inner % size:
        raise refused(
            facts.file, f"has an ssm.inner_size {inner}; expected a multiple of its {size} features"
        )
    entries = _common(facts)
    key_heads, heads = key_heads_of(facts, entries["num_hidden_layers"])
    rope: dict[str, Any] = {"rope_parameters": plain_rope(facts, entries["head_dim"])}
    turns = facts.flag("rope.scaling.finetuned", True)  # llama.cpp's switch of positions
    rope["position_embedding_type"] = "rope" if turns else None
    inner_features = facts.count("feed_forward_length")
    ffn: dict[str, Any] = {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": inner_features,
    }
    if facts.count("expert_count", 0, least=0):
        ffn = {
            **expert_counts(facts, "num_local_experts"),
            "shared_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        }
    return {
        **entries,
        **rope,
        **ffn,
        **granite_scales(facts, entries["head_dim"]),
        "model_type": "granitemoehybrid",
        "intermediate_size": inner_features,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if some else "linear_attention" for some in key_heads],
        "mamba_expand": inner // size,
    }


def falcon_h1(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Falcon-H1; its multipliers are in the weights: all are 1."""
    entries = _common(facts)
    return {
        **entries,
        "model_type": "falcon_h1",
        "intermediate_size": facts.count("feed_forward_length"),
        "num_key_value_heads": facts.size("attention.head_count_kv"),
        "mlp_bias": _any(facts, ".ffn_up.bias"),
        "mamba_d_ssm": facts.size("ssm.inner_size"),
        "mamba_rms_norm": _any(facts, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # in llama.cpp, too, whatever the model
        "projectors_bias": False,
        "rope_parameters": plain_rope(facts, entries["head_dim"]),
    }
